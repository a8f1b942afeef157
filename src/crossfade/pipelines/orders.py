"""In which order each rank does its passes, and sends and receives between them, schedule by schedule.

GPipe and 1F1B are written down here, as `torch.distributed.pipelining` runs them, but for its waits for sends that are long over:
before GPipe's first backward pass, and a pass later while 1F1B warms up and cools down. The order of those with several stages on
each rank is torch's own: the schedule is made with stand-ins of stages, without a process group.

Where a rank receives matters: a receive's memory is the rank's own, so nothing moves into it before the rank has come to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import SimpleNamespace
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.pipelining import schedules

from crossfade.errors import GraphError
from crossfade.hints import nearest
from crossfade.pipelines.torch_names import schedule_order


class Kind(StrEnum):
    """What a pass computes, in torch's letters."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradients of a stage's inputs and of its weights."""
    BACKWARD_INPUT = "I"
    """Those of its inputs only."""
    BACKWARD_WEIGHT = "W"
    """Those of its weights, some time after those of its inputs."""

    @property
    def sends_back(self) -> bool:
        """Whether gradients for the stage before come out of it."""
        return self in (Kind.BACKWARD, Kind.BACKWARD_INPUT)


@dataclass(frozen=True, slots=True)
class Pass:
    """One microbatch in one stage."""

    kind: Kind
    stage: int
    microbatch: int


@dataclass(frozen=True, slots=True)
class Send:
    """What comes out of a pass begins to leave for the rank that needs it."""

    made_by: Pass
    is_awaited: bool = False
    """Whether the rank goes on only when it has left."""


@dataclass(frozen=True, slots=True)
class Receive:
    """A rank has memory for what comes out of a pass of another one; who uses it waits for it."""

    made_by: Pass


Order: TypeAlias = Mapping[int, tuple[Pass | Send | Receive, ...]]
"""What each rank does, in order."""


def passes_of(order: Order) -> dict[int, tuple[Pass, ...]]:
    """The passes of each rank."""
    return {rank: tuple(each for each in steps if isinstance(each, Pass)) for rank, steps in order.items()}


_SINGLE = ("GPipe", "1F1B")
_MULTI = ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
SCHEDULES = tuple(name for name in (*_SINGLE, *_MULTI) if hasattr(schedules, f"Schedule{name}"))
"""The schedules that the installed torch has; torch's classes are called ``ScheduleGPipe`` and so on."""


