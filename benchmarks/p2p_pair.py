"""What both ranks of a pair do for `benchmarks.p2p_transfers`: blocks of every side in turns, each with its values compared.

A block begins when both ranks are ready and lasts until the later one has finished. Its values are random; what is received was
overwritten before the block, and is compared after it. On a CPU, a block is repeated, a few times, if other programs used the cores
meanwhile.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.p2p_devices import Machine, OnCpu, OnGpu, all_reduces, products, vit
from benchmarks.p2p_sides import Op, Side, open_side
from benchmarks.quiet import LIMIT_CORES, _busy_s

__all__ = ["ACTS", "Step", "work"]

BLOCK_S = 0.12
NUM_IN_FLIGHT = 10
NUM_TAGS = 10
MOST_REPEATS = 4


@dataclass(frozen=True)
class Step:
    """What one pair of processes measures.

    Attributes:
        name: of the step.
        sides: what is compared (see `benchmarks.p2p_sides.open_side`); the last but the limits is what the others are held against.
        acts: the names of `ACTS` to measure.
        sizes: bytes of one tensor.
        is_ahead: the hosts enqueue a block before the device begins it, and the device's time counts.
        loads: what computes beside, for ``num_beside`` transfers; names of `LOADS`.
        environment: for these processes only.
        limit_s: how long it may take.
    """

    name: str
    sides: tuple[str, ...]
    acts: tuple[str, ...]
    sizes: tuple[int, ...]
    is_ahead: bool = False
    loads: tuple[str, ...] = ()
    num_beside: int = 10
    environment: tuple[tuple[str, str], ...] = ()
    limit_s: float = 150.0


@dataclass
class Bench:
    """One rank of the pair."""

    rank: int
    machine: Machine
    sides: dict[str, Side]
    is_shared: bool
    syncs: bool = False  # hosts wait for the device behind each transfer
    sent: list[torch.Tensor] = field(default_factory=list)
    received: list[torch.Tensor] = field(default_factory=list)
    expected: list[torch.Tensor] = field(default_factory=list)
    tick: torch.Tensor | None = None

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def prepare(self, size_bytes: int, num: int) -> None:
        """Random tensors, and what the other rank's are."""
        device = self.machine.device
        self.sent, self.received, self.expected = [], [], []  # before the next ones take their memory
        self.sent, self.expected = (
            [_random(size_bytes, seed=1000 * rank + tag).to(device) for tag in range(num)]
            for rank in (self.rank, 1 - self.rank)
        )
        self.received = [torch.empty_like(tensor) for tensor in self.sent]

    def poison(self) -> None:
        for tensor in self.received:
            tensor.fill_(0xEE)
        self.machine.synchronize()

    def is_right(self, num: int) -> bool:
        pairs = zip(self.received[:num], self.expected[:num], strict=True)
        return all(torch.equal(came, due) for came, due in pairs)

    def after(self) -> None:
        """Behind one transfer."""
        if self.syncs:
            self.machine.synchronize()

    def align(self) -> None:
        """Both GPUs begin what follows at the same time, where each rank has one."""
        if self.machine.device.type == "cuda" and not self.is_shared:
            if self.tick is None:
                self.tick = torch.zeros(1, device=self.machine.device)
            dist.all_reduce(self.tick)


def _random(size_bytes: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=generator)


# Acts: what a rank calls, `num` times


def _send(bench: Bench, side: Side, num: int) -> None:
    for _ in range(num):
        if bench.is_first:
            side.send(bench.sent[0], 0)
        else:
            side.recv(bench.received[0], 0)
        bench.after()


def _isend(bench: Bench, side: Side, num: int) -> None:
    while num > 0:
        few = min(num, NUM_IN_FLIGHT)
        call, tensor = (side.isend, bench.sent[0]) if bench.is_first else (side.irecv, bench.received[0])
        for work in [call(tensor, 0) for _ in range(few)]:
            work.wait()
        bench.after()
        num -= few


def _out_and_back(bench: Bench, side: Side, num: int) -> None:
    for _ in range(num):
        if bench.is_first:
            side.send(bench.sent[0], 0)
            side.recv(bench.received[0], 0)
        else:
            side.recv(bench.received[0], 0)
            bench.after()
            side.send(bench.sent[0], 0)
        bench.after()


def _both(bench: Bench, side: Side, num: int) -> None:
    for _ in range(num):
        if side.has_tags:
            works = [side.irecv(bench.received[0], 0), side.isend(bench.sent[0], 0)]
        else:  # both in one call, or they wait for each other
            works = list(side.batch([Op(False, bench.received[0], 0), Op(True, bench.sent[0], 0)]))
        for work in works:
            work.wait()
        bench.after()


