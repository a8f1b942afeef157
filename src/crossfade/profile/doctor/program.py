"""A traced program as what it depends on, in a form that can be replayed, and replayed with something changed.

The host's calls form a chain of gaps and lengths; work on GPUs starts behind its call, the work before it on its lane, and the
work whose events it waits for. Each of these edges has a *lag*: how long after its cause the work starts. Edges, lags and lengths
come from one trace, so a replay without change gives the trace's times wherever the edges are right.

Everything here is an index into a list or a time in microseconds; nothing refers to the trace.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from crossfade.profile.traces.events import ActivityKind

NOBODY = -1


class Wait(NamedTuple):
    """No earlier than ``lag_us`` after the end of a work, or after its start (a copy out of pageable memory lets its caller go a
    little before its end). ``is_order``: no event says so, but the order of a communicator's collectives.
    """

    work: int
    lag_us: float
    is_of_start: bool = False
    is_order: bool = False


class HostCall(NamedTuple):
    """A call of a host's thread.

    Attributes:
        rank: whose host.
        after: the call before it, in whichever thread; `NOBODY` for the first.
        gap_us: from the end of that call (or from the program's begin) to this one's start: Python, mostly.
        own_us: how long it takes if it need not wait.
        waits: it returns no earlier than these.
        step: which step of the program it belongs to.
        num_events: how many operators and calls the profiler has since that call began, this one included: each took it some time.
    """

    rank: int
    after: int
    gap_us: float
    own_us: float
    waits: tuple[Wait, ...]
    step: int
    num_events: int = 1


class Work(NamedTuple):
    """A kernel, a copy or a collective's part on one rank.

    Attributes:
        kind: computation, communication, or a copy.
        rank: whose GPU.
        lane: which stream, numbered over all ranks; work of a lane runs in the order of the list.
        call: what launches it; `NOBODY` if it was launched before the trace began, and then it starts at ``launch_lag_us``.
        launch_lag_us: from the start of that call.
        lane_lag_us: from the end of the work before it on its lane.
        after: events of other lanes' work that it waits for.
        amount_us: how long it takes where nothing slows it down. A collective's counts from the start of its last rank.
        demand: how much of the GPU's multiprocessors it can fill, 0 to 1.
        rate: how fast it runs while a collective is resident (for a collective: while something computes), 0 to 1.
        meeting: which collective of several ranks it is a part of; `NOBODY` if it is none, or the others were not traced.
        step: which step of the program it belongs to.
    """

    kind: ActivityKind
    rank: int
    lane: int
    call: int
    launch_lag_us: float
    lane_lag_us: float
    after: tuple[Wait, ...]
    amount_us: float
    demand: float
    rate: float
    meeting: int
    step: int


@dataclass(frozen=True)
class Rates:
    """How much computation and communication slow each other down.

    Attributes:
        compute: of a kernel beside a resident collective, by name and number of blocks; where the trace has both.
        other_compute: of all other kernels.
        communication: of a collective beside computation.
        is_measured: whether the trace had enough of both to tell; else these are figures of other machines.
    """

    compute: Mapping[tuple[str, int], float]
    other_compute: float
    communication: float
    is_measured: bool


@dataclass(frozen=True)
class Program:
    """Calls and works; a meeting's works have its number. A call's works are those that name it."""

    calls: tuple[HostCall, ...]
    works: tuple[Work, ...]
    num_ranks: int
    num_steps: int

    @cached_property
    def before_on_lane(self) -> list[int]:
        """For each work, the one before it on its lane; `NOBODY` for the first."""
        last: dict[int, int] = {}
        before = []
        for number, work in enumerate(self.works):
            before.append(last.get(work.lane, NOBODY))
            last[work.lane] = number
        return before

    def works_of(self, rank: int, kind: ActivityKind) -> list[int]:
        """A rank's works of one kind."""
        return [number for number, work in enumerate(self.works) if work.rank == rank and work.kind is kind]

    def with_calls(self, changed: Mapping[int, HostCall]) -> Program:
        """The same program with other calls in these places."""
        return replace(self, calls=tuple(changed.get(place, call) for place, call in enumerate(self.calls)))

    def with_works(self, changed: Mapping[int, Work]) -> Program:
        """The same program with other works in these places."""
        return replace(self, works=tuple(changed.get(place, work) for place, work in enumerate(self.works)))
