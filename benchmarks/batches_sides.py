"""The sides of `benchmarks.batches`, as one rank runs them: by hand and by crossfade, in turns, values checked.

By hand, two halves run on two streams; each collective starts on the communicator, or the lane, of its half, and the other half is
launched before the first one waits.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.batches_models import Case, Collective, Stack
from benchmarks.batches_profile import measure_launches, write_profiles
from benchmarks.common import this_machine
from crossfade.batches import Interleaved, interleave
from crossfade.batches.carriers import buffers
from crossfade.peers import PeerGroup, open_group
from crossfade.peers.collectives import all_reduce, all_to_all

NO_PEERS = "NCCL_P2P_DISABLE"
"""NCCL's own word for it, which the other sides heed as well."""
ZEROS = "CROSSFADE_BENCHMARK_ZEROS"
"""Set where weights and inputs are zeros, which take less power."""
MAX_CTAS = 8
"""Blocks of NCCL's kernels on the narrow side."""
_LEAST_ROUNDS, _MOST_ROUNDS, _PROFILED_ROUNDS = 7, 20, 9
"""Blocks of each side. A case has the fewest where little of its time is left."""
SHORT_BLOCK_MS, _LEAST_STEP_MS = 300.0, 15.0
"""A block of one side takes so long at least, or has as many steps as of this length."""
LIMIT = 0.03
"""The largest difference from the serial output, over its largest value: bfloat16 adds up in another order."""
_cuda: Any = torch.cuda
Side = Callable[[Tensor], Tensor]


def work(
    rank: int,
    num_ranks: int,
    device: str,
    store: str,
    cases: Sequence[Case],
    sides_of: Callable[..., list[str]],
    out: str,
    end_s: float,
    *,
    profiles: bool = False,
    block_ms: float = SHORT_BLOCK_MS,
) -> None:
    """One rank of some cases. Rank 0 writes a line of JSON for each round, and for each thing that it learns on the way.

    ``sides_of``: gives the sides of a case. ``profiles``: what the host does in a step of each side is written, in place of timing
    the sides in turns. ``block_ms``: how long a block takes.
    """
    if os.environ.get(NO_PEERS):
        vars(buffers)["can_reach"] = lambda: False
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    backend: dict[str, Any] = {"backend": "gloo"}
    if device == "cuda":
        torch.cuda.set_device(rank)
        backend = {"backend": "nccl", "device_id": torch.device("cuda", rank)}
    else:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
    dist.init_process_group(
        init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120), **backend
    )
    with Path(out).open("a") as file:
        for number, case in enumerate(cases):

            def write(name: str = case.name, **row: Any) -> None:
                if rank == 0:
                    file.write(json.dumps({"case": name, **row}) + "\n")
                    file.flush()

            bench, sides = _Bench(case, device, num_ranks, write, block_ms), sides_of(case, profiles=profiles)
            if profiles:
                bench.profile(sides, Path(out))
            else:
                now_s = slowest(time.time(), device)  # the rest of the time is the rest of the cases'
                bench.go(sides, now_s + (end_s - now_s) / (len(cases) - number))
            if bench.hand is not None:
                bench.hand.close()
            del bench
            if device == "cuda":
                torch.cuda.empty_cache()
    dist.barrier()
    dist.destroy_process_group()