def _batch(bench: Bench, side: Side, num: int) -> None:
    for _ in range(num):
        for work in side.batch([Op(False, bench.received[0], 0), Op(True, bench.sent[0], 0)]):
            work.wait()
        bench.after()


def _tags(bench: Bench, side: Side, num: int, *, is_reversed: bool) -> None:
    """Ten sends at once; received in their order or in reverse, each waited for before the next is begun."""
    tags = range(NUM_TAGS)
    for _ in range(num):
        if bench.is_first:
            for work in [side.isend(bench.sent[tag], tag) for tag in tags]:
                work.wait()
        else:
            for tag in reversed(tags) if is_reversed else tags:
                side.irecv(bench.received[tag], tag).wait()
        bench.after()


ACTS: Mapping[str, Callable[[Bench, Side, int], None]] = {
    "send": _send,
    "isend": _isend,
    "out and back": _out_and_back,
    "both directions": _both,
    "batch": _batch,
    "ten tags in order": partial(_tags, is_reversed=False),
    "ten tags in reverse": partial(_tags, is_reversed=True),
}
ONE_WAY = ("send", "isend", "ten tags in order", "ten tags in reverse")


def _num_tensors(act: str) -> int:
    return NUM_TAGS if act.startswith("ten") else 1


# Blocks


def _all(*own: float) -> list[list[float]]:
    """Both ranks' numbers."""
    rows = [torch.zeros(len(own), dtype=torch.float64) for _ in range(2)]
    dist.all_gather(rows, torch.tensor(own, dtype=torch.float64))
    return [row.tolist() for row in rows]


def _timed_s(bench: Bench, act: Callable[[int], object], num: int, *, is_ahead: bool) -> tuple[float, float]:
    """The time of one of ``num`` transfers, and how many cores others used."""
    bench.machine.synchronize()
    _all(0.0)
    busy_s, cpu_s, begin_s = _busy_s(), time.process_time(), time.monotonic()
    device_ms = 0.0
    if is_ahead:
        device_ms = bench.machine.ahead_ms(lambda: act(num), bench.align)
    else:
        act(num)
        bench.machine.synchronize()
    end_s = time.monotonic()
    rows = _all(begin_s, end_s, device_ms, time.process_time() - cpu_s)
    busy_s = _busy_s() - busy_s
    taken_s = max(row[1] for row in rows) - min(row[0] for row in rows)
    others = _all(max(0.0, busy_s - sum(row[3] for row in rows)) / (time.monotonic() - begin_s))[0][0]
    return (max(row[2] for row in rows) / 1e3 if is_ahead else taken_s) / num, others


