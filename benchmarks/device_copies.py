"""How near do copies between GPUs come to the hardware, alone and beside matrix products, and what does NCCL do there?

``python -m benchmarks.device_copies run OUT.json [SECTION ...]`` measures on two GPUs and writes after each section;
``python -m benchmarks.device_copies report OUT.json`` makes a report of it, anywhere.

Every value that was moved is compared in the same run. A figure is the median of its rounds, with the lowest and the highest.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.common import Table, this_machine, write_report
from crossfade.device.staged_layout import StagedLayout
from tests.helpers.staged_times import pipeline_us

MB = 1 << 20


def _pair(
    first: Any, second: Any, first_args: tuple[Any, ...], second_args: tuple[Any, ...], limit_s: float, **more: Any
) -> Any:
    from tests.helpers.device_pair import run_workers

    return run_workers([first, second], [first_args, second_args], timeout_s=limit_s, **more)


def _store() -> str:
    return os.path.join(tempfile.mkdtemp(), "store")


def _copies() -> Any:
    from benchmarks import device_workers as w

    return _pair(w.copies_from, w.copies_to, (0, 1, [-1, 0, 1, 16, 64, 256], 15), (1, 0), 60)[0]


def _ping_pong() -> Any:
    from benchmarks import device_workers as w

    return _pair(w.ping_pong, w.ping_pong, (0, 1, 100, 15), (1, 0, 100, 15), 60)[0]


def _ring() -> Any:
    from benchmarks import device_workers as w

    out = {}
    for size_mb, num in ((0, 400), (16, 200), (64, 100)):
        sent, got = _pair(w.ring_from, w.ring_to, (0, 1, size_mb, num), (1, 0, size_mb, num), 60)
        out[f"{size_mb} MB"] = {**sent, **got}
    return out


def _beside_copies() -> Any:
    from benchmarks import device_workers as w

    return _pair(w.beside_copies, w.beside_copies, (0, 1, 16, 12), (1, 0, 16, 12), 60)


def _beside_nccl() -> Any:
    from benchmarks import device_workers as w

    store = _store()
    return _pair(w.beside_nccl, w.beside_nccl, (0, 1, 16, 12, store), (1, 0, 16, 12, store), 60)


def _captured() -> Any:
    from tests.helpers import device_cases as cases

    sent, got = _pair(cases.captured_sends, cases.captured_receives, (0, 1, 10_000, 4096), (1, 0, 10_000, 4096), 90)
    for side in (sent, got):
        side["launches_us"] = side["launches_us"][100::20]
    return {"sender": sent, "receiver": got}


def _staged() -> Any:
    from benchmarks import device_staged as w

    layouts = list(staged_layouts())
    return _pair(w.staged_from, w.staged_to, (0, 1, layouts, 9), (1, 0, layouts, 9), 150)


def staged_layouts() -> dict[StagedLayout, float]:
    """What is measured against each other for 64 MB, each with what staged_layout.py predicts (us)."""
    layouts = [StagedLayout(num, mb * MB) for num, mb in ((8, 3), (8, 4), (22, 3), (2, 3))]
    return {each: pipeline_us(each.lengths(64 * MB)) for each in layouts}


def _staged_nccl() -> Any:
    from benchmarks import device_staged as w

    store = _store()
    return _pair(w.nccl_without_peers, w.nccl_without_peers, (0, 1, 9, store), (1, 0, 9, store), 60)


def _kills() -> Any:
    """Thirty kills, on as many pairs of GPUs at a time as there are."""
    import torch

    from tests.helpers import device_kills as cases

    def kill(number: int, base: int) -> dict[str, Any]:
        is_sender = number % 2 == 0
        moment = (cases.Moment.WAITING, cases.Moment.COPYING)[number // 2 % 2]
        what = {"dead": "sender" if is_sender else "receiver", "moment": str(moment)}
        point = number // 4 % cases.NUM_POINTS
        first: Any = cases.dies_sending if is_sender else cases.survives_sending
        second: Any = cases.survives_receiving if is_sender else cases.dies_receiving
        dead = 0 if is_sender else 1
        try:
            args = ((base, 1, moment, point), (base + 1, 0, moment))
            result = _pair(first, second, *args, 40, dying={dead})[1 - dead]
        except Exception as error:
            return {**what, "failed": str(error)[-1500:]}
        return {
            **what,
            "taken_s": result["taken_s"],
            "release_s": result["report"].release_s,
            "is_named": f"worker {dead} died" in result["error"],
            "usable": result["usable"],
            "is_left_alone": result["is_left_alone"],
            "was_copying": result["was_copying"],
            "held": result["held"],
            "lost_bytes": result["lost_bytes"],
        }

    num_pairs = max(torch.cuda.device_count() // 2, 1)
    with ThreadPoolExecutor(num_pairs) as pool:
        rows = [
            pool.submit(lambda pair=pair: [kill(number, 2 * pair) for number in range(pair, 30, num_pairs)])  # type: ignore[misc]
            for pair in range(num_pairs)
        ]
        return [result for row in rows for result in row.result()]


SECTIONS: dict[str, Callable[[], Any]] = {
    "copies": _copies,
    "ping-pong": _ping_pong,
    "ring": _ring,
    "beside, copies": _beside_copies,
    "beside, NCCL": _beside_nccl,
    "captured": _captured,
    "staged": _staged,
    "staged, NCCL": _staged_nccl,
    "kills": _kills,
}


def run(path: Path, names: Sequence[str]) -> None:
    """Measures, section by section; one that fails leaves its error and the others go on."""
    results: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    machine = this_machine(("torch", "cuda-bindings", "triton"))
    results["machine"] = {"text": str(machine), **_gpus()}
    for name in names or SECTIONS:
        begin = time.monotonic()
        try:
            results[name] = SECTIONS[name]()
        except Exception:
            results[name] = {"failed": traceback.format_exc()[-3000:]}
        print(
            f"{name}: {time.monotonic() - begin:.1f} s",
            results[name].get("failed", "") if isinstance(results[name], dict) else "",
            flush=True,
        )
        path.write_text(json.dumps(results))
    for table in tables(results):
        table.show()


def _gpus() -> dict[str, Any]:
    import torch

    from crossfade.device.cuda_bindings import bindings, check

    version = int(check(bindings().cuDriverGetVersion(), "cuDriverGetVersion"))
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return {
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "driver": f"CUDA driver {version // 1000}.{version % 1000 // 10}, NCCL {nccl}",
    }


# the report


def spread(samples: Sequence[float], scale: float = 1.0, digits: int = 2) -> str:
    """Median (lowest to highest)."""
    if not samples:
        return "-"
    low, middle, high = (value * scale for value in (min(samples), statistics.median(samples), max(samples)))
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def tables(results: dict[str, Any]) -> list[Table]:
    """Every section that worked, as a table."""
    makers: dict[str, Callable[[Any], Table]] = {
        "copies": _copies_table,
        "ping-pong": _ping_pong_table,
        "ring": _ring_table,
        "captured": _captured_table,
        "kills": _kills_table,
    }
    found = []
    for name, make in makers.items():
        if name in results and not (isinstance(results[name], dict) and "failed" in results[name]):
            found.append(make(results[name]))
    found += _beside_tables(results)
    if all(name in results and "failed" not in results[name] for name in ("staged", "staged, NCCL")):
        found.append(_staged_table(results["staged"], results["staged, NCCL"]))
    return found


def _copies_table(data: dict[str, Any]) -> Table:
    kinds = ("opened", "opened, set", "opened, wait and set")
    columns = [cell for kind in kinds for cell in (kind, "x of bare")]
    table = Table("One copy, GPU 0 to GPU 1, enqueued ahead (us)", ("size", "bare, same context", *columns, "GB/s"))
    for size, rows in data.items():
        if size == "values right":
            continue
        middle = {kind: statistics.median(samples) for kind, samples in rows.items()}
        cells = [cell for kind in kinds for cell in (spread(rows[kind]), f"{middle[kind] / middle['bare']:.3f}")]
        table.add(size, spread(rows["bare"]), *cells, f"{int(size.split()[0]) / middle['opened'] / 1e3:.0f}")
    return table


def _ping_pong_table(data: dict[str, Any]) -> Table:
    table = Table("GPU to GPU and back, by stream memory operations (us a round trip)", ("what", "time"))
    for name, samples in data.items():
        table.add(name, spread(samples))
    return table


def _ring_table(data: dict[str, Any]) -> Table:
    table = Table(
        "The ring as it is used: 2 slots, records through shared memory, every value looked at (us a value)",
        ("size", "time", "GB/s", "wrong bytes"),
    )
    for row in data.values():
        for name, samples in row.items():
            if name.endswith("us a value"):
                size = int(name.split()[0])
                rate = f"{size / statistics.median(samples) / 1e3:.1f}"
                table.add(f"{size} bytes", spread(samples, digits=1), rate, str(row["wrong bytes"]))
    return table


def _beside_tables(results: dict[str, Any]) -> list[Table]:
    table = Table(
        "16 x 256 MB each way beside ten 8192^3 GEMMs on both GPUs (ms, the slower GPU)",
        ("transport", "transfer alone", "beside", "x", "GEMMs alone", "beside", "x", "both", "values right"),
    )
    for name in ("copies", "NCCL"):
        sides = results.get(f"beside, {name}")
        if not sides or "failed" in sides:
            continue
        slower = {
            key: [max(pair) for pair in zip(sides[0][key], sides[1][key], strict=True)]
            for key in sides[0]
            if key != "values right"
        }
        middle = {key: statistics.median(samples) for key, samples in slower.items()}
        table.add(
            name, spread(slower["transfer alone"]), spread(slower["transfer beside"]),
            f"{middle['transfer beside'] / middle['transfer alone']:.3f}", spread(slower["GEMMs alone"]),
            spread(slower["GEMMs beside"]), f"{middle['GEMMs beside'] / middle['GEMMs alone']:.3f}", spread(slower["both"]),
            str(all(side["values right"] for side in sides)),
        )  # fmt: skip
    return [table] if table.rows else []


def _captured_table(data: dict[str, Any]) -> Table:
    table = Table(
        "10,000 replays of a captured wait, copy and set; the slot is poisoned after each",
        ("side", "host us a launch", "wrong words"),
    )
    table.add("sender (add, wait free, copy, set full)", spread(data["sender"]["launches_us"]), "-")
    receiver = data["receiver"]
    table.add(
        "receiver (wait full, 4 kernels, set free)",
        spread(receiver["launches_us"]),
        f"{receiver['num_wrong']} of {receiver['num_due']} values",
    )
    return table


def _kills_table(data: list[dict[str, Any]]) -> Table:
    checks: dict[str, Callable[[dict[str, Any]], bool]] = {
        "named": lambda row: row["is_named"],
        "device usable": lambda row: row["usable"],
        "slots left alone": lambda row: row["is_left_alone"],
        "nothing held": lambda row: not row["held"],
        "memory back": lambda row: row["lost_bytes"] <= 0,
        "own copies ran at the death": lambda row: row["was_copying"],
    }
    head = ("who died", "while", "kills", "s until the streams ran dry", *checks, "failed")
    table = Table("Thirty kills, while the other side waits and in the middle of large copies", head)
    for who, moment in sorted({(row["dead"], row["moment"]) for row in data}):
        rows = [row for row in data if (row["dead"], row["moment"]) == (who, moment)]
        good = [row for row in rows if "failed" not in row]
        taken = spread([row["taken_s"] for row in good], digits=3)
        counts = [sum(map(check, good)) for check in checks.values()]
        table.add(who, moment, str(len(rows)), taken, *map(str, (*counts, len(rows) - len(good))))
    return table


def _staged_times(first: dict[str, Any], second: dict[str, Any], name: str) -> tuple[list[float], list[float]]:
    ms = [(end - begin) * 1e3 for begin, end in zip(first[name]["begin_s"], second[name]["end_s"], strict=True)]
    return ms, [value / 1e3 for value in first[name].get("GEMMs, us", [])]


def _staged_table(staged: list[dict[str, Any]], nccl: list[dict[str, Any]]) -> Table:
    clocks = ("pinned, us", "pinned on the host's clock, us")
    limit_us, host_limit_us = (max(statistics.median(side[clock]) for side in staged) for clock in clocks)
    table = Table(
        f"64 MB from GPU 0 to GPU 1 through the host (ms, on the host's clock); one pinned copy takes {limit_us / 1e3:.3f} "
        f"({64 * MB / limit_us / 1e3:.1f} GB/s), on the host's clock {host_limit_us / 1e3:.3f}; ten GEMMs alone take "
        f"{spread(staged[0]['GEMMs alone, us'], 1e-3)}",
        (
            "transport",
            "copies predicted",
            "one",
            "GB/s",
            "of the pinned copy",
            "same clock",
            "three",
            "three beside ten GEMMs",
            "GEMMs beside",
            "values right",
        ),
    )

    def add(name: str, predicted: str, first: dict[str, Any], second: dict[str, Any], is_right: bool) -> None:
        one, _ = _staged_times(first, second, "1")
        three, _ = _staged_times(first, second, "3")
        beside, gemms = _staged_times(first, second, "3 beside")
        middle_us = statistics.median(one) * 1e3
        ratios = [f"{limit / middle_us:.3f}" for limit in (limit_us, host_limit_us)]
        rate = f"{64 * MB / middle_us / 1e3:.1f}"
        table.add(
            name, predicted, spread(one, digits=3), rate, *ratios, spread(three), spread(beside), spread(gemms), str(is_right)
        )  # fmt: skip

    predicted = {str(layout): f"{us / 1e3:.3f}" for layout, us in staged_layouts().items()}
    for name, first in staged[0]["layouts"].items():
        second = staged[1]["layouts"][name]
        add(f"staged, {name}", predicted.get(name, "-"), first, second, staged[1]["values right"])
    add("NCCL, peer access off", "-", nccl[0], nccl[1], nccl[1]["values right"])
    return table


def report(path: Path) -> None:
    """Writes the report of a run."""
    from benchmarks.common import Machine, today

    results = json.loads(path.read_text())
    machine = results["machine"]
    gpus = f"{len(machine['gpus'])} x {machine['gpus'][0]}"
    text = "\n\n".join(table.markdown() for table in tables(results))
    versions = f"{gpus}; {machine['text']}; {machine['driver']}. {today()}."
    head = f"# Copies between GPUs\n\n{versions}\n\n`python -m benchmarks.device_copies run`\n\n{__doc__}"
    slug = gpus.lower().replace(" x ", "-").replace(" ", "-")
    print(write_report("device_copies", Machine(slug, "", "", ""), f"{head}\n{text}\n"))


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(Path(sys.argv[2]), sys.argv[3:])
    else:
        report(Path(sys.argv[2]))
