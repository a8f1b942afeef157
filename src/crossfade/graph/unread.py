"""Traces of calls that can never run: nothing has read them, and no reference to them is left.

A node refers to the nodes that it uses, and they refer weakly to it. So a call that the user drops is freed, and a graph compiled
later could not tell that it never runs. Therefore the call leaves a *trace* on everything that it was made from: the calls among
its arguments, theirs, and the input. Each of these keeps at most one trace, so memory does not grow with calls bound and dropped.

A call leaves no trace if it is *settled*: another call, a collective or a `MultiOutputNode` has taken it, or was refused with it; a
graph was compiled from it, or compiling was tried; or an error has named it already. Nor does a call without nodes among its
arguments leave one: it belongs to no graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

_orders = itertools.count()


def next_order() -> int:
    """Returns the next position in the order of creation."""
    return next(_orders)


@dataclass(slots=True, eq=False)
class Trace:
    """What is left of a call that was dropped before anything read it."""

    call: str  # a short description of the call
    order: int  # the position of the call in the order of creation
    # the position at which an error named the call. The trace concerns no output that is bound after that.
    told_at: int | None = None

    def concerns(self, output: int) -> bool:
        """Whether the call counts as missing in a graph whose output was created at this position."""
        return self.told_at is None or output < self.told_at


class _Traced(Protocol):
    _trace: Trace | None

    def _sources(self) -> Iterable[_Traced]: ...


def leave_trace(trace: Trace, sources: Iterable[_Traced]) -> None:
    """Leaves a trace on all nodes that a call was made from, up to those that have a trace that no error has named yet."""
    pending = list(sources)
    while pending:
        node = pending.pop()
        if node._trace is None or (node._trace is not trace and node._trace.told_at is not None):
            node._trace = trace
            pending += node._sources()
