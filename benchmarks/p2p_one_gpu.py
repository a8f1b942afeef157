"""Staged transfers of `crossfade.p2p` where one GPU is all there is: both ranks are in one process, and share its context.

``python -m benchmarks.p2p_one_gpu`` measures and writes a report. A value goes up to pinned memory of the host and comes down
again, by copy engines of the same GPU; between two GPUs each has one of the two ways. So there are two limits: one copy to pinned
memory, and one while another comes down. The sides take turns block by block; ratios are those of neighbours. (Ranks in two
processes would take turns in slices of 2 ms on one GPU, since streams of both wait for each other.)
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.common import Series, Table, ratio, this_machine, write_report
from crossfade.p2p import P2P
from crossfade.peers.rendezvous import Ranks

MB = 1 << 20
SIZES = (MB, 4 * MB, 16 * MB, 64 * MB, 256 * MB)
BESIDE_BYTES, NUM_BESIDE, NUM_PRODUCTS, WIDTH = 64 * MB, 3, 10, 8192


def open_pair(device: str, transport: str) -> list[P2P]:
    """Two ranks of this process, which tell each other numbers in its memory."""
    rows: list[list[int]] = [[], []]
    barrier = threading.Barrier(2)

    def open_one(rank: int) -> P2P:
        def gather(own: list[int]) -> list[list[int]]:
            rows[rank] = own
            barrier.wait(60)
            gathered = [list(row) for row in rows]
            barrier.wait(60)
            return gathered

        return P2P(Ranks(rank, 2, gather), device=device, transport=transport)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(open_one, range(2)))


def close_pair(pair: list[P2P]) -> None:
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(P2P.close, pair))


class Bench:
    """What the sides do on one device; on a CPU only to try this program."""

    def __init__(self, device: str, most_bytes: int) -> None:
        self.device = device
        self.is_gpu = device != "cpu"
        self.pair = open_pair(device, "staged")
        self.source = torch.randint(0, 255, (most_bytes,), dtype=torch.uint8, device=device)
        self.target = torch.zeros(most_bytes, dtype=torch.uint8, device=device)
        self.spare = torch.zeros_like(self.target)
        self.pinned, self.other = (torch.zeros(most_bytes, dtype=torch.uint8, pin_memory=self.is_gpu) for _ in range(2))
        self.down: Any = torch.cuda.Stream() if self.is_gpu else None  # type: ignore[no-untyped-call,unused-ignore]

    def settle(self) -> None:
        if self.is_gpu:
            torch.cuda.synchronize()

    def staged(self, size_bytes: int, num: int) -> None:
        for _ in range(num):
            sent = self.pair[0].isend(self.source[:size_bytes], 1)
            received = self.pair[1].irecv(self.target[:size_bytes], 0)
            received.wait()
            sent.wait()

    def pinned_copy(self, size_bytes: int, num: int) -> None:
        for _ in range(num):
            self.pinned[:size_bytes].copy_(self.source[:size_bytes], non_blocking=True)

    def both_ways(self, size_bytes: int, num: int) -> None:
        """Copies up and down at once, which do not wait for each other."""
        down = torch.cuda.stream(self.down) if self.is_gpu else nullcontext()
        for _ in range(num):
            self.pinned[:size_bytes].copy_(self.source[:size_bytes], non_blocking=True)
            with down:
                self.spare[:size_bytes].copy_(self.other[:size_bytes], non_blocking=True)

    def time_us(self, act: Callable[[int, int], None], size_bytes: int, num: int) -> float:
        """Microseconds of each of ``num`` transfers, from the first call until the device has done all."""
        self.settle()
        begin_ns = time.perf_counter_ns()
        act(size_bytes, num)
        self.settle()
        return (time.perf_counter_ns() - begin_ns) / num / 1e3

    def is_right(self, size_bytes: int) -> bool:
        return torch.equal(self.target[:size_bytes], self.source[:size_bytes])


def measure_sizes(bench: Bench, sizes: tuple[int, ...], rounds: int) -> Table:
    titles = [
        "size",
        "staged",
        "pinned copy",
        "one up and one down",
        "pinned copy / staged",
        "up and down / staged",
        "right",
    ]
    table = Table("One way (us)", titles)
    for size_bytes in sizes:
        acts = (bench.staged, bench.pinned_copy, bench.both_ways)
        staged, limit, both = series = tuple(Series() for _ in acts)
        num = max(4, min(20, 512 * MB // size_bytes))
        bench.target.zero_()
        for act in acts:
            bench.time_us(act, size_bytes, num)  # memory is pinned at its first use
        for _ in range(rounds):
            for act, each in zip(acts, series, strict=True):
                each.add([bench.time_us(act, size_bytes, num)])
        ratios = (str(ratio(each, staged)) for each in (limit, both))
        is_right = "yes" if bench.is_right(size_bytes) else "NO"
        table.add(f"{size_bytes // MB} MB", *map(_spread, series), *ratios, is_right)
    return table


def measure_beside(bench: Bench, rounds: int, width: int) -> Table:
    """Three transfers beside ten matrix products, and both alone."""
    a = torch.randn(width, width, device=bench.device, dtype=torch.bfloat16)
    b, out = torch.randn_like(a), torch.empty_like(a)
    size_bytes = min(BESIDE_BYTES, len(bench.source))
    own: torch.cuda.Stream = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call,unused-ignore]
    series = {name: Series() for name in ("transfers alone", "transfers beside", "products alone", "products beside")}

    def once(*, with_transfers: bool, with_products: bool) -> tuple[float, float]:
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call,unused-ignore]
        begin.record()
        if with_products:
            for _ in range(NUM_PRODUCTS):
                torch.mm(a, b, out=out)
        end.record()
        begin_ns = time.perf_counter_ns()
        if with_transfers:
            with torch.cuda.stream(own):
                bench.staged(size_bytes, NUM_BESIDE)
            own.synchronize()
        taken_ms = (time.perf_counter_ns() - begin_ns) / 1e6
        torch.cuda.synchronize()
        return taken_ms, begin.elapsed_time(end)

    once(with_transfers=True, with_products=True)
    for _ in range(rounds):
        series["transfers alone"].add([once(with_transfers=True, with_products=False)[0]])
        series["products alone"].add([once(with_transfers=False, with_products=True)[1]])
        transfers_ms, products_ms = once(with_transfers=True, with_products=True)
        series["transfers beside"].add([transfers_ms])
        series["products beside"].add([products_ms])
    title = f"{NUM_BESIDE} transfers of {size_bytes // MB} MB beside {NUM_PRODUCTS} products of {width}^3 in bf16 (ms)"
    table = Table(title, ["what", "alone", "beside", "x"])
    for name in ("transfers", "products"):
        alone, beside = series[f"{name} alone"], series[f"{name} beside"]
        table.add(name, _spread(alone, 2), _spread(beside, 2), str(ratio(beside, alone)))
    return table


def _spread(series: Series, digits: int = 0) -> str:
    summary, spread = series.summary(), series.spread()
    assert summary is not None
    assert spread is not None
    return f"{summary.median:,.{digits}f} ({spread[0]:,.{digits}f} to {spread[1]:,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.p2p_one_gpu", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="short values, to try the program")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = SIZES[:2] if options.quick else SIZES
    bench = Bench(device, sizes[-1])
    tables = [measure_sizes(bench, sizes, options.rounds)]
    if bench.is_gpu:
        tables.append(measure_beside(bench, options.rounds, 1024 if options.quick else WIDTH))
    close_pair(bench.pair)
    machine = this_machine(("torch", "cuda-bindings"))
    gpu = f"{torch.cuda.get_device_name()}; " if bench.is_gpu else ""
    text = "\n\n".join(table.markdown() for table in tables)
    print(text)
    print(
        write_report(
            "p2p_one_gpu", machine, f"# Staged transfers, both ranks in one process\n\n{gpu}{machine}\n\n{text}\n"
        )
    )


if __name__ == "__main__":
    main()
