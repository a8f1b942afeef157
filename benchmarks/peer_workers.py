"""What the processes of ``benchmarks.peer_collectives`` do: one GPU each, collectives by copy engines beside NCCL's in one run.

Inputs are random bf16 numbers. Each variant's output is poisoned first and compared afterwards: bit for bit with the parts of all
ranks put together or, for sums, with float32 sums in the order of the ranks, rounded once (NCCL's, which adds in another order and
rounds in between, within 2 % of the largest number).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.device_workers import MB, Gemms, Peers, event, init_nccl
from crossfade.peers import collectives
from crossfade.peers.group import PeerGroup, open_group
from crossfade.peers.tuning import DEFAULT, Tuning

OPS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
NCCL, URGENT = "NCCL", "NCCL, urgent"
MAX_CALLS = 48
POISON = 1e4

Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """A collective of one size.

    Attributes:
        op: one of `OPS`.
        size_mb: of a rank's input; for an all-gather that is a shard, for the others the whole tensor.
    """

    op: str
    size_mb: int

    def __str__(self) -> str:
        return f"{self.op} {self.size_mb} MB"


@dataclass(frozen=True)
class Variant:
    """One way to do a collective by copy engines."""

    name: str
    tuning: Tuning = DEFAULT
    is_on_heap: bool = False


@dataclass
class Bench:
    """One rank."""

    dist: Any
    rank: int
    num_ranks: int
    urgent: Any
    groups: dict[bool, PeerGroup]
    gemms: Gemms
    streams: dict[bool, Any]
    gathered: torch.Tensor
    tick: torch.Tensor = field(default_factory=lambda: torch.zeros(1, device="cuda"))

    # the calls

    def tensors(self, case: Case) -> tuple[torch.Tensor, int]:
        """The input, and the number of elements of the output."""
        numel = case.size_mb * MB // 2
        torch.manual_seed(1000 * self.rank + case.size_mb)
        source = torch.randn(numel, device="cuda", dtype=torch.bfloat16)
        factor = {"all_gather": self.num_ranks, "reduce_scatter": 1 / self.num_ranks}.get(case.op, 1)
        return source, int(numel * factor)

    def nccl(self, case: Case, source: torch.Tensor, out: torch.Tensor, group: Any) -> Call:
        """NCCL's call; its all-reduce is in place, in ``out``."""
        dist = self.dist
        if case.op == "all_gather":
            return lambda: dist.all_gather_into_tensor(out, source, group=group)
        if case.op == "all_to_all":
            return lambda: dist.all_to_all_single(out, source, group=group)
        if case.op == "reduce_scatter":
            return lambda: dist.reduce_scatter_tensor(out, source, group=group)
        return lambda: dist.all_reduce(out, group=group)

    def expected(self, case: Case, source: torch.Tensor) -> torch.Tensor:
        """What has to come out, from all ranks' inputs."""
        everything = self.gathered[: source.numel() * self.num_ranks]
        self.dist.all_gather_into_tensor(everything, source)
        rows = everything.view(self.num_ranks, -1)
        if case.op == "all_gather":
            return everything
        part = source.numel() // self.num_ranks
        own = slice(self.rank * part, (self.rank + 1) * part)
        if case.op == "all_to_all":
            return rows[:, own].reshape(-1)
        total = rows[0].float()
        for row in rows[1:]:
            total += row
        return (total[own] if case.op == "reduce_scatter" else total).bfloat16()

    # timing

    def align(self, stream: Any) -> None:
        """All GPUs begin what follows on the stream at the same time."""
        with torch.cuda.stream(stream):
            self.dist.all_reduce(self.tick)

    def alone_ms(self, stream: Any, act: Call) -> float:
        first, last = event(), event()
        self.align(stream)
        with torch.cuda.stream(stream):
            first.record()
            act()
            last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last))

    def beside_ms(self, stream: Any, act: Call) -> dict[str, float]:
        first, last = event(), event()
        self.align(stream)
        with torch.cuda.stream(stream):
            first.record()
        self.gemms.stream.wait_event(first)
        _, worked = self.gemms.run()
        with torch.cuda.stream(stream):
            act()
            last.record()
        torch.cuda.synchronize()
        moved_ms, worked_ms = first.elapsed_time(last), first.elapsed_time(worked)
        return {"transfer": moved_ms, "GEMMs": worked_ms, "both": max(moved_ms, worked_ms)}

    def agree(self, value: float) -> float:
        """The largest of all ranks'."""
        box = torch.tensor([value], device="cuda")
        self.dist.all_reduce(box, op=self.dist.ReduceOp.MAX)
        return float(box.item())


def run(
    peers: Peers,
    rank: int,
    num_ranks: int,
    store: str,
    folder: str,
    cases: Sequence[Case],
    variants: dict[str, list[Variant]],
    modes: Sequence[str],
    num_rounds: int,
) -> None:
    """Measures case by case, and writes after each."""
    bench = _open(rank, num_ranks, store)
    path = Path(folder) / f"rank{rank}.json"
    results: dict[str, Any] = {}
    for case in cases:
        for mode in modes:
            results[f"{case}, {mode}"] = measure(bench, case, variants[case.op], mode == "captured", num_rounds)
            path.write_text(json.dumps(results))
            if rank == 0:
                print(f"{case}, {mode}: done", flush=True)
    for group in bench.groups.values():
        group.close()
    torch.cuda.synchronize()
    bench.dist.destroy_process_group()


