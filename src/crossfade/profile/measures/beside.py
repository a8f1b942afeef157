"""How much longer transfers and work take side by side than alone.

Whichever is being timed is covered by the other one from its beginning to its end; timing both in one round would dilute the
factor of the longer one. Transfers are timed under more work than they need, work under more transfers than it needs. Where NCCL
waits for the end of all the work, its factor is a lower bound.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any

from crossfade.profile.carriers import most_at_once, parts_of
from crossfade.profile.context import Context, Told
from crossfade.profile.steps import Step
from crossfade.profile.timing import Load, Part, measure_parts

__all__ = ["beside", "cover"]

LEAST_US = 2000.0
"""How long the transfers take that are timed."""
COVER = 2.5
"""How many times as long the other side runs, by its time alone."""
MOST_WORK = 200


def beside(context: Context, step: Step) -> Generator[Any, Told, dict[str, float]]:
    """The two factors, ``communication`` and ``computation``."""
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