def _block(bench: Bench, side: Side, name: str, num: int, *, is_ahead: bool, repeats: int) -> dict[str, Any]:
    """One block that counts: the first quiet one, or the quietest.

    Tens of tags that are enqueued ahead are measured in rows of ``num`` and of half as many: what the second half takes is the
    time of a ten among others (``among_s``), without the row's first and last one. It is left out where the host was interrupted,
    so that the shorter row took longer.
    """
    best: dict[str, Any] | None = None
    for _ in range(repeats + 1):
        rows_s: list[float] = []
        is_right, others = True, 0.0
        for each in (num // 2, num) if is_ahead and name.startswith("ten") else (num,):
            bench.poison()
            taken_s, others = _timed_s(bench, lambda num: ACTS[name](bench, side, num), each, is_ahead=is_ahead)
            rows_s.append(taken_s * each)
            checks = side.checks and not (bench.is_first and name in ONE_WAY)
            is_right &= all(row[0] for row in _all(float(not checks or bench.is_right(_num_tensors(name)))))
        others = 0.0 if bench.machine.device.type == "cuda" else others
        block = {"s": rows_s[-1] / num, "right": is_right, "others": others}
        if len(rows_s) > 1 and rows_s[1] > rows_s[0]:
            block["among_s"] = (rows_s[1] - rows_s[0]) / (num - num // 2)
        if best is None or block["others"] < best["others"] or not is_right:
            best = block
        if block["others"] <= LIMIT_CORES or not is_right:
            break
    assert best is not None, "there was a block"
    return best


def _num_of(bench: Bench, side: Side, name: str, *, is_quick: bool) -> int:
    """How many transfers a block has; after a few that warm up."""
    act = ACTS[name]
    act(bench, side, 3)
    bench.machine.synchronize()
    _all(0.0)
    begin_s = time.monotonic()
    act(bench, side, 3)
    bench.machine.synchronize()
    each_s = max(row[0] for row in _all((time.monotonic() - begin_s) / 3))
    return min(max(int((BLOCK_S / 10 if is_quick else BLOCK_S) / each_s), 2), 2000)


def _measure(
    bench: Bench, step: Step, size_bytes: int, num_rounds: int, *, is_quick: bool
) -> dict[str, list[dict[str, Any]]]:
    """Every side and act in turns, the first one changing; the blocks of each."""
    bench.prepare(size_bytes, max(map(_num_tensors, step.acts)))
    bench.syncs = not step.is_ahead and bench.machine.device.type == "cuda"
    pairs = [
        (f"{side}: {act}", bench.sides[side], act)
        for side in bench.sides
        for act in step.acts
        if bench.sides[side].has_tags or not act.startswith("ten")
    ]
    few = 16 if size_bytes <= 1 << 20 else 4
    nums = {
        key: min(_num_of(bench, side, act, is_quick=is_quick), few if step.is_ahead else 2000)
        for key, side, act in pairs
    }
    repeats = 0 if is_quick else MOST_REPEATS
    out: dict[str, list[dict[str, Any]]] = {key: [] for key, _, _ in pairs}
    for number in range(num_rounds):
        first = number % len(pairs)
        for key, side, act in pairs[first:] + pairs[:first]:
            out[key].append(_block(bench, side, act, nums[key], is_ahead=step.is_ahead, repeats=repeats))
    return out


# Beside loads

LOADS: Mapping[str, Callable[[torch.device, int], Callable[[], object]]] = {
    "products": lambda device, batch: products(device),
    "ViT": vit,
    "all-reduces": lambda device, batch: all_reduces(device),
}


def _beside(bench: Bench, step: Step, size_bytes: int, num_rounds: int, batch: int) -> dict[str, list[dict[str, Any]]]:
    """Transfers of one direction and a load, each alone and both at the same time; milliseconds of the slower rank."""
    bench.prepare(size_bytes, 1)
    bench.syncs = False
    out: dict[str, list[dict[str, Any]]] = {}
    for load_name in step.loads:
        load = LOADS[load_name](bench.machine.device, batch)
        load()
        for side in bench.sides.values():
            _isend(bench, side, step.num_beside)
        for _ in range(num_rounds + 1):
            for name, side in bench.sides.items():
                act = partial(_isend, bench, side, step.num_beside)
                bench.poison()
                _all(0.0)
                load_ms = bench.machine.load_ms(load)
                _all(0.0)
                alone_ms = bench.machine.ahead_ms(act, bench.align)
                bench.poison()
                _all(0.0)
                both = bench.machine.beside(act, load, bench.align)
                is_right = bench.is_first or not side.checks or bench.is_right(1)
                rows = _all(alone_ms, load_ms, both.transfers_ms, both.load_ms, -float(is_right))
                names = ("transfers alone", "load alone", "transfers beside", "load beside")
                figures = {key: max(row[k] for row in rows) for k, key in enumerate(names)}
                is_right = all(row[4] < 0 for row in rows)
                out.setdefault(f"{name}: {load_name}", []).append({**figures, "right": is_right})
    return {key: rows[1:] for key, rows in out.items()}


# The processes


def work(
    peers: Any, rank: int, step: Step, folder: str, device: str, is_shared: bool, options: Mapping[str, Any]
) -> None:
    """One rank of a step; rank 0 writes what is there after each size."""
    os.environ.update(dict(step.environment))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    index = 0 if is_shared else rank
    machine: Machine = OnCpu() if device == "cpu" else OnGpu(index)
    backend = "gloo" if device == "cpu" or is_shared else "cpu:gloo,cuda:nccl"
    store = dist.FileStore(f"{folder}/store", 2)  # type: ignore[attr-defined,unused-ignore]
    dist.init_process_group(backend, store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    bench = Bench(rank, machine, {}, is_shared)
    results: dict[str, Any] = {"sizes": {}}
    for name in step.sides:
        bench.sides[name] = open_side(name, 1 - rank, machine.device)
    num_rounds, is_quick = int(options["rounds"]), bool(options["quick"])
    for size_bytes in step.sizes:
        if step.loads:
            rows = _beside(bench, step, size_bytes, num_rounds, int(options["batch"]))
        else:
            rows = _measure(bench, step, size_bytes, num_rounds, is_quick=is_quick)
        results["sizes"][str(size_bytes)] = rows
        if bench.is_first:
            Path(folder, "results.json").write_text(json.dumps(results))
    for side in bench.sides.values():
        side.close()
    dist.destroy_process_group()
