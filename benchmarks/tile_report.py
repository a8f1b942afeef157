"""The report of ``benchmarks.tile_ops``: tables for each operator, what was wanted beside what was measured, and a plot."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import tile_plot
from benchmarks.common import Machine, Ratio, Table, today, write_report
from benchmarks.tile_figures import CAPTURED, EAGER, Bound, Measured, geometric_mean, middle
from benchmarks.tile_rows import A2A, AG, AR, COPIES, CROSSFADE, CUBLAS, FUSED, NCCL, RS, SERIAL, SHARED
from benchmarks.workers import without_folders

__all__ = ["MACHINE", "operators_of", "publish", "summary", "tables", "text_of"]

MACHINE = "machine"
"""The key of lines that say where and how rows were measured."""
WANTED = {
    RS: (1.20, 1.05, 0.85, 0.98),
    AR: (1.20, 1.05, 0.85, 0.98),
    AG: (1.12, None, None, 0.98),
    A2A: (1.12, None, None, 0.98),
}
"""Geometric means over cuBLAS + NCCL and over the best baseline, median share of the bound, least over the best baseline."""
US_PER_MS = 1e3


def text_of(lines: Sequence[Mapping[str, Any]], method: str = "", note: str = "", plot: str = "") -> str:
    """The report in Markdown.

    Args:
        lines: of the file.
        method: how it was measured.
        note: a sentence for its head.
        plot: the file name of the plot, if there is one.
    """
    machines = list(dict.fromkeys(line[MACHINE] for line in lines if MACHINE in line))
    commands = list(dict.fromkeys(without_folders(line["command"]) for line in lines if MACHINE in line))
    heads = [
        "# Products with their collectives",
        *(f"{machine}. {today()}." for machine in machines),
        "\n".join(f"- `{command}`" for command in commands),
        method.partition("\n")[2].strip(),
        _explained(),
    ]
    if note:
        heads.append(note)
    if plot:
        heads.append(f"![Times faster than cuBLAS + NCCL, by row]({plot})")
    found = _measured(lines)
    bodies = [table.markdown() for table in tables(found)]
    bodies += _lists(found, lines)
    return "\n\n".join(part for part in [*heads, *bodies] if part) + "\n"


def _explained() -> str:
    bound = " ".join((Bound.__doc__ or "").split("Attributes:")[0].split())
    return (
        f"*Bound*: {bound[0].lower()}{bound[1:]} T_gemm is cuBLAS's, T_comm that of NCCL or of crossfade's copy engines, whichever "
        "is faster, both of this run; a piece is the rows of a wave of tiles of 128 x 256, or a rank's block if that is less, and "
        "takes its share of either. *chunked* is torch's product and collective in pieces; *plain* and *fused* are candidates that "
        "are torch's own ways; with the bare calls they are the baselines. *crossfade* is the operator as a user calls it, without "
        "candidate, tuned in this run (eager); it *fell back* where the tuner chose a baseline. *Shared out*: with an output that "
        "all ranks can write. Predicted times of graphs are without launches."
    )


def _measured(lines: Sequence[Mapping[str, Any]]) -> list[Measured]:
    return [Measured.of(line) for line in lines if "sides" in line]


def operators_of(found: Sequence[Measured]) -> list[str]:
    """Those that there are rows of."""
    return list(dict.fromkeys(each.row.operator for each in found))


def tables(found: Sequence[Measured]) -> list[Table]:
    """All of them."""
    made = [_verdict(found), _model(found)]
    for operator in operators_of(found):
        rows = [each for each in found if each.row.operator == operator]
        made += [_times(operator, rows), _ratios(operator, rows), _all_candidates(operator, rows)]
    return made


def _verdict(found: Sequence[Measured]) -> Table:
    table = Table(
        "What was wanted",
        (
            "operator", "rows", "x over cuBLAS + NCCL, geometric mean", "x over the best baseline, geometric mean",
            "share of the bound, median", "least x over the best baseline", "fell back", "met",
        ),
    )  # fmt: skip
    for operator in operators_of(found):
        rows = [each for each in found if each.row.operator == operator and each.us(CROSSFADE) is not None]
        for name in (CROSSFADE, f"{CROSSFADE}{SHARED}"):
            serial = [_median(each.over(SERIAL, name)) for each in rows]
            best = [_median(each.over(each.fastest(each.baselines), name)) for each in rows]
            if not any(serial):
                continue
            figures = (
                geometric_mean(serial),
                geometric_mean(best),
                middle(each.share_of_bound(name) for each in rows),
                min((value for value in best if value is not None), default=None),
            )
            wanted = WANTED[operator]  # type: ignore[index]
            cells = [_against(value, least) for value, least in zip(figures, wanted, strict=True)]
            is_met = all(least is None or (value or 0) >= least for value, least in zip(figures, wanted, strict=True))
            fell_back = f"{sum(each.fell_back for each in rows)} of {len(rows)}"
            title = operator + name.removeprefix(CROSSFADE)
            table.add(title, str(len(rows)), *cells, fell_back, "yes" if is_met else "NO")
    return table


def _against(value: float | None, least: float | None) -> str:
    shown = "-" if value is None else f"{value:.3f}"
    return shown if least is None else f"{shown} (wanted: {least:.2f})"


def _model(found: Sequence[Measured]) -> Table:
    table = Table(
        "The model: how far off its times are, and the tuned choice's time over that of its own (wanted: 10 %; 0.95)",
        (
            "operator", "mode", "error of its choice, median", "error of all candidates, median", "largest",
            "untuned over tuned, median", "least",
        ),
    )  # fmt: skip
    for operator in operators_of(found):
        rows = [each for each in found if each.row.operator == operator]
        for mode in (EAGER, CAPTURED):
            own = [_size(each.model_error(str(each.choice["untuned"]), mode)) for each in rows]
            every = [_size(each.model_error(name, mode)) for each in rows for name in each.candidates]
            speeds = [value for each in rows if (value := each.untuned_speed(mode)) is not None]
            known = [value for value in every if value is not None]
            table.add(
                operator, mode, _percent(middle(own)), _percent(middle(every)), _percent(max(known, default=None)),
                _plain(middle(speeds)), _plain(min(speeds, default=None)),
            )  # fmt: skip
    return table


def _times(operator: str, rows: Sequence[Measured]) -> Table:
    chunks = list(dict.fromkeys(name for each in rows for name in each.chunked))
    sides = [CUBLAS, NCCL, COPIES, SERIAL, "plain", *chunks, FUSED, CROSSFADE]
    if operator == AR:
        sides.append(f"{CROSSFADE}{SHARED}")
    table = Table(
        f"{operator}: ms (lowest and highest median of a block)", ("M, N, K", *sides, "bound", "its piece, rows")
    )
    for each in rows:
        bound = each.bound
        cells = [_ms(each, name) for name in sides]
        shown = ("-", "-") if bound is None else (f"{bound.time_us / US_PER_MS:.3f}", f"{bound.num_rows}, {bound.by}")
        table.add(each.row.sizes, *cells, *shown)
    return table


def _ratios(operator: str, rows: Sequence[Measured]) -> Table:
    columns = [
        "M, N, K",
        "x over cuBLAS + NCCL",
        "best baseline",
        "x over it",
        "share of the bound",
        "chosen",
        "fell back",
    ]
    columns += ["fastest candidate", "chosen over it", "untuned", "predicted, ms", "measured, ms"]
    if operator == AR:
        columns += ["shared out: x over cuBLAS + NCCL", "x over the best baseline"]
    table = Table(f"{operator}: {CROSSFADE} against the others", columns)
    for each in rows:
        best, fastest, untuned = (
            each.fastest(each.baselines),
            each.fastest(each.candidates),
            str(each.choice["untuned"]),
        )
        chosen, first = each.us(str(each.choice["chosen"])), None if fastest is None else each.us(fastest)
        predicted = each.choice["predicted_us"].get(untuned, {}).get(each.mode_of(untuned))
        cells = [each.row.sizes, _ratio(each.over(SERIAL)), best or "-", _ratio(each.over(best))]
        cells += [_plain(each.share_of_bound()), str(each.choice["chosen"]), "yes" if each.fell_back else "no"]
        cells += [fastest or "-", _plain(None if not chosen or not first else first / chosen), untuned]
        cells += ["-" if predicted is None else f"{predicted / US_PER_MS:.3f}", _ms(each, untuned)]
        if operator == AR:
            shared = f"{CROSSFADE}{SHARED}"
            cells += [_ratio(each.over(SERIAL, shared)), _ratio(each.over(best, shared))]
        table.add(*cells)
    return table


def _all_candidates(operator: str, rows: Sequence[Measured]) -> Table:
    table = Table(f"{operator}: all sides, ms, captured / eager", ("by", *(each.row.sizes for each in rows)))
    for name in dict.fromkeys(name for each in rows for name in each.sides):
        cells = []
        for each in rows:
            times = [each.us(name, mode) for mode in (CAPTURED, EAGER)]
            cells.append(" / ".join("-" if time_us is None else f"{time_us / US_PER_MS:.3f}" for time_us in times))
        table.add(name, *cells)
    return table


def _lists(found: Sequence[Measured], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    wrong = [f"- {each.row.key}: {why}" for each in found for why in each.wrong]
    failed = [
        f"- {line['key']}, at {line['doing']}: {without_folders(line['failed'])}" for line in lines if "failed" in line
    ]
    reasons: dict[str, list[str]] = {}
    for each in found:
        for name, side in each.sides.items():
            for mode, why in side["errors"].items():
                if mode != "right":
                    reasons.setdefault(f"{name}, {mode}: {without_folders(why)}", []).append(each.row.sizes)
    for each in found:
        for note in each.choice.get("notes", ()):
            reasons.setdefault(f"while tuning: {without_folders(note)}", []).append(each.row.sizes)
    undone = [f"- {reason} ({len(sizes)} rows)" for reason, sizes in reasons.items()]
    worst = max((side["worst"] for each in found for side in each.sides.values()), default=0.0)
    parts = [f"Largest relative error of an output: {worst:.1e}."]
    parts.append("## Wrong\n" + "\n".join(wrong) if wrong else "No output was wrong.")
    if failed:
        parts.append("## Tries of rows that were ended\n" + "\n".join(failed))
    if undone:
        parts.append("## What could not be done\n" + "\n".join(undone))
    return parts


def summary(line: Mapping[str, Any]) -> str:
    """A measured row in one line, for who watches."""
    each = Measured.of(line)
    best = each.fastest(each.baselines)
    parts = [f"{name} {each.us(name) / US_PER_MS:.3f}" for name in (CUBLAS, NCCL, SERIAL) if each.us(name)]  # type: ignore[operator]
    parts.append(f"best baseline {best} {_ms(each, best or '')}")
    fastest = each.fastest(each.candidates)
    parts.append(f"fastest {fastest} {_ms(each, fastest or '')}")
    if each.us(CROSSFADE) is not None:
        over = (
            f"x {_ratio(each.over(SERIAL))} and {_ratio(each.over(best))}, {_plain(each.share_of_bound())} of the bound"
        )
        parts.append(
            f"crossfade {_ms(each, CROSSFADE)} by {each.choice['chosen']} (untuned {each.choice['untuned']}): {over}"
        )
    failed = [f"{name} {mode}: {why}" for name, side in each.sides.items() for mode, why in side["errors"].items()]
    parts += [f"! {why}" for why in dict.fromkeys(failed) if not why.endswith("on a CPU")]
    return f"{line['key']} ({line['taken_s']:.1f} s): " + "; ".join(parts)


def publish(path: Path, lines: Sequence[Mapping[str, Any]], method: str, note: str = "") -> None:
    """Writes the report and the plot, into the folder of reports and beside the file of results."""
    machines = [line[MACHINE] for line in lines if MACHINE in line]
    slug = slug_of(machines)
    plot = f"tile_ops_{slug}_{today()}.svg"
    report = write_report("tile_ops", Machine(slug, "", "", ""), text_of(lines, method, note, plot))
    report.with_name(plot).write_text(tile_plot.svg(_measured(lines)))
    for each in (report, report.with_name(plot)):
        shutil.copy(each, path.parent)
        print(f"wrote {each.name}")


def slug_of(machines: Sequence[str]) -> str:
    """Of the machine that was measured last, for names of files."""
    words = machines[-1].partition(";" if "NVIDIA" in machines[-1] else ",")[0] if machines else "unknown"
    return re.sub(r"[^a-z0-9]+", "-", words.lower().replace(" x ", "-")).strip("-")


# cells


def _median(found: Ratio | None) -> float | None:
    return None if found is None else found.median


def _ratio(found: Ratio | None) -> str:
    return "-" if found is None else str(found)


def _plain(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def _size(value: float | None) -> float | None:
    return None if value is None else abs(value)


def _ms(each: Measured, name: str) -> str:
    time_us, spread = each.us(name), each.series(name).spread()
    if time_us is None or spread is None:
        return "-"
    mark = "" if each.mode_of(name) == CAPTURED else ", eager"
    return f"{time_us / US_PER_MS:.3f} ({spread[0] / US_PER_MS:.3f} to {spread[1] / US_PER_MS:.3f}{mark})"
