"""How the sides of a row are timed: eager and captured, in blocks that take turns, each output checked.

A *call* is timed among others: ``num_calls`` of them behind each other between two events (on a CPU: two readings of its clock).
Captured ones are replays of a graph of `NUM_IN_GRAPH` calls. All ranks begin a batch behind a barrier on the stream. In front of
each block the GPU multiplies the row's own operands for some milliseconds, and in each round the sides come in another random
order: a GPU at its power limit is faster behind a side that leaves it idle.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import Any, Protocol

import torch
import torch.distributed as dist

from benchmarks.tile_rows import BASELINE_WAYS
from benchmarks.tile_sides import CAPTURED, EAGER, Ranks, Side
from crossfade.device.capture import capture
from crossfade.ops.choice.candidate import PLAIN

__all__ = ["NUM_IN_GRAPH", "Plan", "measure"]

NUM_IN_GRAPH = 4
WARM_MS = 20.0
"""Of products in front of a block."""
BLOCK_MS, MOST_BATCHES = 20.0, 16
"""A block has as many batches as its calls' products alone would take so long, but no more than so many: medians of short calls
need more of them.
"""
NUM_FIRST = 20
"""Times that, in front of the first block: by then clocks and power have settled."""
HOPELESS = 1.5
"""A candidate that took so much longer than the best one in the first round takes no other turn."""
OTHER = "failed on another rank"
Run = Callable[[], object]
Outputs = torch.Tensor | tuple[torch.Tensor, ...]
Note = Callable[[str], None]


class Load(Protocol):
    """What sides work on.

    Attributes:
        whole, b, product: of a large product.
        out: a buffer like an output.
        wanted: what must come out, by name, in float32.
        most_error: of all elements together: the norm of the difference over the norm of the right ones.
        most_off: of one element: the difference over the root mean square of the right ones.
    """

    whole: torch.Tensor
    b: torch.Tensor
    product: torch.Tensor
    out: torch.Tensor
    wanted: dict[str, torch.Tensor]

    @property
    def most_error(self) -> float: ...

    @property
    def most_off(self) -> float: ...


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        modes: eager, captured.
        num_rounds: blocks of each side.
        num_batches: of a block, at least.
        num_calls: of a batch.
        seed: of the order in which sides take turns; the same on all ranks.
    """

    modes: tuple[str, ...]
    num_rounds: int
    num_batches: int
    num_calls: int
    seed: int = 0


@dataclass
class Ready:
    """A side in one mode.

    Attributes:
        side: which.
        mode: eager or captured.
        run: a batch of calls.
        last: what the last call gave.
        drop: gives back what a graph holds.
    """

    side: Side
    mode: str
    run: Run
    last: Callable[[], Outputs | None]
    drop: Callable[[], object]


def measure(work: Load, ranks: Ranks, sides: Sequence[Side], plan: Plan, note: Note) -> None:
    """Sets all sides up, times them in turn, and fills in their blocks and errors. Collective."""
    ready = [each for mode in plan.modes for side in sides if (each := _set_up(work, ranks, side, mode, plan, note))]
    (product_s,) = ranks.largest([_product_s(work, ranks)])  # so all ranks do the same number of batches
    num_warm = max(1, min(round(WARM_MS / 1e3 / product_s), 500))
    num_batches = plan.num_batches
    if ranks.device.type == "cuda":
        num_batches = max(num_batches, min(round(BLOCK_MS / 1e3 / (product_s * plan.num_calls)), MOST_BATCHES))
    plan = replace(plan, num_batches=num_batches)
    for _ in range(NUM_FIRST * num_warm if ranks.device.type == "cuda" else 1):
        torch.mm(work.whole, work.b, out=work.product)
    try:
        for number in range(plan.num_rounds):
            order = Random(plan.seed + number).sample(ready, len(ready))  # alike on all ranks
            for each in order:
                note(f"{each.side.name}|{each.mode}")
                each.side.blocks.setdefault(each.mode, []).append(_block(work, ranks, each, plan, num_warm))
            if number == 0:
                ready = _worth_more(ranks, ready)
        for each in ready:
            note(f"{each.side.name}|{each.mode}")
            _check_again(work, ranks, each)
    finally:
        for each in ready:
            each.drop()


