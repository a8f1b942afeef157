"""In which order each rank does its passes, schedule by schedule.

GPipe and 1F1B are written down here, as `torch.distributed.pipelining` runs them. The order of those with several stages on each
rank is torch's own: the schedule is made with stand-ins of stages, without a process group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
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


Order: TypeAlias = Mapping[int, tuple[Pass, ...]]
"""What each rank does, in order."""

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
    passes: Callable[[int, int, int], Iterator[Pass]] = _gpipe if schedule == "GPipe" else _one_forward_one_backward
    return {rank: tuple(passes(rank, num_stages, num_microbatches)) for rank in range(num_ranks)}


def _gpipe(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Pass]:
    yield from (Pass(Kind.FORWARD, stage, number) for number in range(num_microbatches))
    yield from (Pass(Kind.BACKWARD, stage, number) for number in range(num_microbatches))


def _one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> Iterator[Pass]:
    num_ahead = min(num_microbatches, num_stages - stage)
    yield from (Pass(Kind.FORWARD, stage, number) for number in range(num_ahead))
    for number in range(num_microbatches):
        yield Pass(Kind.BACKWARD, stage, number)
        if number + num_ahead < num_microbatches:
            yield Pass(Kind.FORWARD, stage, number + num_ahead)


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
    return {rank: tuple(_passes(actions)) for rank, actions in schedule_order(made).items()}


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


def _passes(actions: list[Any]) -> Iterator[Pass]:
    """Torch's actions as passes: idle steps are left out, an overlapped pair is one after the other, as torch runs it."""
    for action in actions:
        parts = () if action is None else action.sub_actions or (action,)
        for part in parts:
            kind = str(part.computation_type.value)
            if kind in Kind.__members__.values():
                yield Pass(Kind(kind), part.stage_index, part.microbatch_index)
