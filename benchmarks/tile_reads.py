"""The kernel that reads the other ranks' parts: how fast with how many SMs, alone and beside products of cuBLAS.

``python -m benchmarks.tile_reads [--ranks 4] [--out OUT.json]`` on all GPUs, in under a minute; ``--quick`` on CPU processes, to
see that it runs.

*Alone*: all ranks add parts of one size at the same time, each reading those of all others; us, and GB/s that one rank reads.
*Beside*: a sum is launched on the lane's urgent stream as a product begins on another one. Where the sum takes as long as the
product it did not get an SM before that ended; *left* are the SMs that cuBLAS was told not to use. *Rounds*: the same product in
one launch, in R batched ones, and in R launches for each rank. Medians of 20, the slowest rank of each counts.

From its figures come ``Figures.read``, ``read_gbs_per_sm`` and ``product_beside_reads`` of `crossfade.ops.figures`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Table

NUM_REPEATS = 20
NUM_WARM_UPS = 3
MB = 1 << 20
PART_BYTES = (1 * MB, 2 * MB, 8 * MB, 32 * MB)
PROGRAMS = (2, 4, 8, 16, 32, 132)
SHAPE = (8192, 8192, 7168)
QUICK_SHAPE = (64, 32, 16)
BESIDE = ((4, 0), (4, 4), (8, 0), (8, 8), (16, 0), (16, 16), (32, 0), (32, 32))
"""(programs, SMs that cuBLAS leaves)."""
NUM_ROUNDS = (2, 4, 8)


class Bench:
    """One rank.

    Args:
        group: whose memory is read.
        is_quick: on a CPU, where the host's clock counts.
    """

    def __init__(self, group: Any, *, is_quick: bool) -> None:
        import torch

        from crossfade.ops.peer_sums import peer_sum_of

        self._torch, self._group, self._is_quick = torch, group, is_quick
        home, lane = group.home, group.lane()
        self._sum = peer_sum_of(group, torch.bfloat16)
        self._base, self._local = home.buffers[home.rank], lane.local
        self._out = torch.empty(max(PART_BYTES) // 2, dtype=torch.bfloat16, device=group.device)
        m, n, k = QUICK_SHAPE if is_quick else SHAPE
        self.a = torch.randn(m, k, device=group.device).bfloat16()
        self.b = torch.randn(n, k, device=group.device).bfloat16().t()
        self.product = torch.empty(m, n, dtype=torch.bfloat16, device=group.device)
        self._cuda: Any = torch.cuda
        self._urgent = None if is_quick else self._cuda.ExternalStream(self._local, device=group.device)

    def add(self, stream: int, size_bytes: int, num_programs: int) -> None:
        """Enqueues one sum of the beginning of all ranks' memory."""
        place, count = self._out.data_ptr(), size_bytes // 2
        self._sum.launch(stream, place, self._base, count, num_programs=num_programs)

    def alone(self, size_bytes: int, num_programs: int) -> list[float]:
        """Microseconds of each."""
        return self.timed(lambda: self.add(self._group.current_stream(), size_bytes, num_programs))

    def timed(self, work: Callable[[], object]) -> list[float]:
        """The same of anything, behind a barrier of all ranks."""
        return [self._one(work) for _ in range(NUM_WARM_UPS + NUM_REPEATS)][NUM_WARM_UPS:]

    def _one(self, work: Callable[[], object]) -> float:
        self._group.barrier()
        if self._is_quick:
            begin_s = time.perf_counter()
            work()
            return 1e6 * (time.perf_counter() - begin_s)
        begin, end = (self._cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        self._cuda.synchronize()
        return 1e3 * float(begin.elapsed_time(end))

    def multiply(self) -> None:
        """The whole product."""
        self._torch.mm(self.a, self.b, out=self.product)

    def beside(self, size_bytes: int, num_programs: int, num_left: int) -> tuple[list[float], list[float]]:
        """Microseconds of the product, and of the sum from the product's beginning on."""
        products, sums = [], []
        for _ in range(NUM_WARM_UPS + NUM_REPEATS):
            product_us, sum_us = self._both(size_bytes, num_programs, num_left)
            products.append(product_us)
            sums.append(sum_us)
        return products[NUM_WARM_UPS:], sums[NUM_WARM_UPS:]

    def _both(self, size_bytes: int, num_programs: int, num_left: int) -> tuple[float, float]:
        from crossfade.ops.reserved import leaving_sms

        cuda, urgent = self._cuda, self._urgent
        assert urgent is not None, "only GPUs have a stream beside another one"
        self._group.barrier()
        begin, end, added = (cuda.Event(enable_timing=True) for _ in range(3))
        begin.record()
        with leaving_sms(self._group, num_left):
            self.multiply()
        end.record()
        urgent.wait_event(begin)
        self.add(self._local, size_bytes, num_programs)
        added.record(urgent)
        cuda.synchronize()
        return 1e3 * float(begin.elapsed_time(end)), 1e3 * float(begin.elapsed_time(added))

    def in_rounds(self, num_rounds: int, *, is_batched: bool) -> None:
        """The product in so many parts of every rank's rows."""
        from crossfade.ops.products import multiply_all

        num_ranks = self._group.num_ranks
        a, out = (each.view(num_ranks, len(each) // num_ranks, -1) for each in (self.a, self.product))
        step = a.shape[1] // num_rounds
        for begin in range(0, step * num_rounds, step):
            rows = slice(begin, begin + step)
            if is_batched:
                multiply_all(a[:, rows], self.b, out[:, rows], None)
                continue
            for p in range(num_ranks):
                self._torch.mm(a[p, rows], self.b, out=out[p, rows])

    def check(self) -> float:
        """The relative error of a sum of parts that are drawn by rank."""
        from crossfade.device.borrowed import tensor_on

        torch, group = self._torch, self._group
        count = 1 * MB // 2 + 8
        source = [
            torch.randn(count, generator=torch.Generator().manual_seed(k)).bfloat16() for k in range(group.num_ranks)
        ]
        own = tensor_on(self._base, (count,), torch.bfloat16, group.home.driver.device)
        own.copy_(source[group.rank])
        group.barrier()
        self.add(group.current_stream(), 2 * count, PROGRAMS[0])
        group.barrier()
        wanted = sum(each.float() for each in source)
        return float((self._out[:count].float().cpu() - wanted).norm() / wanted.norm())


def _measure(bench: Bench, slowest: Callable[[Sequence[float]], float], *, is_quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"error": slowest([bench.check()]), "alone": {}, "beside": {}, "rounds": {}}
    for size_bytes in PART_BYTES[:1] if is_quick else PART_BYTES:
        for num in PROGRAMS:
            found["alone"][f"{size_bytes // MB} MB, {num}"] = slowest(bench.alone(size_bytes, num))
    found["product"] = slowest(bench.timed(bench.multiply))
    for num_rounds in NUM_ROUNDS:
        for is_batched in (True, False):
            work = partial(bench.in_rounds, num_rounds, is_batched=is_batched)
            found["rounds"][f"{num_rounds}, {'batched' if is_batched else 'by rank'}"] = slowest(bench.timed(work))
    for num, num_left in () if is_quick else BESIDE:
        products, sums = bench.beside(8 * MB, num, num_left)
        found["beside"][f"{num}, {num_left}"] = [slowest(products), slowest(sums)]
    return found


def _rank(rank: int, num_ranks: int, folder: str, is_quick: bool) -> None:
    import torch
    import torch.distributed as dist

    from crossfade.peers.group import open_group

    if not is_quick:
        torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/store", num_ranks)  # type: ignore[attr-defined,unused-ignore]
    backend = "gloo" if is_quick else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60))
    group = open_group(device="cpu" if is_quick else None, buffer_bytes=num_ranks * max(PART_BYTES))

    def slowest(times: Sequence[float]) -> float:
        box = torch.tensor(list(times), dtype=torch.float64, device=group.device)
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        return float(statistics.median(box.tolist()))

    found = _measure(Bench(group, is_quick=is_quick), slowest, is_quick=is_quick)
    if rank == 0:
        Path(folder, "found").write_text(json.dumps(found))
    group.close()
    dist.destroy_process_group()


def tables(found: dict[str, Any], num_ranks: int) -> list[Table]:
    """Every section."""
    alone = Table("Sums alone", ("part, programs", "us", "GB/s read of others"))
    for name, time_us in found["alone"].items():
        size_bytes = int(name.split()[0]) * MB
        alone.add(name, f"{time_us:.1f}", f"{(num_ranks - 1) * size_bytes / time_us / 1e3:.0f}")
    beside = Table(
        "A sum of parts of 8 MB beside a product", ("programs, left", "product, us", "sum, us", "product over alone")
    )
    for name, (product_us, sum_us) in found["beside"].items():
        beside.add(name, f"{product_us:.0f}", f"{sum_us:.0f}", f"{product_us / found['product']:.3f}")
    rounds = Table("The product in rounds", ("rounds", "us", "over one launch"))
    for name, time_us in found["rounds"].items():
        rounds.add(name, f"{time_us:.0f}", f"{time_us / found['product']:.3f}")
    return [alone, beside, rounds]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures and prints: 1 when a sum was wrong."""
    from torch.multiprocessing.spawn import spawn

    parser = argparse.ArgumentParser("benchmarks.tile_reads", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path, help="a file for what was found, as JSON")
    parser.add_argument("--quick", action="store_true", help="on CPU processes, in small")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (options.ranks, folder, options.quick), nprocs=options.ranks)  # type: ignore[no-untyped-call]
        found = json.loads(Path(folder, "found").read_text())
    if options.out is not None:
        options.out.write_text(json.dumps({"num_ranks": options.ranks, **found}))
    for table in tables(found, options.ranks):
        table.show()
    sys.stdout.write(f"product alone {found['product']:.0f} us; relative error of a sum {found['error']:.1e}\n")
    return int(found["error"] > 6e-3)


if __name__ == "__main__":
    sys.exit(main())
