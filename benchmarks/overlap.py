"""What overlap gains: three senders that make a tensor each, and a receiver that multiplies each of them.

Run ``python -m benchmarks.overlap`` from the root of the repository: ``--quick`` for a smoke run, ``--report`` to write the
Markdown report. The same program runs with overlap on and off, over gloo and through shared memory, in alternating
blocks; every value is checked. One torch thread an actor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

import crossfade
from benchmarks.common import Series, Table, ratio, this_machine, today, write_report
from benchmarks.quiet import Quiet

NUM_SENDERS = 3
WANTED_SHARE = (0.2, 0.4)
WANTED_GAIN = 1.10


class Sender:
    """Makes a tensor."""

    def __init__(self, rows: int, columns: int) -> None:
        self._base = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns).remainder_(7)

    def make(self, seed: int) -> torch.Tensor:
        self._base[0, 0] = seed
        return self._base.clone()


class Receiver:
    """Multiplies what it gets, and gives the first row of each product."""

    def __init__(self, columns: int) -> None:
        torch.set_num_threads(1)
        self._weights = torch.eye(columns).flip(0)
        self._product = torch.empty(0)

    def multiply(self, tensor: torch.Tensor) -> torch.Tensor:
        product = self._product
        if product.shape != tensor.shape:
            product = self._product = torch.empty_like(tensor)
        torch.mm(tensor, self._weights, out=product)
        return product[0].clone()


@dataclass
class Side:
    """One way of running the program, and what it took per execution, in microseconds."""

    transport: str
    overlap: bool
    graph: Any = None
    steady: Series = field(default_factory=Series)
    single: Series = field(default_factory=Series)

    @property
    def name(self) -> str:
        return f"{self.transport}, overlap {'on' if self.overlap else 'off'}"


def program(senders: Sequence[Any], receiver: Any, transport: str) -> Any:
    with crossfade.InputNode() as inp:
        made = [sender.make.bind(inp).with_tensor_transport(transport=transport) for sender in senders]
        return crossfade.MultiOutputNode([receiver.multiply.bind(tensor) for tensor in made])


def check(rows: Sequence[torch.Tensor], seed: int, columns: int) -> None:
    expected = torch.arange(columns, dtype=torch.float32).remainder_(7)
    expected[0] = seed
    for row in rows:
        if not torch.equal(row, expected.flip(0)):
            raise SystemExit(f"a wrong value for {seed}: {row}")


def run_block(side: Side, num: int, inflight: int, columns: int) -> list[float]:
    """Time per execution with ``inflight`` under way, one sample for each of ``num`` after a start-up."""
    refs: deque[tuple[int, Any]] = deque()
    ends_ns, results = [], []
    for seed in range(num + 2 * inflight):
        refs.append((seed, side.graph.execute(seed)))
        if len(refs) == inflight:
            number, ref = refs.popleft()
            results.append((number, crossfade.get(ref)))
            ends_ns.append(time.perf_counter_ns())
    results += [(number, crossfade.get(ref)) for number, ref in refs]
    for number, rows in results:
        check(rows, number, columns)
    first = len(ends_ns) - num - 1
    return [(ends_ns[-1] - ends_ns[first]) / num / 1_000]


@dataclass(frozen=True)
class Parts:
    """How long a product and a transfer take alone, in microseconds."""

    product_us: float
    transfer_us: float

    @property
    def share(self) -> float:
        return self.transfer_us / self.product_us


def measure_parts(senders: Sequence[Any], receiver: Any) -> Parts:
    """From a recorded run without overlap, one execution at a time: nothing lies beside anything else."""
    with program(senders, receiver, "gloo").compile(overlap=False, max_inflight=1, record=True) as graph:
        for seed in range(12):
            crossfade.get(graph.execute(seed))
        spans = [span for span in graph.timeline().spans if span.execution >= 3]
    products = [s.duration_us for s in spans if s.kind == "compute" and s.what.endswith("multiply")]
    transfers: dict[tuple[str, int], float] = {}
    for span in spans:
        if span.kind == "communicate" and span.label.startswith("recv n"):  # its start, the transfer, taking the value
            key = (span.label, span.execution)
            transfers[key] = max(span.duration_us, transfers.get(key, 0.0))
    return Parts(statistics.median(products), statistics.median(transfers.values()))


def run(options: argparse.Namespace, quiet: Quiet) -> tuple[list[Side], Parts]:
    sides = [Side(transport, overlap) for transport in ("gloo", "shm") for overlap in (False, True)]
    crossfade.init(engine="local")
    try:
        senders = [crossfade.remote(Sender).remote(options.rows, options.columns) for _ in range(NUM_SENDERS)]
        receiver = crossfade.remote(Receiver).remote(options.columns)
        parts = quiet.run(partial(measure_parts, senders, receiver))
        for side in sides:
            dag = program(senders, receiver, side.transport)
            side.graph = dag.compile(overlap=side.overlap, max_inflight=options.inflight)
            run_block(side, 3, options.inflight, options.columns)
        for number in range(options.rounds):
            for side in sides if number % 2 == 0 else sides[::-1]:
                side.steady.add(quiet.run(partial(run_block, side, options.num, options.inflight, options.columns)))
                side.single.add(quiet.run(partial(run_block, side, options.num, 1, options.columns)))
    finally:
        crossfade.shutdown()
    return sides, parts


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks.overlap", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round: a smoke run")
    parser.add_argument("--report", action="store_true", help="write the report into benchmarks/reports/")
    parser.add_argument("--rounds", type=int, default=8, help="blocks of each side")
    parser.add_argument("--num", type=int, default=6, help="executions in a block")
    parser.add_argument("--inflight", type=int, default=3, help="executions in flight")
    parser.add_argument("--rows", type=int, default=4096, help="rows of a tensor")
    parser.add_argument("--columns", type=int, default=256, help="its columns")
    parser.add_argument("--patience", type=float, default=60, help="seconds to wait, in all, for a quiet machine")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.patience = 1, 0.0
    return options


def samples_of(series: Series) -> list[float]:
    return [value for block in series.blocks if block for value in block]


def gain(sides: Sequence[Side], transport: str, pick: str) -> Any:
    off, on = (getattr(side, pick) for side in sides if side.transport == transport)
    return ratio(off, on)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints; 1 when overlap over gloo gains less than it should."""
    options = parse_arguments(arguments)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the actors
    quiet = Quiet(options.patience)
    sides, parts = run(options, quiet)
    table = Table(
        f"Time per execution, ms: {NUM_SENDERS} tensors of {options.rows} x {options.columns} float32",
        ["program", f"{options.inflight} in flight", "one at a time"],
    )
    for side in sides:
        table.add(
            side.name, *(f"{statistics.median(samples_of(each)) / 1_000:.2f}" for each in (side.steady, side.single))
        )
    gains = Table("Without overlap, over with overlap", ["transport", f"{options.inflight} in flight", "one at a time"])
    for transport in ("gloo", "shm"):
        gains.add(transport, str(gain(sides, transport, "steady")), str(gain(sides, transport, "single")))
    steady = gain(sides, "gloo", "steady")
    verdict = (
        f"Alone, a product takes {parts.product_us / 1_000:.2f} ms and a transfer by gloo {parts.transfer_us / 1_000:.2f} ms "
        f"({parts.share:.0%} of it; {WANTED_SHARE[0]:.0%} to {WANTED_SHARE[1]:.0%} wanted). Over gloo overlap makes the program "
        f"{steady.median:.2f} times as fast ({WANTED_GAIN:.2f} wanted). Through shared memory nothing is copied on the way, so "
        f"there is nothing to hide. {quiet.summary()}"
    )
    for shown in (table, gains):
        shown.show()
    print(verdict)
    if options.report:
        machine = this_machine(("crossfade", "torch"))
        command = " ".join(["python -m benchmarks.overlap", *(sys.argv[1:] if arguments is None else arguments)])
        text = f"# What overlap gains\n\n{machine}; {today()}; `{command}`\n\n{verdict}\n\n"
        text += "Medians of paired, alternating blocks, with the lowest and the highest; every value checked.\n\n"
        path = write_report("overlap", machine, text + f"{table.markdown()}\n\n{gains.markdown()}\n")
        print(f"wrote {path.name}")
    return 0 if steady.median >= WANTED_GAIN else 1


if __name__ == "__main__":
    sys.exit(main())