def _open(rank: int, num_ranks: int, store: str) -> Bench:
    dist = init_nccl(rank, store, {}, num_ranks)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    urgent = dist.new_group(list(range(num_ranks)), pg_options=options)
    groups = {
        is_captured: open_group(buffer_bytes=256 * MB, heap_bytes=600 * MB, num_streams=3, is_replayable=is_captured)
        for is_captured in (False, True)
    }
    streams = {
        is_urgent: torch.cuda.Stream(priority=-1 if is_urgent else 0)  # type: ignore[no-untyped-call]
        for is_urgent in (False, True)
    }
    gathered = torch.empty(num_ranks * 128 * MB, device="cuda", dtype=torch.bfloat16)
    return Bench(dist, rank, num_ranks, urgent, groups, Gemms(rank), streams, gathered)


@dataclass
class Runner:
    """One variant of one case, ready to run."""

    stream: Any
    call: Call
    out: torch.Tensor
    input: torch.Tensor | None = None
    num_calls: int = 1
    graph: Any = None
    alone: list[float] = field(default_factory=list)
    beside: list[dict[str, float]] = field(default_factory=list)

    def refill(self) -> None:
        """An input in place is as it was (else its sums would grow without end)."""
        if self.input is not None:
            self.out.copy_(self.input)

    def act(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for _ in range(self.num_calls):
            self.call()

    def capture(self) -> None:
        graph: Any = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.act()
        self.graph = graph


def _runners(
    bench: Bench, case: Case, variants: Sequence[Variant], heap: dict[int, torch.Tensor], is_captured: bool
) -> tuple[dict[str, Runner], torch.Tensor]:
    source, numel = bench.tensors(case)
    runners = {}
    for name, group in ((NCCL, None), (URGENT, bench.urgent)):
        out = torch.empty(numel, device="cuda", dtype=source.dtype)
        is_in_place = case.op == "all_reduce"
        call = bench.nccl(case, source, out, group)
        runners[name] = Runner(bench.streams[group is not None], call, out, source if is_in_place else None)
    mine = bench.groups[is_captured]
    function = getattr(collectives, case.op)
    for variant in variants:
        if variant.is_on_heap:
            out = heap[numel] if numel in heap else heap.setdefault(numel, mine.empty(numel, dtype=source.dtype))
        else:
            out = torch.empty(numel, device="cuda", dtype=source.dtype)

        def enqueue(out: torch.Tensor = out, tuning: Tuning = variant.tuning) -> None:
            function(mine, source, out, tuning=tuning)

        runners[variant.name] = Runner(bench.streams[True], enqueue, out)
    return runners, source


_heaps: dict[bool, dict[int, torch.Tensor]] = {False: {}, True: {}}


def measure(
    bench: Bench, case: Case, variants: Sequence[Variant], is_captured: bool, num_rounds: int
) -> dict[str, Any]:
    """All variants in turn, round by round."""
    runners, source = _runners(bench, case, variants, _heaps[is_captured], is_captured)
    expected = bench.expected(case, source)
    nccl = runners[NCCL]
    nccl.num_calls = 8
    each_ms = min(bench.alone_ms(nccl.stream, nccl.act) for _ in range(3)) / nccl.num_calls
    gemms_ms = min(_gemms_ms(bench) for _ in range(3))
    num_calls = int(bench.agree(min(max(round(gemms_ms / each_ms), 1), MAX_CALLS)))
    for runner in runners.values():
        runner.num_calls = num_calls
        with torch.cuda.stream(runner.stream):
            runner.call()
        if is_captured:
            runner.capture()
    gemms: list[float] = []
    for _ in range(num_rounds + 2):
        bench.agree(0.0)
        gemms.append(_gemms_ms(bench))
        for runner in runners.values():
            runner.refill()
            runner.alone.append(bench.alone_ms(runner.stream, runner.act) / num_calls)
            runner.refill()
            runner.beside.append(bench.beside_ms(runner.stream, runner.act))
    right = {name: _is_right(bench, case, runner, expected, name) for name, runner in runners.items()}
    return {
        "num_calls": num_calls,
        "GEMMs alone": gemms[2:],
        "variants": {
            name: {"alone": r.alone[2:], "beside": r.beside[2:], "right": right[name]} for name, r in runners.items()
        },
    }


def _gemms_ms(bench: Bench) -> float:
    first, last = bench.gemms.run()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def _is_right(bench: Bench, case: Case, runner: Runner, expected: torch.Tensor, name: str) -> bool:
    """Whether a last run, beside matrix products, fills a poisoned output with the right values."""
    runner.out.fill_(POISON)
    runner.refill()
    if runner.input is not None:
        runner.num_calls, runner.graph = 1, None
    torch.cuda.synchronize()
    bench.agree(0.0)
    bench.beside_ms(runner.stream, runner.act)
    if name not in (NCCL, URGENT) or case.op in ("all_gather", "all_to_all"):
        return bool(torch.equal(runner.out.view(torch.int16), expected.view(torch.int16)))
    error = (runner.out.float() - expected.float()).abs().max() / expected.float().abs().max()
    return bool(error.item() < 0.02)
