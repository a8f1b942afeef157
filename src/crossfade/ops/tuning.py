"""Tuning a group's operators: the tuner that belongs to a group, and tuners beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.calls.job import Layout, Operator, Shape
from crossfade.ops.choice.cache import Cache
from crossfade.ops.choice.candidate import Candidate, candidates_for
from crossfade.ops.choice.choose import Chooser, chooser_of, make_chooser
from crossfade.ops.choice.tune import Trial, Tuner, trial_of
from crossfade.ops.operators import OPERATORS
from crossfade.peers.groups import group_of

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup
    from crossfade.peers.groups import GroupLike


class Tunable(Protocol):
    """An operator, as a tuner sees it."""

    def candidates(self, shape: Shape) -> Sequence[Candidate]:
        """All that can do a shape, the same ones on all ranks, and plain among them where it can."""

    def runner(self, shape: Shape, candidate: Candidate) -> Callable[[], object]:
        """Makes operands and an output, without communication, and gives what does it once; all ranks call that together."""


class TunableOperator:
    """One of `OPERATORS`, on the ranks of a group."""

    def __init__(self, operator: Operator, group: PeerGroup) -> None:
        self._spec = OPERATORS[operator]
        self._group = group

    def candidates(self, shape: Shape) -> Sequence[Candidate]:
        return candidates_for(shape, self._group)

    def runner(self, shape: Shape, candidate: Candidate) -> Callable[[], object]:
        torch, device = torch_or_raise(), self._group.device
        make = partial(torch.randn, dtype=getattr(torch, shape.dtype), device=device)
        a = make(shape.rows_of_a, shape.k)
        b = make(shape.n, shape.k).t() if shape.layout == Layout.COLUMNS else make(shape.k, shape.n)
        # Calls of a model that runs again and again find their outputs in one place, too (`choice.replays`).
        out = make(*self._spec.out_shape(shape))
        return partial(self._spec.forward, a, b, self._group, out=out, candidate=candidate)


def tuner_of(group: GroupLike = None) -> Tuner:
    """A tuner of the choices that a group's operators take without a candidate: what it tunes holds for them at once.

    Not collective; choices are kept in the user's cache folder.

    Args:
        group: whose operators; opened, if need be, for torch's current GPU, or else the CPU.
    """
    group = group_of(group)
    return _tuner(group, _operators(group), chooser_of(group))


def open_tuner(
    group: GroupLike = None,
    operators: Mapping[str, Tunable] | None = None,
    *,
    cache: Cache | None = None,
    is_measuring: bool = False,
) -> Tuner:
    """A tuner of its own, which the group's operators do not ask. Collective.

    Args:
        group: where they run.
        operators: what is tuned, by name; None for all that there are.
        cache: where choices are kept; None for the user's cache folder.
        is_measuring: GPUs only: begin by measuring products, a second's work, if that was never done on such a device.

    Raises:
        DeviceError: torch.distributed does not know the group.
    """
    group = group_of(group)
    chosen = _operators(group) if operators is None else operators
    chooser = make_chooser(
        group, lambda shape: chosen[shape.operator].candidates(shape), cache=cache, is_measuring=is_measuring
    )
    return _tuner(group, chosen, chooser)


def _operators(group: PeerGroup) -> dict[str, Tunable]:
    return {str(operator): TunableOperator(operator, group) for operator in OPERATORS}


def _tuner(group: PeerGroup, operators: Mapping[str, Tunable], chooser: Chooser) -> Tuner:
    def measure(shape: Shape, candidate: Candidate) -> Trial:
        return trial_of(group, operators[shape.operator].runner(shape, candidate))

    return Tuner(measure, chooser)