class _Bench:
    """One case on one rank."""

    def __init__(self, case: Case, device: str, num_ranks: int, write: Callable[..., None], block_ms: float) -> None:
        self.case = case
        self.device = device
        self.on_gpu = device == "cuda"
        self.write = write
        self._block_ms = block_ms
        torch.manual_seed(dist.get_rank())
        self.model = case.make(num_ranks, device)
        torch.manual_seed(1000)  # tensor parallelism: the input is the same on all ranks
        dtype = next(self.model.parameters()).dtype
        self.x = torch.randn(case.shape, device=device, dtype=dtype)
        if os.environ.get(ZEROS):
            with torch.no_grad():
                for each in (self.x, *self.model.parameters()):
                    each.zero_()
        self.hand = Halves(self.model, device) if not (case.trains or case.is_random) else None

    def side(self, name: str) -> Side:
        forward = self._forward(name)
        if not self.case.trains:
            return forward

        def step(x: Tensor) -> Tensor:
            self.model.zero_grad(set_to_none=True)
            output = forward(x)
            output.backward(self.x)  # type: ignore[no-untyped-call,unused-ignore]
            return output.detach()

        return step

    def _forward(self, name: str) -> Side:
        captured, hand = self.case.captured, self.hand
        by_hand: dict[str, Side] = {"one batch": self.model}
        if hand is not None:
            by_hand |= {
                "halves, NCCL": hand.by_groups,
                f"halves, NCCL of {MAX_CTAS} blocks": hand.by_narrow_groups,
                "halves, copies": hand.by_copies,
            }
        if captured and self.case.trains and name == "one batch":
            return interleave(self.model, way=name, capture=True)
        if name in by_hand:
            return _captured(by_hand[name], self.x) if captured else by_hand[name]
        if name == "crossfade":
            return interleave(self.model, capture=captured)
        return interleave(self.model, way=name.removeprefix("crossfade, "), capture=captured)

    @contextmanager
    def _modes(self) -> Iterator[None]:
        with (
            torch.enable_grad() if self.case.trains else torch.inference_mode(mode=not self.case.captured),
            torch.set_grad_enabled(self.case.trains),
        ):
            yield

    def profile(self, names: list[str], out: Path) -> None:
        """Sides in turns, since the speed of a host changes. After four steps what comes again has come twice, and is replayed."""
        with self._modes():
            sides = {name: self.side(name) for name in names}
            for side in sides.values():
                for _ in range(4):
                    side(self.x)
            for _ in range(_PROFILED_ROUNDS):
                for name, side in sides.items():
                    dist.barrier()
                    launches = measure_launches(partial(side, self.x), self._settle, on_gpu=self.on_gpu)
                    self.write(side=name, **launches._asdict())
            for name, side in sides.items():
                file = f"{out.stem}_{name.replace(', ', '_').replace(' ', '-')}.profile.rank{dist.get_rank()}.txt"
                write_profiles(partial(side, self.x), self._settle, out.with_name(file), on_gpu=self.on_gpu)
                dist.barrier()

    def go(self, names: list[str], end_s: float) -> None:
        with self._modes():
            wanted, gradients = self._truth()
            sides = dict(self._prepare(names, wanted, gradients))
            steps = self._steps_a_block(sides["one batch"])
            for number in range(_MOST_ROUNDS):
                for name, side in Random(number).sample(list(sides.items()), len(sides)):  # alike on all ranks
                    taken_ms = block_ms(partial(side, self.x), steps, self.device)
                    report = _report_of(side)
                    ways = {} if report is None else {"way": report.way}
                    self.write(side=name, round=number, ms=taken_ms, steps=steps, **ways)
                if number + 1 >= _LEAST_ROUNDS and slowest(time.time(), self.device) > end_s:
                    break
            for name, side in sides.items():
                self._settle_choice(side)  # it may have been measured again meanwhile
                self._tell(name, side)

    def _truth(self) -> tuple[Tensor, list[Tensor]]:
        side = self.model if not self.case.trains else self.side("one batch")
        output = side(self.x).clone()
        return output, self._gradients()

    def _gradients(self) -> list[Tensor]:
        return [each.grad.clone() for each in self.model.parameters() if each.grad is not None]

    def _prepare(self, names: list[str], wanted: Tensor, gradients: list[Tensor]) -> Iterator[tuple[str, Side]]:
        for name in names:
            side = self.side(name)
            begin = time.perf_counter()
            for _ in range(2):
                side(self.x)
            self._settle_choice(side)
            output = side(self.x)
            self._settle()
            error = difference(output, wanted)
            for ours, theirs in zip(self._gradients(), gradients, strict=True):
                error = max(error, difference(ours, theirs))
            error = slowest(error, self.device)
            self.write(side=name, error=error, is_right=error < LIMIT, prepared_s=time.perf_counter() - begin)
            yield name, side
            self._tell(name, side)

    def _settle_choice(self, side: Side) -> None:
        while not getattr(_report_of(side), "is_settled", True):  # a calibration ends in one step on all ranks
            side(self.x)

    def _tell(self, name: str, side: Side) -> None:
        report = _report_of(side)
        if report is not None:
            self.write(side=name, way=report.way, report=str(report))

    def _settle(self) -> None:
        settle(self.device)

    def _steps_a_block(self, serial: Side) -> int:
        taken_ms = statistics.median(block_ms(partial(serial, self.x), 2, self.device) for _ in range(3))
        return max(2, round(self._block_ms / max(taken_ms, _LEAST_STEP_MS)))


def _report_of(side: Any) -> Any:
    """The report of the handle that a side is, or has in its closure."""
    if isinstance(side, Interleaved):
        return side.report()
    for cell in getattr(side, "__closure__", None) or ():
        if isinstance(cell.cell_contents, Interleaved):
            return cell.cell_contents.report()
    return None


