"""Tables and ratios of what `benchmarks.p2p_transfers` has measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import Machine, Ratio, Series, Table, ratio, today, write_report
from benchmarks.quiet import LIMIT_CORES
from benchmarks.workers import without_folders

KB, MB = 1 << 10, 1 << 20
LIMITS = ("bare copy", "pinned copy")
BASES = ("gloo", "NCCL")

Rows = Mapping[str, Sequence[Mapping[str, Any]]]


def size_text(size_bytes: int) -> str:
    """As tables have it."""
    for unit, name in ((MB, "MB"), (KB, "KB")):
        if size_bytes >= unit:
            return f"{size_bytes // unit} {name}"
    return f"{size_bytes} B"


def is_loud(block: Mapping[str, Any]) -> bool:
    """Whether other programs disturbed a block, which then counts for nothing but its values."""
    return float(block.get("others", 0.0)) > LIMIT_CORES


def series(rows: Rows, key: str, figure: str = "s") -> Series:
    """The blocks of one side and act."""
    return Series([None if is_loud(block) or figure not in block else [block[figure]] for block in rows.get(key, ())])


def time_text(samples: Sequence[float]) -> str:
    """Seconds, as microseconds with three digits: the median, the lowest and the highest."""
    if not samples:
        return "-"
    middle, low, high = (value * 1e6 for value in (statistics.median(samples), min(samples), max(samples)))
    digits = 0 if middle >= 100 else 1
    return f"{middle:,.{digits}f} ({low:,.{digits}f} to {high:,.{digits}f})"


def merged(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The steps of several runs, their blocks one behind the other."""
    steps: dict[str, Any] = {}
    for each in runs:
        for name, step in each["steps"].items():
            known = steps.setdefault(name, {"sides": step["sides"], "failed": [], "sizes": {}})
            known["failed"] += [step["failed"]] if step["failed"] else []
            for size, rows in step["sizes"].items():
                there = known["sizes"].setdefault(size, {})
                for key, blocks in rows.items():
                    there.setdefault(key, []).extend(blocks)
    return steps


def _acts(rows: Rows) -> list[str]:
    return list(dict.fromkeys(key.split(": ", 1)[1] for key in rows))


def _sides(step: Mapping[str, Any], rows: Rows) -> list[str]:
    there = {key.split(": ", 1)[0] for key in rows}
    return [side for side in step["sides"] if side in there]


def _right(blocks: Sequence[Mapping[str, Any]]) -> str:
    wrong = sum(not block["right"] for block in blocks)
    return f"NO, {wrong} of {len(blocks)}" if wrong else "yes"


def transfer_tables(steps: Mapping[str, Any]) -> list[Table]:
    """One table for each step and act."""
    found = []
    for name, step in steps.items():
        by_size = {int(size): rows for size, rows in step["sizes"].items()}
        if not by_size or any(
            "load alone" in row for rows in by_size.values() for each in rows.values() for row in each
        ):
            continue
        first = next(iter(by_size.values()))
        for act in _acts(first):
            sides = [side for side in _sides(step, first) if f"{side}: {act}" in first]
            base = next((side for side in (*BASES, sides[0]) if side in sides), sides[0])
            own = [side for side in sides if side not in (base, *LIMITS)]
            limits = [side for side in sides if side in LIMITS]
            head = ["size", *(f"{side}, us" for side in sides), *(f"{side} / {base}" for side in own)]
            head += [f"{limit} / {side}" for limit in limits for side in own]
            table = Table(f"{name}: {act}", [*head, "right"])
            for size, rows in sorted(by_size.items()):
                blocks = {side: rows[f"{side}: {act}"] for side in sides}
                cells = [time_text([block["s"] for block in blocks[side] if not is_loud(block)]) for side in sides]
                pairs = [(side, base) for side in own] + [(limit, side) for limit in limits for side in own]
                ratios = [
                    ratio(series(rows, f"{over}: {act}"), series(rows, f"{under}: {act}")) for over, under in pairs
                ]
                right = _right([block for each in blocks.values() for block in each])
                table.add(size_text(size), *cells, *(str(each or "-") for each in ratios), right)
            found.append(table)
    return found


def tag_tables(steps: Mapping[str, Any]) -> list[Table]:
    """Ten tags in reverse against in order, of each side."""
    found = []
    for name, step in steps.items():
        sizes = sorted((int(size), rows) for size, rows in step["sizes"].items())
        if not sizes or not any(key.endswith("in reverse") for key in sizes[0][1]):
            continue
        sides = _sides(step, sizes[0][1])
        among = [f"{side}, a ten among others" for side in sides if _reversed(sizes[0][1], side, "among_s")]
        table = Table(f"{name}: in reverse / in order", ["size", *sides, *among])
        for size, rows in sizes:
            cells = [_reversed(rows, side, figure) for figure in ("s", "among_s")[: 1 + bool(among)] for side in sides]
            table.add(size_text(size), *(str(each or "-") for each in cells))
        found.append(table)
    return found


def _reversed(rows: Rows, side: str, figure: str = "s") -> Ratio | None:
    reverse, in_order = (series(rows, f"{side}: ten tags {how}", figure) for how in ("in reverse", "in order"))
    return ratio(reverse, in_order)


