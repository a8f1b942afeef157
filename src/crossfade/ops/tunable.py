"""The operators as the tuner sees them: which ways a shape may go, and calls with operands made up for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.candidate import Candidate, candidates_for
from crossfade.ops.preparing import Rehearsal
from crossfade.ops.shape import Layout, Operator, Shape

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup

__all__ = ["OPERATORS", "Tunable", "TunableOperator"]


class Tunable(Protocol):
    """One of a group's operators."""

    def candidates(self, shape: Shape) -> Sequence[Candidate]:
        """All that can do a shape, the same ones on all ranks, and plain among them where it can."""

    def runner(self, shape: Shape, candidate: Candidate) -> Callable[[], object]:
        """Makes operands and an output, and what the way itself keeps, such as its kernels. Says no word to other ranks. Gives what
        does it once, on all ranks.
        """


class TunableOperator:
    """One of the operators of this room.

    Args:
        operator: the name of its function.
        group: whose ranks do it.
    """

    def __init__(self, operator: Operator, group: PeerGroup) -> None:
        self._group = group
        self._function: Callable[..., Any] = getattr(import_module(str(__package__)), operator)

    def candidates(self, shape: Shape) -> Sequence[Candidate]:
        """All that are worth a try."""
        return candidates_for(shape, self._group)

    def runner(self, shape: Shape, candidate: Candidate) -> Callable[[], object]:
        """What does it once, with operands of that shape."""
        torch, device = torch_or_raise(), self._group.device
        make = partial(torch.randn, dtype=getattr(torch, shape.dtype), device=device)
        a = make(shape.rows_of_a, shape.k)
        b = make(shape.n, shape.k).t() if shape.layout == Layout.COLUMNS else make(shape.k, shape.n)
        # Calls of a model that runs again and again find their outputs in one place, too (`crossfade.ops.replays`).
        call = partial(self._function, a, b, self._group, out=make(*_out_shape(shape)))
        call(candidate=Rehearsal(candidate, is_whole=False))
        return partial(call, candidate=candidate)


def _out_shape(shape: Shape) -> tuple[int, int]:
    """Of what this rank gets."""
    return (shape.m // shape.num_ranks if shape.operator == Operator.REDUCE_SCATTER else shape.m), shape.n


OPERATORS: Mapping[str, Callable[[PeerGroup], Tunable]] = {
    str(operator): partial(TunableOperator, operator) for operator in Operator
}
"""What makes an operator of a group, by the name of its function."""
