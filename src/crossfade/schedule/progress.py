"""What changes in a simulation: how far its strands and processes are, and the transfers that both ends start."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from crossfade.errors import PlanError
from crossfade.plan.actions import RECV_STREAM, SEND_STREAM, Verb
from crossfade.plan.device_streams import stream_in, stream_out
from crossfade.plan.plan import ChannelSpec, Plan
from crossfade.schedule.causes import Happening
from crossfade.schedule.cores import Work
from crossfade.schedule.device_steps import is_posted_on_gpus
from crossfade.schedule.strands import Need, Step, Strand
from crossfade.types import Transport

NO_STEP = Step("")
"""Where a strand is before its first step."""
SHOWN_STUCK = 8
"""How many of the stuck parties an error names."""


@dataclass(slots=True, eq=False)
class Transfer:
    """One value on its way from one actor to one other."""

    channel: ChannelSpec
    reader: str
    execution: int
    start_us: float = 0.0
    work: Work | None = None
    num_working: int = 0
    cause: Happening | None = None  # what was over last of all that it waited for

    @property
    def key(self) -> tuple[str, int]:
        """What both of its ends know it by."""
        return self.channel.id, self.execution

    def shown_at(self, *, is_on_gpus: bool) -> tuple[tuple[str, str, Verb], tuple[str, str, Verb]]:
        """(Party, stream, verb) of its spans, one at either end: on streams of the GPUs, or in the background of the hosts."""
        streams = SEND_STREAM, RECV_STREAM
        if is_on_gpus:
            transport, is_posted = self.channel.transport, self.channel.is_posted
            streams = stream_out(transport).value, stream_in(transport, is_posted=is_posted).value
        return (self.channel.writer, streams[0], Verb.SEND), (self.reader, streams[1], Verb.RECV)


@dataclass(slots=True)
class Inbox:
    """What one actor receives by one transport: values come one after another, in the order of its receives."""

    # (sender, channel id, execution) of the receives that have started.
    awaited: deque[tuple[str, str, int]] = field(default_factory=deque)
    # of each sender, the transfers whose send has started, in order.
    sent: defaultdict[str, deque[Transfer]] = field(default_factory=lambda: defaultdict(deque))
    is_busy: bool = False  # whether a value is on its way

    def take(self) -> Transfer | None:
        """The next transfer, if it can start."""
        if self.is_busy or not self.awaited:
            return None
        sender, *key = self.awaited[0]
        sent = self.sent[sender]
        if not sent or sent[0].key != tuple(key):
            return None
        self.awaited.popleft()
        self.is_busy = True
        return sent.popleft()

    def lost(self) -> list[tuple[str, int, str]]:
        """(channel id, execution, sender) of ends that found no other end."""
        sent = [(*transfer.key, sender) for sender, queue in self.sent.items() for transfer in queue]
        return sent + [(channel, execution, sender) for sender, channel, execution in self.awaited]


class Inboxes:
    """An inbox for what each actor receives by each transport; on a GPU that posts its receives, for each sender besides: what one
    of them is late with does not hold up the others' values.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._made: defaultdict[tuple[str, Transport, str], Inbox] = defaultdict(Inbox)

    def of(self, channel: ChannelSpec, reader: str) -> Inbox:
        """The inbox for a channel's value at a reader."""
        sender = channel.writer if is_posted_on_gpus(self._plan, channel) else ""
        return self._made[reader, channel.transport, sender]

    def __iter__(self) -> Iterator[tuple[str, Inbox]]:
        """Readers, and what they receive."""
        return iter([(reader, inbox) for (reader, _, _), inbox in self._made.items()])


@dataclass(slots=True)
class Process:
    """What one actor's process does at the moment: its thread's work, and transfers in the background.

    ``awake_us`` is when its thread was last known to be awake, and ``woken_us`` when it was last woken: what arrived before that
    is seen then.
    """

    awake_us: float = 0.0
    woken_us: float = 0.0
    at_work: Cursor | None = None
    lining_up: deque[Cursor] = field(default_factory=deque)
    compute: Work | None = None
    transfers: list[Transfer] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Cursor:
    """Where one strand is."""

    strand: Strand
    process: Process  # whose thread goes through it
    host: int  # the number of its actor's host
    round: int
    index: int = 0  # the step of the round it is at
    step: Step = NO_STEP  # that step
    execution: int = 0  # for which the step is done
    needs: tuple[Need, ...] = ()  # what it waits for now: the step's ``needs``, or its ``then`` when its work is done
    worked: bool = False  # whether the step's work is done
    work_since_us: float = 0.0  # since when it is under way
    need: int = 0  # the first need that is not known to be met
    since_us: float = 0.0  # since when it is there
    waits_for: str = ""  # the last need that blocked it here
    patient_since_us: float = math.inf  # since when it looks at needs that it does not wait for without end
    cause: Happening | None = None  # what was over last of all that it waited for
    seen_us: float = 0.0  # when it saw that

    def enter(self, num_executions: int, now_us: float) -> bool:
        """Goes to the next step that has an execution to handle, from its index on, if there is one left."""
        steps = self.strand.steps
        while self.round < num_executions:
            while self.index < len(steps):
                self.step = step = steps[self.index]
                self.execution = self.round + step.ahead
                if 0 <= self.execution < num_executions:
                    self.settle(now_us, worked=False)
                    return True
                self.index += 1
            self.round, self.index = self.round + 1, 0
        return False

    def settle(self, now_us: float, *, worked: bool) -> None:
        """Starts to look at the needs before, or after, the step's work."""
        self.needs = self.step.then if worked else self.step.needs
        self.worked, self.need, self.waits_for, self.since_us = worked, 0, "", now_us
        self.patient_since_us = math.inf


def check_that_all_is_done(cursors: Sequence[Cursor], inboxes: Inboxes, num_executions: int) -> None:
    """A `PlanError` says who waits for what if something has not come to its end."""
    stuck = [
        f"  {cursor.strand.actor} at {cursor.step.label!r} of execution {cursor.execution}: waits for"
        f" {cursor.waits_for!r} of execution {cursor.execution + cursor.needs[cursor.need].offset}"
        for cursor in cursors
        if cursor.round < num_executions
    ]
    for reader, inbox in inboxes:
        for channel, execution, sender in inbox.lost()[:1] if not stuck else ():
            raise PlanError(
                f"PL-1: {channel!r} of execution {execution} has only one end between {sender} and {reader}",
                hint="each send needs its recv; crossfade.plan.validate.validate(plan) shows the step",
            )
    if stuck:
        more = [f"  and {len(stuck) - SHOWN_STUCK} more"] if len(stuck) > SHOWN_STUCK else []
        raise PlanError(
            "PL-2: the plan stops for ever:\n" + "\n".join(stuck[:SHOWN_STUCK] + more),
            hint="crossfade.plan.validate.validate(plan) names a step of the cycle",
        )