def _set_up(work: Load, ranks: Ranks, side: Side, mode: str, plan: Plan, note: Note) -> Ready | None:
    """A side that all ranks could do, with the right result; else None, and the reason in the side's errors."""
    note(f"{side.name}|{mode}")
    if mode in side.errors:
        return None
    call, why, ready = side.calls[mode], "", None
    try:
        _poison(work)
        if side.before is not None:
            side.before()
        got = call()
        _finish(ranks)
        if not _is_right(work, side, got):
            why = side.errors["right"] = f"wrong, {mode}: relative error {side.worst:.2e}"
        del got
    except Exception as error:
        why = _line(error)
    if not ranks.agree(not why):
        side.errors.setdefault(mode, why or OTHER)
        _require_whole(ranks)
        return None
    if mode == EAGER:
        return _eager(side, plan.num_calls)
    if ranks.device.type == "cpu" and (side.candidate is None or side.candidate.name in BASELINE_WAYS):
        why = "not captured on a CPU"
    else:
        try:
            ready = _capture(ranks, side, max(plan.num_calls // NUM_IN_GRAPH, 1))
            if side.before is not None:
                side.before()
            _spoil(side, ready.last())
            _finish(ranks)
            ready.run()
            _finish(ranks)
            if not _is_right(work, side, ready.last()):
                why = side.errors["right"] = f"wrong, replayed: relative error {side.worst:.2e}"
        except Exception as error:
            why = _line(error)
    if not ranks.agree(not why):
        side.errors.setdefault(mode, why or OTHER)
        _require_whole(ranks)
        if ready is not None:
            ready.drop()
        return None
    return ready


def _require_whole(ranks: Ranks) -> None:
    """What failed may have broken a lane, and then nothing else of this row can be measured by these processes."""
    for group in ranks.groups.values():
        group.check()


def _eager(side: Side, num_calls: int) -> Ready:
    call = side.calls[EAGER]
    box: list[Outputs] = []

    def run() -> None:
        for _ in range(num_calls):
            box[:] = [call()]

    return Ready(side, EAGER, run, lambda: box[0] if box else None, box.clear)


def _capture(ranks: Ranks, side: Side, num_replays: int) -> Ready:
    call, group = side.calls[CAPTURED], ranks.groups[CAPTURED]
    box: list[Outputs] = []

    def body() -> None:
        for _ in range(NUM_IN_GRAPH):
            box[:] = [call()]

    launch: Run
    if ranks.device.type == "cpu":
        driver, stream = group.memory.driver, group.current_stream()
        replay = capture(driver, stream, body)
        launch, close = partial(replay.launch, stream), replay.close
    else:
        graph: Any = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            body()
        launch, close = graph.replay, graph.reset

    def run() -> None:
        for _ in range(num_replays):
            launch()

    def drop() -> None:
        _finish(ranks)
        box.clear()
        close()

    return Ready(side, CAPTURED, run, lambda: box[0] if box else None, drop)


def num_calls_of(mode: str, num_calls: int) -> int:
    """How many calls a batch really has."""
    return num_calls if mode == EAGER else max(num_calls // NUM_IN_GRAPH, 1) * NUM_IN_GRAPH


def _block(work: Load, ranks: Ranks, each: Ready, plan: Plan, num_warm: int) -> list[float]:
    """Microseconds a call of each batch, on this rank."""
    for _ in range(num_warm):
        torch.mm(work.whole, work.b, out=work.product)
    num = num_calls_of(each.mode, plan.num_calls)
    if ranks.device.type == "cpu":
        return [_on_host(ranks, each) / num for _ in range(plan.num_batches)]
    pairs: list[Any] = []
    tick = torch.zeros(1, device=ranks.device)
    for _ in range(plan.num_batches):
        if each.side.before is not None:
            each.side.before()
        dist.all_reduce(tick)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        each.run()
        last.record()
        pairs.append((first, last))
    _finish(ranks)
    return [1e3 * float(first.elapsed_time(last)) / num for first, last in pairs]


def _on_host(ranks: Ranks, each: Ready) -> float:
    if each.side.before is not None:
        each.side.before()
    dist.barrier()
    begin_ns = time.perf_counter_ns()
    each.run()
    return (time.perf_counter_ns() - begin_ns) / 1e3


def _worth_more(ranks: Ranks, ready: list[Ready]) -> list[Ready]:
    """All but candidates that the first round showed to be far behind; alike on all ranks."""
    times_us = ranks.largest([statistics.median(each.side.blocks[each.mode][0] or [0.0]) for each in ready])
    best: dict[str, float] = {}
    for each, time_us in zip(ready, times_us, strict=True):
        if each.side.candidate is not None:
            best[each.mode] = min(time_us, best.get(each.mode, time_us))
    kept = []
    for each, time_us in zip(ready, times_us, strict=True):
        candidate = each.side.candidate
        if candidate not in (None, PLAIN) and time_us > HOPELESS * best[each.mode]:
            each.drop()
        else:
            kept.append(each)
    return kept


def _product_s(work: Load, ranks: Ranks) -> float:
    torch.mm(work.whole, work.b, out=work.product)
    _finish(ranks)
    begin = time.perf_counter()
    torch.mm(work.whole, work.b, out=work.product)
    _finish(ranks)
    return max(time.perf_counter() - begin, 1e-5)


def _poison(work: Load) -> None:
    """The next output of this size is likely to be of this memory."""
    work.out.fill_(float("nan"))
    for like in (work.out, work.product):
        torch.full_like(like, float("nan"))


def _check_again(work: Load, ranks: Ranks, each: Ready) -> None:
    """What a last batch gives, after all those that were timed, in an output that was poisoned."""
    side = each.side
    if side.wanted is None:
        return
    _spoil(side, each.last())
    _finish(ranks)
    each.run()
    _finish(ranks)
    if not _is_right(work, side, each.last()):
        side.errors["right"] = f"wrong at the end, {each.mode}: relative error {side.worst:.2e}"


def _spoil(side: Side, outputs: Outputs | None) -> None:
    if side.wanted is not None and outputs is not None:
        for each in _several(outputs):
            each.fill_(float("nan"))


def _several(outputs: Outputs) -> tuple[torch.Tensor, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _is_right(work: Load, side: Side, outputs: Outputs | None) -> bool:
    if side.wanted is None or outputs is None:
        return True
    names = (side.wanted,) if isinstance(side.wanted, str) else side.wanted
    pairs = zip(_several(outputs), (work.wanted[name] for name in names), strict=True)
    near = [_is_near(work, side, got, want) for got, want in pairs]  # all of them, for the worst
    return all(near)


def _is_near(work: Load, side: Side, got: torch.Tensor, want: torch.Tensor) -> bool:
    if got.shape != want.shape:
        return False
    difference = got.float() - want
    whole = float(difference.norm() / want.norm())
    off = float(difference.abs().max() / want.norm()) * want.numel() ** 0.5
    side.worst = whole if whole != whole else max(side.worst, whole)
    return whole <= work.most_error and off <= work.most_off


def _finish(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
        for group in ranks.groups.values():
            group.check()


def _line(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first:.300}"