def settle(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def block_ms(step: Callable[[], Any], num: int, device: str) -> float:
    """Milliseconds of a step of the slowest rank, of several in a row."""
    settle(device)
    dist.barrier()
    settle(device)
    begin_ns = time.perf_counter_ns()
    for _ in range(num):
        step()
    settle(device)
    return slowest((time.perf_counter_ns() - begin_ns) / 1e6 / num, device)


def join_torchrun() -> tuple[torch.device, str]:
    """This rank's device, and what the ranks run on; of processes that torchrun has started."""
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu"), this_machine([]).hardware
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    return device, f"{dist.get_world_size()} x {torch.cuda.get_device_name()}"


def slowest(value: float, device: str) -> float:
    tensor = torch.tensor([value], dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor.item())


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max())


def _captured(side: Side, x: Tensor) -> Side:
    """The side as a CUDA graph over this very input."""
    for _ in range(3):
        side(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        output = side(x)

    def replay(_: Tensor) -> Tensor:
        graph.replay()
        return output

    return replay


def _options(max_ctas: int) -> Any:
    distributed: Any = dist
    options = distributed.ProcessGroupNCCL.Options()
    options.config.max_ctas = max_ctas
    return options


class Halves:
    """Two halves of a batch by hand."""

    def __init__(self, model: Stack, device: str) -> None:
        self._model = model
        self._on_gpu = device == "cuda"
        ranks = list(range(dist.get_world_size()))
        self._groups = [dist.new_group(ranks) for _ in range(2)]
        self._narrow = (
            [dist.new_group(ranks, pg_options=_options(MAX_CTAS)) for _ in range(2)] if self._on_gpu else self._groups
        )
        self._streams: list[Any] = [_cuda.Stream() for _ in range(4)] if self._on_gpu else []
        self._device = device
        self._peers: PeerGroup | None = None

    def by_groups(self, x: Tensor) -> Tensor:
        return self._run(x, self._start_by_group)

    def by_narrow_groups(self, x: Tensor) -> Tensor:
        return self._run(x, partial(self._start_by_group, groups=self._narrow))

    def by_copies(self, x: Tensor) -> Tensor:
        if self._peers is None:
            options: dict[str, Any] = {"is_staged": True} if os.environ.get(NO_PEERS) else {}
            self._peers = open_group(device=self._device, num_lanes=2, is_replayable=True, **options)
        return self._run(x, self._start_by_copies)

    def close(self) -> None:
        if self._peers is not None:
            self._peers.close()

    def _start_by_group(self, half: int, collective: Collective, groups: list[Any] | None = None) -> Callable[[], Any]:
        name, source, out = collective
        group = (groups or self._groups)[half]
        work: Any = (
            dist.all_reduce(source, group=group, async_op=True)
            if name == "all_reduce"
            else dist.all_to_all_single(out, source, group=group, async_op=True)
        )
        return work.wait  # type: ignore[no-any-return]

    def _start_by_copies(self, half: int, collective: Collective) -> Callable[[], Any]:
        name, source, out = collective
        act = all_reduce if name == "all_reduce" else all_to_all
        if not self._on_gpu:
            act(source, self._peers, out, lane=half)
            return lambda: None
        own, lane = torch.cuda.current_stream(), self._streams[2 + half]
        lane.wait_stream(own)
        with torch.cuda.stream(lane):
            act(source, self._peers, out, lane=half)
        source.record_stream(lane) if not torch.cuda.is_current_stream_capturing() else None
        return lambda: torch.cuda.current_stream().wait_stream(lane)

    def _run(self, x: Tensor, start: Callable[[int, Collective], Callable[[], Any]]) -> Tensor:
        caller = torch.cuda.current_stream() if self._on_gpu else None
        runs = [self._model.steps(part) for part in x.chunk(2)]
        waits: list[Callable[[], Any] | None] = [None, None]
        kept, outputs = list[Any](), dict[int, Tensor]()
        for stream in self._streams[:2]:
            stream.wait_stream(caller)
        while len(outputs) < 2:
            for half, steps in enumerate(runs):
                if half in outputs:
                    continue
                with self._on(half):
                    wait = waits[half]
                    if wait is not None:
                        wait()
                    try:
                        collective = next(steps)
                    except StopIteration as end:
                        outputs[half] = end.value
                        continue
                    waits[half] = start(half, collective)
                    kept.append(collective)
        for stream in self._streams[:2]:
            caller.wait_stream(stream)  # type: ignore[union-attr]
        return torch.cat([outputs[0], outputs[1]])

    @contextmanager
    def _on(self, half: int) -> Iterator[None]:
        if not self._on_gpu:
            yield
            return
        with torch.cuda.stream(self._streams[half]):
            yield
