"""Calls that can never run: nothing has read them, and nobody can reach them any more.

A node knows those that it uses, and they know it weakly. So a call that the user drops is gone, and whoever compiles a graph later
could not tell that it never runs. Therefore it leaves a *trace* on everything that it was made from: the calls among its arguments,
theirs, and the input. Each of these keeps one trace at most, so calls that are bound and dropped for ever pile up nothing.

A call leaves no trace if it is *settled*: another call, a collective or a `MultiOutputNode` has taken it, or was refused with it; a
graph was compiled from it, or was to be; or an error has named it already. Nor does a call whose arguments have no nodes: no graph
has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Trace", "leave_trace", "next_order"]

_orders = itertools.count()


def next_order() -> int:
    """The next position in the order of creation."""
    return next(_orders)


@dataclass(slots=True, eq=False)
class Trace:
    """What is left of a call that nothing read.

    Attributes:
        call: the call in a few words.
        order: when it was bound.
        told_at: when an error has named it. It concerns no output that is bound after that.
    """

    call: str
    order: int
    told_at: int | None = None

    def concerns(self, output: int) -> bool:
        """Whether the call is missing in a graph whose output was created at this position."""
        return self.told_at is None or output < self.told_at


class _Traced(Protocol):
    _trace: Trace | None

    def _sources(self) -> Iterable[_Traced]: ...


def leave_trace(trace: Trace, sources: Iterable[_Traced]) -> None:
    """Leaves a trace on all that a call was made from, up to where there is one already that nobody was told of."""
    pending = list(sources)
    while pending:
        node = pending.pop()
        if node._trace is None or (node._trace is not trace and node._trace.told_at is not None):
            node._trace = trace
            pending += node._sources()
