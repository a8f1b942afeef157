"""What a search for causes looks at: the traced program, its losses, and how places in it are named."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from crossfade.profile.doctor.build import Traced
from crossfade.profile.doctor.losses import Loss, Reason, losses_of
from crossfade.profile.doctor.program import NOBODY, Program
from crossfade.profile.traces.events import Activity, ActivityKind, Call
from crossfade.profile.traces.steps import MARK
from crossfade.profile.traces.tensors import Dataflow, dataflow

_WORTH_A_LOOK = 0.01  # of the steps' time
_MOST_MARKS = 40
_OURS = "crossfade "  # marks of this library begin so
_FRAME = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?P<function>.+)$")
_NOT_THE_USERS = (
    "torch/",
    "<built-in",
    "site-packages/",
    "dist-packages/",
    "threading.py",
    "contextlib.py",
    "runpy.py",
)


class Cause(StrEnum):
    """Why a GPU waits, as reports and JSON name it."""

    HOST_WAIT = "implicit_synchronisation"
    PAGEABLE = "pageable_copy"
    ALLOCATOR = "allocator"
    LAUNCH = "launch_bound"
    BLOCKING = "blocking_collective"
    COMMUNICATOR = "communicator_order"
    LATE_EVENT = "late_event"
    QUEUES = "hardware_queues"
    DEFAULT_STREAM = "default_stream"
    SMS_FULL = "sms_full"
    SMALL_MESSAGES = "small_messages"
    CONTENTION = "contention"
    LAUNCH_ORDER = "launch_order"
    BUCKETS = "ddp_buckets"
    UNUSED_PARAMETERS = "find_unused_parameters"
    TWO_BACKWARDS = "two_backwards"
    LATE_PEER = "late_peer"
    SLOW_GPU = "slow_gpu"


class Mark(NamedTuple):
    """A part of the timeline that shows a cause. ``lane`` is a stream of the rank, or None for its host."""

    rank: int
    lane: tuple[int, int] | None
    start_us: float
    end_us: float
    label: str


class Site(NamedTuple):
    """Where in the program a call was made."""

    operator: str  # the outermost operator around it, such as aten::item; empty if there is none
    line: str  # "file.py:12 (function)"; empty where the trace has no stacks

    def __str__(self) -> str:
        return " at ".join(part for part in (self.operator, self.line) if part) or "(the trace does not say where)"


@dataclass(frozen=True)
class Finding:
    """A cause that a trace shows, before it is known what its fix wins.

    Attributes:
        cause: which one.
        title: a sentence.
        evidence: what in the trace shows it, with figures.
        where: the lines or operators that it comes from.
        fix: what to do, in words.
        code: the same in code; may be empty.
        marks: where the timeline shows it.
        change: makes the program as it would be after the fix.
        is_at_most: the change is more than a fix can reach, or the trace leaves open how much later a result is needed.
        likely: a change that a fix will reach more probably, where ``change`` is an upper bound.
    """

    cause: Cause
    title: str
    evidence: str
    where: str
    fix: str
    code: str
    marks: tuple[Mark, ...]
    change: Callable[[Program], Program]
    is_at_most: bool = False
    likely: Callable[[Program], Program] | None = None


class View:
    """A traced program with its losses."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.program = traced.program
        self.losses = losses_of(traced)

    @cached_property
    def length_us(self) -> float:
        """How long the replayed steps take."""
        return max(self.traced.ends_us)

    @cached_property
    def launched(self) -> list[list[int]]:
        """The works of each call."""
        launched: list[list[int]] = [[] for _ in self.program.calls]
        for number, work in enumerate(self.program.works):
            if work.call != NOBODY:
                launched[work.call].append(number)
        return launched

    @cached_property
    def made_by(self) -> dict[int, int]:
        """For each collective what makes its input, where tensors were recorded."""
        return self._numbers(pair for flow in self._flows for pair in flow.made_by.items())

    @cached_property
    def needed_by(self) -> dict[int, int]:
        """For each collective what needs its result first, where tensors were recorded."""
        return self._numbers(pair for flow in self._flows for pair in flow.needed_by.items())

    @cached_property
    def _flows(self) -> list[Dataflow]:
        return [dataflow(trace) for trace in self.traced.traces]

    @cached_property
    def places(self) -> dict[int, int]:
        """The number of each activity, by its id."""
        return {id(activity): number for number, activity in enumerate(self.traced.activities)}

    def _numbers(self, pairs: Iterable[tuple[Activity, Activity]]) -> dict[int, int]:
        found = ((self.places.get(id(one), NOBODY), self.places.get(id(other), NOBODY)) for one, other in pairs)
        return {one: other for one, other in found if NOBODY not in (one, other)}

    def lost_us(self, *reasons: Reason) -> float:
        """How much is lost for these reasons, on the rank that loses most."""
        by_rank: Counter[int] = Counter()
        for loss in self.losses:
            if loss.reason in reasons:
                by_rank[loss.rank] += loss.length_us  # type: ignore[assignment]
        return max(by_rank.values(), default=0.0)

    def share_of(self, length_us: float) -> float:
        """A time as a share of the steps' time."""
        return length_us / self.length_us if self.length_us else 0.0

    def exposed_us(self, works: Iterable[int]) -> float:
        """For how long nothing computes because of these collectives, on the mean of the ranks."""
        wanted = set(works)
        reasons = (Reason.TRANSFER, Reason.PEER)
        return (
            sum(loss.length_us for loss in self.losses if loss.work in wanted and loss.reason in reasons)
            / self.program.num_ranks
        )

    def is_worth_a_look(self, length_us: float) -> bool:
        """Whether that much time is a hundredth of the steps."""
        return self.share_of(length_us) >= _WORTH_A_LOOK

    def a_step(self, num: float) -> float:
        """How much of a number that counts all ranks and steps one rank has in a step."""
        return num / self.program.num_steps / self.program.num_ranks

    def collectives(self) -> Iterable[int]:
        """All works that communicate."""
        return (n for n, work in enumerate(self.program.works) if work.kind is ActivityKind.COMMUNICATION)

    def call_marks(self, calls: Iterable[int], label: str) -> tuple[Mark, ...]:
        """Marks on hosts, of the longest of these calls."""
        marks = []
        for number in calls:
            times = self.traced.call_starts_us[number], self.traced.seen.call_ends_us[number]
            marks.append(Mark(self.program.calls[number].rank, None, *times, label))
        return _longest(marks)

    def work_marks(self, works: Iterable[int], label: str) -> tuple[Mark, ...]:
        """Marks on streams, of the longest of these works."""
        marks = []
        for number in works:
            lane = self.traced.activities[number].lane
            times = self.traced.starts_us[number], self.traced.ends_us[number]
            marks.append(Mark(self.program.works[number].rank, lane, *times, label))
        return _longest(marks)

    def loss_marks(self, losses: Iterable[Loss], label: str) -> tuple[Mark, ...]:
        """Marks on hosts, of the longest of these losses."""
        return _longest([Mark(loss.rank, None, loss.start_us, loss.end_us, label) for loss in losses])

    @cached_property
    def _marks_us(self) -> list[list[float]]:
        """When steps begin that are marked, by rank; infinity comes last."""
        traces = self.traced.traces
        return [[*(scope.start_us for scope in trace.operators.named(MARK)), float("inf")] for trace in traces]

    def site(self, rank: int, call: Call) -> Site:
        """Where a call was made."""
        trace, marks_us = self.traced.traces[rank], self._marks_us[rank]
        operator = ""
        for scope in trace.operators.around(call.thread, call.start_us):
            next_us = marks_us[bisect_right(marks_us, scope.start_us)]
            if next_us < scope.end_us or scope.name.startswith(MARK):  # it is around more than a step
                break
            if scope.name != "record_param_comms":
                operator = scope.name
            if not scope.name.startswith(("aten::", "c10", "nccl:", "record_param_comms")):
                break
        line = ""
        for scope in trace.functions.around(call.thread, call.start_us):
            frame = _FRAME.match(scope.name)
            if frame and not any(mark in scope.name for mark in _NOT_THE_USERS):
                line = f"{frame['file']}:{frame['line']} ({frame['function']})"
                break
        return Site(operator, line)

    def sites(self, calls: Iterable[int], most: int = 3) -> str:
        """Where calls were made, the most frequent places first."""
        found = Counter(str(self.site(self.program.calls[n].rank, self.traced.calls[n])) for n in calls)
        return "; ".join(f"{site} ({num} x)" if num > 1 else site for site, num in found.most_common(most))

    def work_sites(self, works: Iterable[int]) -> str:
        """The same of the calls that launch works."""
        return self.sites({self.program.works[number].call for number in works} - {NOBODY})

    def by_site(self, calls: Iterable[int]) -> dict[Site, list[int]]:
        """Calls by where they were made."""
        found: dict[Site, list[int]] = defaultdict(list)
        for number in calls:
            found[self.site(self.program.calls[number].rank, self.traced.calls[number])].append(number)
        return found

    @cached_property
    def _has_marks(self) -> list[bool]:
        return [bool(trace.operators.named(_OURS)) for trace in self.traced.traces]

    def mark_of(self, work: int) -> str:
        """What this library said that it does where a work was launched, such as ``crossfade copy``; empty elsewhere."""
        there = self.program.works[work]
        if not self._has_marks[there.rank] or there.call == NOBODY:
            return ""
        call = self.traced.calls[there.call]
        around = self.traced.traces[there.rank].operators.around(call.thread, call.start_us)
        return next((scope.name for scope in around if scope.name.startswith(_OURS)), "")

    def name_of(self, work: int) -> str:
        """What a collective is called in reports: its operation and size where the trace says them, or what this library marked."""
        message = self.traced.activities[work].message
        mark = self.mark_of(work)
        if mark:
            return mark
        if not message.collective:
            return self.traced.activities[work].short_name
        return f"{message.collective} of {max(message.num_in, message.num_out):,} {message.dtype}".strip()


def share(part: float) -> str:
    """A share as text."""
    return f"{part:.0%}" if part >= 0.0995 else f"{part:.1%}"


def _longest(marks: Sequence[Mark]) -> tuple[Mark, ...]:
    longest = sorted(marks, key=lambda mark: mark.start_us - mark.end_us)[:_MOST_MARKS]
    return tuple(sorted(longest, key=lambda mark: mark.start_us))
