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
from crossfade.peers import collectives, open_group
from crossfade.peers.group import PeerGroup

OPS = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
NCCL, URGENT, SEVERAL = "NCCL", "NCCL, urgent", "NCCL, 4 groups"
NCCLS = (NCCL, URGENT, SEVERAL)
NUM_LANES = 4
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
    """One way to do a collective by copy engines.

    Attributes:
        name: what a table calls it.
        is_on_heap: the output is one that the other ranks write themselves.
        is_in_place: an all-gather's input lies in its output.
        num_lanes: calls that may be in flight at the same time, each lane on a stream of its own.
        num_coalesced: tensors of one call, each on a lane, all on one stream.
    """

    name: str
    is_on_heap: bool = False
    is_in_place: bool = False
    num_lanes: int = 1
    num_coalesced: int = 1


@dataclass
class Bench:
    """One rank."""

    dist: Any
    rank: int
    num_ranks: int
    nccls: dict[str, list[Any]]
    groups: dict[bool, PeerGroup]
    gemms: Gemms
    streams: dict[bool, list[Any]]
    gathered: torch.Tensor
    heap: dict[tuple[bool, int], list[torch.Tensor]] = field(default_factory=dict)
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
    everybody = list(range(num_ranks))
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    nccls = {
        NCCL: [dist.new_group(everybody)],
        URGENT: [dist.new_group(everybody, pg_options=options)],
        SEVERAL: [dist.new_group(everybody) for _ in range(NUM_LANES)],
    }
    groups = {
        is_captured: open_group(
            buffer_bytes=1024 * MB,
            heap_bytes=5000 * MB,
            num_lanes=NUM_LANES,
            is_replayable=is_captured,
        )
        for is_captured in (False, True)
    }
    streams = {
        is_urgent: [torch.cuda.Stream(priority=-1 if is_urgent else 0) for _ in range(NUM_LANES)]  # type: ignore[no-untyped-call]
        for is_urgent in (False, True)
    }
    gathered = torch.empty(num_ranks * 128 * MB, device="cuda", dtype=torch.bfloat16)
    return Bench(dist, rank, num_ranks, nccls, groups, Gemms(rank), streams, gathered)


