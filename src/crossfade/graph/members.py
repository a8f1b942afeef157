"""Finds the actors in a communicator's group, and checks that a communicator can do what is asked of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfade.errors import GraphError
from crossfade.graph.communicators import Communicator
from crossfade.graph.nodes import ActorInfo
from crossfade.types import CollectiveKind


def members_of(communicator: Communicator) -> tuple[ActorInfo, ...]:
    """Returns the actors of a communicator's group, in the order of their ranks. Raises a `GraphError` if it is not valid."""
    name = type(communicator).__name__
    handles = list(communicator.get_actor_handles())
    for handle in handles:
        if not isinstance(getattr(handle, "_info", None), ActorInfo):
            raise GraphError(
                f"{name}.get_actor_handles gives {handle!r}, which is no actor",
                hint="it gives a list of what Cls.remote() returned",
            )
    by_rank: dict[Any, ActorInfo] = {communicator.get_rank(handle): handle._info for handle in handles}
    ranks = range(len(handles))
    if not handles or set(by_rank) != set(ranks):
        raise GraphError(
            f"{name}.get_rank gives the ranks {', '.join(map(repr, by_rank)) or 'of nobody'} to {len(handles)} actors",
            hint="the n actors of get_actor_handles() have the ranks 0 to n - 1, each one of its own",
        )
    return tuple(by_rank[rank] for rank in ranks)


def check_collective(communicator: Communicator, kind: CollectiveKind, parties: Sequence[str]) -> None:
    """Refuses a communicator that cannot do a collective of these actors (`GraphError`)."""
    members = tuple(info.id for info in members_of(communicator))
    asks = f"{kind} of {', '.join(parties)} asks for {type(communicator).__name__}"
    if kind is CollectiveKind.BROADCAST:
        raise GraphError(
            f"{asks}, and communicators have no {kind}",
            hint="send the value itself to all of them, with_tensor_transport(communicator); or leave the transport out",
        )
    if set(members) != set(parties):
        raise GraphError(
            f"{asks}, whose group is {', '.join(members)}",
            hint="bind a node of each actor of the group, and of no other",
        )
    if members != tuple(parties) and kind is not CollectiveKind.ALLREDUCE:
        raise GraphError(
            f"{asks}, whose ranks are in the order {', '.join(members)}",
            hint="bind the nodes in the order of the ranks: that is the order of the parts",
        )
