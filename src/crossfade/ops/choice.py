"""From what a caller gave to the function that does it: the candidate's, or that of the group's tuner."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from crossfade.ops import fused
from crossfade.ops.arguments import Given, layout_of
from crossfade.ops.candidate import PLAIN, Candidate
from crossfade.ops.job import Way
from crossfade.ops.preparing import Rehearsal, make_ready, rehearse
from crossfade.ops.replays import enqueue
from crossfade.ops.shape import Operator, Shape
from crossfade.ops.tuners import tuner_of

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup

__all__ = ["choose", "choose_for", "way_of"]

_CROWDED, _CROWDED_ROUNDS = 1.2, 4
"""Measured at 32768, 7168, 2048 with one rank that gets 1.5 times (of four H200) and 1.25 times (of two) what each sends: four
rounds took 2.11 ms where one took 2.50, and 1.89 where one took 1.97. With equal counts one is best."""


def way_of(
    operator: Operator,
    group: PeerGroup,
    given: Given,
    num_rows: int,
    candidate: Candidate | Rehearsal | str | None,
    ways: Mapping[str, Way],
    *,
    lane: int = 0,
    most_received: int = 0,
) -> Way:
    """The way, with its parameters.

    Args:
        operator: which.
        group: whose ranks do it.
        given: checked.
        num_rows: M, see `Shape`; the same on all ranks.
        candidate: a candidate, or its text; None for what `choose` gives; a rehearsal, which prepares it too.
        ways: of this operator, by name.
        lane: on which lane.
        most_received: see `choose_for`.

    Raises:
        ValueError: there is no such candidate, or not for this operator.
        ChannelTimeout: rank 0 has not asked for such a choice.
    """
    do = enqueue
    if isinstance(candidate, Rehearsal):
        do = rehearse if candidate.is_whole else make_ready
        candidate = candidate.candidate
    elif candidate is None:
        candidate = choose(operator, group, given, num_rows, lane, most_received)
    elif isinstance(candidate, str):
        candidate = Candidate.parse(candidate)
    way = ways.get(candidate.name)
    if way is None:
        raise ValueError(f"this operator cannot be done by '{candidate}'\nhint: one of {', '.join(ways)}")
    chosen = partial(way, **candidate.arguments)
    return partial(do, candidate, chosen)


def choose(
    operator: Operator, group: PeerGroup, given: Given, num_rows: int, lane: int = 0, most_received: int = 0
) -> Candidate:
    """What was measured to be best for such a shape, or else the model's choice; the same on all ranks, by rank 0's word."""
    (depth, columns), dtype = given.b.shape, str(given.b.dtype).removeprefix("torch.")
    layout = layout_of(operator, given.b)
    shape = Shape(operator, num_rows, columns, depth, dtype, layout, group.num_ranks)
    can_fuse = fused.takes(operator, lane, has_bias=given.bias is not None)
    return choose_for(shape, group, most_received, can_fuse=can_fuse)


def choose_for(shape: Shape, group: PeerGroup, most_received: int = 0, *, can_fuse: bool = True) -> Candidate:
    """The same for a shape; plain where there is nothing to do.

    Shapes are tuned with equal counts. Where one rank gets many more rows than any rank sends, its link is what all wait for, and
    it has to have work early: so there are more rounds.

    Args:
        shape: M counts what one rank sends.
        group: whose ranks do it.
        most_received: all-to-all: the most rows that a rank gets.
        can_fuse: whether torch's fused operators take the call (`fused.takes`); else the next best way does it.
    """
    if not (shape.m and shape.n):
        return PLAIN
    chosen = tuner_of(group).choose(shape, without="" if can_fuse else "fused")
    rounds = chosen.arguments.get("rounds", _CROWDED_ROUNDS)
    if chosen.name == "rounds" and rounds < _CROWDED_ROUNDS and most_received > _CROWDED * shape.m:
        return Candidate.of("rounds", **{**chosen.arguments, "rounds": _CROWDED_ROUNDS})
    return chosen
