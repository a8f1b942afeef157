"""What can be measured: each measure is a generator that every rank of its step runs (see ``context.py``)."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping
from statistics import median
from typing import Any

from crossfade.device.capture import capture
from crossfade.profile.carriers import most_at_once, parts_of
from crossfade.profile.context import Context, Measure, Told
from crossfade.profile.steps import Step
from crossfade.profile.timing import Load, Part, measure_parts

NUM_CALLS, NUM_ROUNDS = 100, 7
"""Calls are few enough that a stream holds all of them."""
COPY_BYTES = 4096


def launch(context: Context, step: Step) -> Generator[Any, Told, dict[str, float]]:
    """What enqueuing costs a host, in microseconds for each operation: its own time, call after call, while the device works."""
    driver, bench = context.driver, context.bench
    stream = context.lane(0)
    source, target = context.buffer("source"), context.buffer("target")
    counter, event = context.counter(context.rank, context.rank), driver.create_event()
    replay = capture(driver, stream, lambda: driver.copy(target, source, COPY_BYTES, stream))
    operations: dict[str, Callable[[], None]] = {
        "copy": lambda: driver.copy(target, source, COPY_BYTES, stream),
        "write": lambda: counter.set(stream, 1),
        "wait": lambda: counter.wait(stream, 1),
        "record": lambda: driver.record_event(event, stream),
        "wait event": lambda: driver.wait_event(stream, event),
        "kernel": lambda: bench.kernel(stream),
        "graph": lambda: replay.launch(stream),
    }
    costs: dict[str, float] = {}
    for name, call in operations.items():
        call()  # nothing is loaded later
        rounds = []
        for _ in range(NUM_ROUNDS):
            while not driver.is_idle(stream):
                bench.pause()
            begin_us = bench.now_us()
            for _ in range(NUM_CALLS):
                call()
            rounds.append((bench.now_us() - begin_us) / NUM_CALLS)
        costs[name] = median(rounds)
    while not driver.is_idle(stream):
        bench.pause()
    replay.close()
    driver.destroy_event(event)
    yield None
    return costs


NUM_TRIPS = 50


def signals(context: Context, step: Step) -> Generator[Any, Told, float]:
    """Microseconds that a signal takes from a stream of one device to one of another: there and back many times, no host."""
    (round_us,) = yield from measure_parts(context, [Load(_PingPong(context, step), NUM_TRIPS)])
    return round_us / NUM_TRIPS / 2


class _PingPong(Part):
    """One rank's half: all of it is enqueued before the gate opens, so no wait needs a host (PL-5)."""

    def __init__(self, context: Context, step: Step) -> None:
        first, second = step.ranks
        self._is_first = context.rank == first
        other = second if self._is_first else first
        self._tell = context.counter(context.rank, other)
        self._hear = context.counter(other, context.rank)
        self.timed: int = context.lane(0)

    def begin(self, size_bytes: int, num: int) -> Any:
        for count in range(self._hear.awaited + 1, self._hear.awaited + num + 1):
            if self._is_first:
                self._tell.set(self.timed, count)
                self._hear.wait(self.timed, count)
            else:
                self._hear.wait(self.timed, count)
                self._tell.set(self.timed, count)


def transfers(context: Context, step: Step) -> Generator[Any, Told, list[list[float]]]:
    """(Bytes, microseconds until the last of one or several transfers is done that begin at the same time) for each size."""
    parts = yield from parts_of(context, step)
    rows = []
    for size_bytes in step.sizes:
        times_us = yield from measure_parts(context, [Load(part, 1, size_bytes) for part in parts])
        rows.append([size_bytes, max(times_us)])
    return rows


LEAST_US = 2000.0
"""How long the transfers take that are timed."""
COVER = 2.5
"""How many times as long the other side runs, by its time alone."""
MOST_WORK = 200


def beside(context: Context, step: Step) -> Generator[Any, Told, dict[str, float]]:
    """How much longer transfers and work take side by side than alone: two factors, ``communication`` and ``computation``.

    Whichever is being timed is covered by the other one from its beginning to its end; timing both in one round would dilute the
    factor of the longer one. Transfers are timed under more work than they need, work under more transfers than it needs. Where
    NCCL waits for the end of all the work, its factor is a lower bound.
    """
    (size_bytes,) = step.sizes
    (carrier,) = yield from parts_of(context, step)
    work = _Work(context, step.work)

    def times_us(num_moved: int, num_worked: int) -> Generator[Any, Told, list[float]]:
        return measure_parts(context, [Load(carrier, num_moved, size_bytes), Load(work, num_worked)])

    most = most_at_once(step.transport, size_bytes)
    one_us, _ = yield from times_us(1, 0)
    _, unit_us = yield from times_us(0, 1)

    num_moved = min(most, max(1, math.ceil(LEAST_US / one_us)))
    alone_us, _ = yield from times_us(num_moved, 0)
    moved_us, _ = yield from times_us(num_moved, cover(alone_us, unit_us, MOST_WORK))

    num_worked = max(1, int(min(LEAST_US, most * one_us / COVER) / unit_us))
    _, work_us = yield from times_us(0, num_worked)
    _, worked_us = yield from times_us(cover(work_us, one_us, most), num_worked)
    return {"communication": moved_us / alone_us, "computation": worked_us / work_us}


def cover(covered_us: float, unit_us: float, most: int) -> int:
    """How many units outlast something."""
    return min(most, max(1, math.ceil(COVER * covered_us / unit_us)))


class _Work(Part):
    def __init__(self, context: Context, kind: str) -> None:
        self._bench = context.bench
        self._kind = kind
        self.timed: int = context.stream("work")

    def begin(self, size_bytes: int, num: int) -> Any:
        for _ in range(num):
            self._bench.work(self._kind, self.timed)


def join(context: Context, step: Step) -> Generator[Any, Told, None]:
    """Measures nothing: opens NCCL among all ranks; ``work`` is the path by which they find each other."""
    context.bench.join(step.work, context.rank, context.num_ranks)
    yield None


MEASURES: Mapping[str, Measure] = {
    "launch": launch,
    "signals": signals,
    "transfers": transfers,
    "beside": beside,
    "join": join,
    "close": lambda context, step: context.close(),
}
"""By the name that steps have for them."""