def beside_tables(steps: Mapping[str, Any]) -> list[Table]:
    """Transfers beside loads."""
    found = []
    for name, step in steps.items():
        for size, rows in step["sizes"].items():
            if not any("load alone" in row for each in rows.values() for row in each):
                continue
            table = Table(
                f"{name}: {size_text(int(size))} each (ms)",
                ("by: beside", "transfers alone", "beside", "x", "load alone", "beside", "x", "both ended", "right"),
            )
            for key, blocks in rows.items():
                cells = []
                for what in ("transfers", "load"):
                    alone, beside = (series(rows, key, f"{what} {when}") for when in ("alone", "beside"))
                    cells += [_ms(alone), _ms(beside), str(ratio(beside, alone))]
                ends = [max(block["transfers beside"], block["load beside"]) for block in blocks]
                table.add(key, *cells, _ms(Series([[end] for end in ends])), _right(blocks))
            found.append(table)
    return found


def _ms(samples: Series) -> str:
    summary, spread = samples.summary(), samples.spread()
    return f"{summary.median:.2f} ({spread[0]:.2f} to {spread[1]:.2f})" if summary and spread else "-"


def targets(steps: Mapping[str, Any]) -> Table:
    """What was wanted of GPUs, beside what was measured."""
    table = Table("Targets", ("what", "wanted", "measured"))

    def rows_of(step: str, size: int) -> Rows:
        found: Rows = steps.get(step, {}).get("sizes", {}).get(str(size), {})
        return found

    def add(what: str, wanted: str, found: Ratio | None) -> None:
        table.add(what, wanted, str(found or "not measured"))

    for where, own, limit, wanted in (
        ("peer access", "copies", "bare copy", "0.95"),
        ("no peer access", "staged", "pinned copy", "0.90"),
    ):
        for size in (64 * MB, 256 * MB):
            rows = rows_of(f"{where}, ahead", size)
            found = ratio(series(rows, f"{limit}: send"), series(rows, f"{own}: send"))
            add(f"{limit} / {own}, {size_text(size)}, ahead", f"at least {wanted}", found)
    rows = rows_of("peer access, ahead", 4 * KB)
    add("copies / NCCL, 4 KB, ahead", "at most 0.5", ratio(series(rows, "copies: send"), series(rows, "NCCL: send")))
    for size in (4 * KB, MB, 16 * MB):
        rows = rows_of("peer access, tags", size)
        among = _reversed(rows, "copies", "among_s")
        how = "a ten among others" if among else "whole rows"
        add(
            f"ten tags in reverse / in order, {size_text(size)}, {how}", "at most 1", among or _reversed(rows, "copies")
        )
    rows = rows_of("peer access, beside", 64 * MB)
    for side in ("copies", "NCCL"):
        for what in ("transfers", "load"):
            alone, beside = (series(rows, f"{side}: products", f"{what} {when}") for when in ("alone", "beside"))
            wanted = "at most 1.05" if side == "copies" else "(1.74 for transfers seen)"
            add(f"{side}, {what} beside products / alone", wanted, ratio(beside, alone))
    rows = rows_of("no peer access, three beside", 64 * MB)
    staged, nccl = (series(rows, f"{side}: products", "transfers beside") for side in ("staged", "NCCL"))
    add("staged / NCCL, three transfers beside ten products", "at most 0.5", ratio(staged, nccl))
    return table


def others_text(steps: Mapping[str, Any]) -> str:
    """How quiet the machine was."""
    blocks = [
        block
        for step in steps.values()
        for rows in step["sizes"].values()
        for each in rows.values()
        for block in each
        if "others" in block
    ]
    if not blocks:
        return ""
    cores = statistics.median(block["others"] for block in blocks)
    num_loud = sum(map(is_loud, blocks))
    return (
        f"Other programs used {cores:.2f} cores in the median block. {num_loud} of {len(blocks)} blocks, beside which they used "
        f"more than {LIMIT_CORES}, were repeated in vain; they are left out."
    )


def report(paths: Sequence[Path], note: Path | None, about: str) -> Path:
    """Writes the report."""
    runs = [json.loads(path.read_text()) for path in paths]
    steps, machine = merged(runs), runs[0]["machine"]
    gpus = f"{len(machine['gpus'])} x {machine['gpus'][0]}; {machine['driver']}; " if machine["gpus"] else ""
    shared = "**Both ranks shared one GPU: a trial, no figure of use.**\n\n" if runs[0]["is_shared"] else ""
    parts = [
        f"# Tagged transfers of one pair\n\n{gpus}{machine['text']}. {today()}. {len(runs)} runs.\n\n{shared}{about.strip()}",
        note.read_text().strip() if note else "",
        others_text(steps),
    ]
    tables = [*tag_tables(steps), *transfer_tables(steps), *beside_tables(steps)]
    if machine["gpus"]:
        tables.insert(0, targets(steps))
    parts += [table.markdown() for table in tables]
    for name, step in steps.items():
        parts += [f"{name} broke off:\n\n```\n{without_folders(failed)}\n```" for failed in step["failed"]]
    slug = (
        f"{machine['hardware']}"
        if not machine["gpus"]
        else gpus.split(";")[0].lower().replace(" x ", "-").replace(" ", "-")
    )
    return write_report("p2p_transfers", Machine(slug, "", "", ""), "\n\n".join(part for part in parts if part) + "\n")
