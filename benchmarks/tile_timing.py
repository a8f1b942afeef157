"""How the sides of a row are timed: eager and captured, in blocks that take turns, each output checked.

A *call* is timed among others: ``num_calls`` of them behind each other between two events (on a CPU: two readings of its clock).
Captured ones are replays of a graph of `NUM_IN_GRAPH` calls. All ranks begin a batch behind a barrier on the stream. In front of
each block the GPU multiplies the row's own operands for some milliseconds, so that all blocks find it as warm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.tile_rows import BASELINE_WAYS
from benchmarks.tile_sides import CAPTURED, EAGER, Ranks, Side, Work
from crossfade.device.capture import capture

__all__ = ["NUM_IN_GRAPH", "Plan", "measure"]

NUM_IN_GRAPH = 4
WARM_MS = 4.0
"""Of products in front of a block."""
HOPELESS = 1.5
"""A candidate that took so much longer than the best one in the first round takes no other turn."""
MOST_ERROR = {torch.bfloat16: 6e-3, torch.float16: 1e-3}
"""Of all elements together: the norm of the difference over the norm of the right ones."""
MOST_OFF = {torch.bfloat16: 0.15, torch.float16: 0.03}
"""Of one element: the difference over the root mean square of the right ones."""
OTHER = "failed on another rank"
Run = Callable[[], object]
Note = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """How much is measured.

    Attributes:
        modes: eager, captured.
        num_rounds: blocks of each side.
        num_batches: of a block.
        num_calls: of a batch.
    """

    modes: tuple[str, ...]
    num_rounds: int
    num_batches: int
    num_calls: int


@dataclass
class Ready:
    """A side in one mode.

    Attributes:
        side: which.
        mode: eager or captured.
        run: a batch of calls.
        last: the output of the last call.
        drop: gives back what a graph holds.
    """

    side: Side
    mode: str
    run: Run
    last: Callable[[], torch.Tensor | None]
    drop: Callable[[], object]


def measure(work: Work, ranks: Ranks, sides: Sequence[Side], plan: Plan, note: Note) -> None:
    """Sets all sides up, times them in turn, and fills in their blocks and errors. Collective."""
    ready = [each for mode in plan.modes for side in sides if (each := _set_up(work, ranks, side, mode, plan, note))]
    num_warm = _num_warm(work, ranks)
    try:
        for number in range(plan.num_rounds):
            order = ready if number % 2 == 0 else ready[::-1]
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


def _set_up(work: Work, ranks: Ranks, side: Side, mode: str, plan: Plan, note: Note) -> Ready | None:
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
            last = ready.last()
            if last is not None and side.wanted is not None:
                last.fill_(float("nan"))
            _finish(ranks)
            ready.run()
            _finish(ranks)
            if last is not None and not _is_right(work, side, last):
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
    box: list[torch.Tensor] = []

    def run() -> None:
        for _ in range(num_calls):
            box[:] = [call()]

    return Ready(side, EAGER, run, lambda: box[0] if box else None, box.clear)


def _capture(ranks: Ranks, side: Side, num_replays: int) -> Ready:
    call, group = side.calls[CAPTURED], ranks.groups[CAPTURED]
    box: list[torch.Tensor] = []

    def body() -> None:
        for _ in range(NUM_IN_GRAPH):
            box[:] = [call()]

    launch: Run
    if ranks.device.type == "cpu":
        driver, stream = group.home.driver, group.current_stream()
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


def _block(work: Work, ranks: Ranks, each: Ready, plan: Plan, num_warm: int) -> list[float]:
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
    ours = [each.side.candidate is not None and each.side.candidate.name != "plain" for each in ready]
    best: dict[str, float] = {}
    for each, time_us, is_candidate in zip(ready, times_us, ours, strict=True):
        if is_candidate:
            best[each.mode] = min(time_us, best.get(each.mode, time_us))
    kept = []
    for each, time_us, is_candidate in zip(ready, times_us, ours, strict=True):
        if is_candidate and time_us > HOPELESS * best[each.mode]:
            each.drop()
        else:
            kept.append(each)
    return kept


def _num_warm(work: Work, ranks: Ranks) -> int:
    torch.mm(work.whole, work.b, out=work.product)
    _finish(ranks)
    begin = time.perf_counter()
    torch.mm(work.whole, work.b, out=work.product)
    _finish(ranks)
    return max(1, min(round(WARM_MS / 1e3 / max(time.perf_counter() - begin, 1e-5)), 100))


def _poison(work: Work) -> None:
    """The next output of this size is likely to be of this memory."""
    work.out.fill_(float("nan"))
    for like in (work.out, work.product):
        torch.full_like(like, float("nan"))


def _check_again(work: Work, ranks: Ranks, each: Ready) -> None:
    """What a last batch gives, after all those that were timed, in an output that was poisoned."""
    side, stale = each.side, each.last()
    if side.wanted is None:
        return
    if stale is not None:
        stale.fill_(float("nan"))
    del stale
    _finish(ranks)
    each.run()
    _finish(ranks)
    got = each.last()
    if got is not None and not _is_right(work, side, got):
        side.errors["right"] = f"wrong at the end, {each.mode}: relative error {side.worst:.2e}"


def _is_right(work: Work, side: Side, got: torch.Tensor) -> bool:
    if side.wanted is None:
        return True
    want = work.wanted[side.wanted]
    if got.shape != want.shape:
        return False
    difference = got.float() - want
    scale = want.norm() / max(want.numel(), 1) ** 0.5
    whole = float(difference.norm() / want.norm())
    off = float(difference.abs().max() / scale)
    side.worst = whole if whole != whole else max(side.worst, whole)
    return whole <= MOST_ERROR.get(got.dtype, 1e-5) and off <= MOST_OFF.get(got.dtype, 1e-4)


def _finish(ranks: Ranks) -> None:
    if ranks.device.type == "cuda":
        torch.cuda.synchronize()
        for group in ranks.groups.values():
            group.check()


def _line(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first:.300}"