@dataclass
class Runner:
    """One variant of one case, ready to run: calls in turn on streams of their own."""

    streams: list[Any]
    calls: list[Call]
    outs: list[torch.Tensor]
    input: torch.Tensor | None = None
    num_calls: int = 1
    num_in_call: int = 1
    graph: Any = None
    alone: list[float] = field(default_factory=list)
    beside: list[dict[str, float]] = field(default_factory=list)

    @property
    def stream(self) -> Any:
        """The one that all others begin behind, and that goes on behind them."""
        return self.streams[0]

    def refill(self) -> None:
        """An input in place is as it was (else its sums would grow without end)."""
        if self.input is not None:
            for out in self.outs:
                out.copy_(self.input)

    def act(self) -> None:
        if self.graph is not None:
            self.graph.replay()
            return
        for other in self.streams[1:]:
            other.wait_stream(self.stream)
        for number in range(self.num_calls // self.num_in_call):
            which = number % len(self.calls)
            with torch.cuda.stream(self.streams[which]):
                self.calls[which]()
        for other in self.streams[1:]:
            self.stream.wait_stream(other)

    def capture(self) -> None:
        graph: Any = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local"):
            self.act()
        self.graph = graph


def _nccl_runner(bench: Bench, case: Case, name: str, source: torch.Tensor, numel: int) -> Runner:
    groups = bench.nccls[name]
    outs = [torch.empty(numel, device="cuda", dtype=source.dtype) for _ in groups]
    calls = [bench.nccl(case, source, out, group) for out, group in zip(outs, groups, strict=True)]
    streams = bench.streams[name == URGENT][: len(groups)]
    return Runner(streams, calls, outs, source if case.op == "all_reduce" else None)


def _runner(
    bench: Bench, case: Case, variant: Variant, source: torch.Tensor, numel: int, *, is_captured: bool
) -> Runner:
    group = bench.groups[is_captured]
    if variant.num_coalesced > 1:
        return _coalesced_runner(bench, case, variant, source, numel, is_captured=is_captured)
    outs = _outs(bench, variant, numel, source.dtype, is_captured=is_captured)
    calls: list[Call] = []
    for lane in range(variant.num_lanes):
        own = source
        if variant.is_in_place:
            own = outs[lane][bench.rank * source.numel() : (bench.rank + 1) * source.numel()]

        def call(lane: int = lane, own: torch.Tensor = own, out: torch.Tensor = outs[lane]) -> None:
            getattr(collectives, case.op)(own, group, out, lane=lane)

        calls.append(call)
    return Runner(bench.streams[True][: variant.num_lanes], calls, outs)


def _outs(bench: Bench, variant: Variant, numel: int, dtype: torch.dtype, *, is_captured: bool) -> list[torch.Tensor]:
    num = max(variant.num_lanes, variant.num_coalesced)
    if not variant.is_on_heap:
        return [torch.empty(numel, device="cuda", dtype=dtype) for _ in range(num)]
    held = bench.heap.setdefault((is_captured, numel), [])
    while len(held) < num:
        held.append(bench.groups[is_captured].empty(numel, dtype=dtype))
    return held[:num]


def _coalesced_runner(
    bench: Bench, case: Case, variant: Variant, source: torch.Tensor, numel: int, *, is_captured: bool
) -> Runner:
    group = bench.groups[is_captured]
    function = getattr(collectives, f"{case.op}_coalesced")
    num = variant.num_coalesced
    outs = _outs(bench, variant, numel, source.dtype, is_captured=is_captured)

    def call() -> None:
        function([source] * num, group, outs)

    return Runner(bench.streams[True][:1], [call], outs, num_in_call=num)


def measure(
    bench: Bench, case: Case, variants: Sequence[Variant], is_captured: bool, num_rounds: int
) -> dict[str, Any]:
    """All variants in turn, round by round."""
    source, numel = bench.tensors(case)
    runners = {name: _nccl_runner(bench, case, name, source, numel) for name in NCCLS}
    in_place = {variant.name for variant in variants if variant.is_in_place}
    for variant in variants:
        runners[variant.name] = _runner(bench, case, variant, source, numel, is_captured=is_captured)
    expected = bench.expected(case, source)
    nccl = runners[NCCL]
    nccl.num_calls = 8
    each_ms = min(bench.alone_ms(nccl.stream, nccl.act) for _ in range(3)) / nccl.num_calls
    gemms_ms = min(_gemms_ms(bench) for _ in range(3))
    num_calls = NUM_LANES * int(bench.agree(min(max(round(gemms_ms / each_ms / NUM_LANES), 1), MAX_CALLS // NUM_LANES)))
    for name, runner in runners.items():
        _poison(bench, runner, source, name in in_place)
        runner.num_calls = len(runner.calls) * runner.num_in_call
        with torch.cuda.stream(runner.stream):
            runner.act()
        torch.cuda.synchronize()
        runner.num_calls = num_calls
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
    right = {
        name: _is_right(bench, case, runner, source, expected, name, name in in_place)
        for name, runner in runners.items()
    }
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


def _poison(bench: Bench, runner: Runner, source: torch.Tensor, is_in_place: bool) -> None:
    """Fills the outputs with what no result is, when no rank still writes them."""
    torch.cuda.synchronize()
    bench.agree(0.0)
    for out in runner.outs:
        out.fill_(POISON)
        if is_in_place:
            out[bench.rank * source.numel() : (bench.rank + 1) * source.numel()].copy_(source)
    runner.refill()
    torch.cuda.synchronize()
    bench.agree(0.0)


def _is_right(
    bench: Bench,
    case: Case,
    runner: Runner,
    source: torch.Tensor,
    expected: torch.Tensor,
    name: str,
    is_in_place: bool,
) -> bool:
    """Whether a last run, beside matrix products, fills poisoned outputs with the right values."""
    _poison(bench, runner, source, is_in_place)
    if runner.input is not None:
        runner.num_calls, runner.graph = len(runner.calls) * runner.num_in_call, None
    bench.beside_ms(runner.stream, runner.act)
    if name not in NCCLS or case.op in ("all_gather", "all_to_all"):
        return all(torch.equal(out.view(torch.int16), expected.view(torch.int16)) for out in runner.outs)
    largest = expected.float().abs().max()
    return all(bool((out.float() - expected.float()).abs().max() < 0.02 * largest) for out in runner.outs)
