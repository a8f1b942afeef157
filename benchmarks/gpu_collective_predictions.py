"""How well the cost model predicts collectives between GPU actors, by copy engines and by NCCL.

``python -m benchmarks.gpu_collective_predictions`` from the root of the repository; ``--topology`` takes a file that ``crossfade
topology`` wrote, without which it measures now. Each collective is a graph of its own on all GPUs. What counts is the time from
when the last actor's tensor is there until the last actor has what it gets, in recorded spans on the GPUs' clock, beside the same
in the predicted timeline. No figure is fitted. Without GPUs, CPU tensors stand for theirs, and the times mean nothing.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import crossfade
from benchmarks.common import Table, write_report
from benchmarks.gpu_predictions import measure_topology
from benchmarks.gpu_steps import Book, machine_in_words
from crossfade.collective import allgather, allreduce, broadcast, reducescatter
from crossfade.topology import Topology, load_topology

KINDS: dict[str, Any] = {
    "allreduce": allreduce,
    "allgather": allgather,
    "reducescatter": reducescatter,
    "broadcast": broadcast,
}
SIZES = (4 << 10, 256 << 10, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
QUICK_SIZES = (4 << 10, 1 << 20)
NUM_WARM, NUM_TIMED = 5, 15
NUM_STAND_INS = 2
LIMIT_S = 120.0


class Member:
    """Has a tensor of ones for a size, and looks at a corner of what comes out."""

    def __init__(self) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._made: dict[int, Any] = {}

    def make(self, size_bytes: int) -> Any:
        if size_bytes not in self._made:
            self._made[size_bytes] = torch.ones(size_bytes // 4, device=self._device)
        return self._made[size_bytes]

    def look(self, value: Any) -> tuple[int, float, float]:
        return value.numel(), float(value[0]), float(value[-1])


def wanted(kind: str, num: int, size_bytes: int) -> tuple[int, float, float]:
    """What `Member.look` says of what comes out."""
    length = size_bytes // 4
    length = {"allgather": length * num, "reducescatter": length // num}.get(kind, length)
    value = float(num) if kind in ("allreduce", "reducescatter") else 1.0
    return length, value, value


def exchange_us(timeline: crossfade.Timeline, execution: int) -> float:
    """From when the last party has come until the last one is done."""
    spans = [s for s in timeline.of_execution(execution).spans if s.stream == "coll" and s.kind == "communicate"]
    return max(span.end_us for span in spans) - max(span.start_us for span in spans)


def measure(members: Sequence[Any], kind: str, transport: Any, sizes: Sequence[int], topology: Topology) -> list[Any]:
    """(size in bytes, predicted us, measured us of each execution, notes) of one collective by one way."""
    with crossfade.InputNode() as given:
        found = KINDS[kind].bind([member.make.bind(given) for member in members], transport=transport)
        outputs = [member.look.bind(value) for member, value in zip(members, found, strict=True)]
        graph = crossfade.MultiOutputNode(outputs).compile(record=True)
    costs, rows, execution = crossfade.CostModel(topology=topology), [], 0
    for size_bytes in sizes:
        for _ in range(NUM_WARM + NUM_TIMED):
            got = crossfade.get(graph.execute(size_bytes), timeout=LIMIT_S)
            if list(map(tuple, got)) != [wanted(kind, len(members), size_bytes)] * len(members):
                raise SystemExit(f"{kind} of {size_bytes} bytes by {transport} gave {got}")
        measured, first = graph.timeline(), execution + NUM_WARM
        execution += NUM_WARM + NUM_TIMED
        times_us = [exchange_us(measured, number) for number in range(first, execution)]
        predicted = graph.predicted_timeline(crossfade.Workload(default_value_bytes=size_bytes), costs)
        rows.append((size_bytes, exchange_us(predicted, 0), times_us, predicted.notes))
    graph.teardown()
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; writes a report if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_collective_predictions", description=__doc__)
    parser.add_argument("--topology", type=Path, help="a file of crossfade topology; measured now without it")
    parser.add_argument("--out", default="out", help="folder for the topology")
    parser.add_argument("--quick", action="store_true", help="two sizes")
    parser.add_argument("--report", action="store_true", help="write a report into benchmarks/reports")
    options = parser.parse_args(arguments)
    num_gpus, out = torch.cuda.device_count(), Path(options.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    if options.topology is None and num_gpus:
        options.topology = out / "topology.json"
        if not measure_topology(Book(out / "topology.jsonl"), options.topology):
            return 1
    topology = (load_topology(options.topology) if options.topology else None) or Topology()
    ways = [crossfade.Transport.COPY, *([crossfade.Transport.NCCL] if num_gpus else [])]
    crossfade.init(num_gpus=num_gpus or NUM_STAND_INS)
    members = [crossfade.remote(Member).options(num_gpus=1).remote() for _ in range(num_gpus or NUM_STAND_INS)]
    table = Table("us", ["collective", "by", "bytes", "predicted", "measured (lowest to highest)", "error"])
    notes: dict[str, None] = {}
    for kind in KINDS:
        for transport in ways:
            for row in measure(members, kind, transport, QUICK_SIZES if options.quick else SIZES, topology):
                size_bytes, predicted_us, times_us, said = row
                notes.update(dict.fromkeys(said))
                middle_us = statistics.median(times_us)
                spread = f"{middle_us:.0f} ({min(times_us):.0f} to {max(times_us):.0f})"
                error = f"{predicted_us / middle_us - 1:+.0%}"
                table.add(kind, str(transport), f"{size_bytes:,}", f"{predicted_us:.0f}", spread, error)
    crossfade.shutdown()
    table.show()
    text = "\n".join([__doc__ or "", *(f"- {note}" for note in notes)])
    print("\n".join(notes))
    if options.report:
        machine, words = machine_in_words()
        report = f"# Predictions of collectives between GPUs\n\n{words}\n\n{text}\n{table.markdown()}\n"
        print(write_report("gpu_collective_predictions", machine, report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