def order_of(schedule: str, num_stages: int, num_microbatches: int, num_ranks: int | None = None) -> Order:
    """Returns what each rank does. Without ``num_ranks`` there is one for each stage, or for every two where the schedule has
    several on a rank. Raises a `GraphError`, if there is no such schedule in `SCHEDULES`, or it cannot run with these numbers.
    """
    if schedule not in SCHEDULES:
        raise GraphError(f"there is no schedule {schedule!r}", hint=nearest(schedule, SCHEDULES, ", ".join(SCHEDULES)))
    if min(num_stages, num_microbatches, 1 if num_ranks is None else num_ranks) < 1:
        raise GraphError(
            f"{num_stages} stages, {num_microbatches} microbatches, {num_ranks} ranks", hint="each is at least 1"
        )
    if schedule in _SINGLE:
        return _single(schedule, num_stages, num_microbatches, num_stages if num_ranks is None else num_ranks)
    return _multi(schedule, num_stages, num_microbatches, max(1, num_stages // 2) if num_ranks is None else num_ranks)


def _single(schedule: str, num_stages: int, num_microbatches: int, num_ranks: int) -> Order:
    if num_ranks != num_stages:
        raise GraphError(
            f"{schedule} has one stage on each rank, not {num_stages} on {num_ranks}",
            hint=f"cut it into {num_ranks} stages",
        )
    if schedule == "1F1B" and num_microbatches < num_stages:
        raise GraphError(
            f"1F1B needs as many microbatches as stages, {num_stages}", hint="give more microbatches, or take GPipe"
        )
    steps: Callable[[_Stage, int], Iterator[Pass | Send | Receive]]
    steps = _gpipe if schedule == "GPipe" else _one_forward_one_backward
    return {rank: tuple(_in_batches(steps(_Stage(rank, num_stages), num_microbatches))) for rank in range(num_ranks)}


@dataclass(frozen=True, slots=True)
class _Stage:
    """The one stage of a rank."""

    index: int
    num_stages: int

    def forward(self, number: int, *, is_awaited: bool = False) -> Iterator[Pass | Send | Receive]:
        """Receives what a microbatch's forward pass needs, does it, sends what comes out."""
        if self.index:
            yield Receive(Pass(Kind.FORWARD, self.index - 1, number))
        yield (made := Pass(Kind.FORWARD, self.index, number))
        if self.index + 1 < self.num_stages:
            yield Send(made, is_awaited)

    def backward(self, number: int, *, is_awaited: bool = False) -> Iterator[Pass | Send | Receive]:
        """Receives what a microbatch's backward pass needs, does it, sends what comes out."""
        if self.index + 1 < self.num_stages:
            yield Receive(Pass(Kind.BACKWARD, self.index + 1, number))
        yield (made := Pass(Kind.BACKWARD, self.index, number))
        if self.index:
            yield Send(made, is_awaited)


def _gpipe(stage: _Stage, num_microbatches: int) -> Iterator[Pass | Send | Receive]:
    for number in range(num_microbatches):
        yield from stage.forward(number)
    for number in range(num_microbatches):
        yield from stage.backward(number)


def _one_forward_one_backward(stage: _Stage, num_microbatches: int) -> Iterator[Pass | Send | Receive]:
    num_ahead = min(num_microbatches, stage.num_stages - stage.index)
    for number in range(num_ahead):
        yield from stage.forward(number, is_awaited=number + 1 == num_ahead)
    for number in range(num_microbatches):
        following = number + num_ahead
        yield from stage.backward(number, is_awaited=following < num_microbatches)
        if following < num_microbatches:
            yield from stage.forward(following, is_awaited=True)


def _in_batches(steps: Iterator[Pass | Send | Receive]) -> Iterator[Pass | Send | Receive]:
    """Torch awaits a send in one batch with the receive that follows it: both begin, and then it waits for both."""
    awaited: Send | None = None
    for step in steps:
        if isinstance(step, Send) and step.is_awaited:
            awaited = step
            continue
        yield step
        if awaited is not None:
            yield awaited
            awaited = None


def _multi(schedule: str, num_stages: int, num_microbatches: int, num_ranks: int) -> Order:
    if num_stages % num_ranks:
        raise GraphError(
            f"{schedule} has equally many stages on each rank: {num_stages} do not go on {num_ranks}",
            hint=f"cut it into a multiple of {num_ranks} stages",
        )
    stand_ins = [_stand_in(rank, num_stages, num_ranks) for rank in range(num_stages // num_ranks)]
    try:
        made = schedules.get_schedule_class(schedule)(stand_ins, num_microbatches)
    except (ValueError, AssertionError, RuntimeError, IndexError, KeyError) as error:
        raise GraphError(
            f"torch refuses {schedule} with {num_stages} stages, {num_ranks} ranks and {num_microbatches} microbatches: {error}",
            hint="other numbers of stages, ranks or microbatches may do",
        ) from error
    return _order(schedule_order(made))


def _stand_in(index: int, num_stages: int, num_ranks: int) -> Any:
    """What a schedule asks of a stage when it is made, without a process group."""
    return SimpleNamespace(
        stage_index=index,
        num_stages=num_stages,
        group_size=num_ranks,
        group_rank=0,
        group=None,
        is_first=index == 0,
        is_last=index == num_stages - 1,
        has_backward=True,
        submod=nn.Identity(),
        device="cpu",
    )


def _order(actions_of: Mapping[int, Sequence[Any]]) -> Order:
    """Torch's actions as steps; an overlapped pair is one after the other, as torch runs it."""
    parts = {rank: [*_parts(actions)] for rank, actions in actions_of.items()}
    made = {Pass(Kind(kind), *where) for steps in parts.values() for kind, *where in steps if kind in set(Kind)}
    backward = {(each.stage, each.microbatch): each for each in made if each.kind.sends_back}

    def step(kind: str, stage: int, number: int) -> Pass | Send | Receive | None:
        match kind:
            case "SEND_F":
                return Send(Pass(Kind.FORWARD, stage, number))
            case "SEND_B":
                return Send(backward[stage, number])
            case "RECV_F":
                return Receive(Pass(Kind.FORWARD, stage - 1, number))
            case "RECV_B":
                return Receive(backward[stage + 1, number])
        return Pass(Kind(kind), stage, number) if kind in set(Kind) else None

    found = {rank: [step(*part) for part in steps] for rank, steps in parts.items()}
    return {rank: tuple(each for each in steps if each is not None) for rank, steps in found.items()}


def _parts(actions: Sequence[Any]) -> Iterator[tuple[str, int, int]]:
    """What each does, in which stage, of which microbatch."""
    for action in actions:
        for part in () if action is None else action.sub_actions or (action,):
            yield str(part.computation_type.value), part.stage_index, part.microbatch_index
