"""The communicators of the user's that one actor has in one plan, from when it opens the plan to when it leaves it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from crossfade.errors import GraphError
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan

__all__ = ["Communicators", "entangled", "refuse_entangled"]


class Communicators:
    """Copies of them, each of which has its rank. The actor's main thread makes this, and ends it.

    Args:
        plan: the plan.
        party: who this is.
        calls: what travels beside the plan: under a communicator's id its pickle.

    Attributes:
        by_id: those in whose group the party is.

    Raises:
        Exception: what one raised.
    """

    def __init__(self, plan: Plan, party: str, calls: Mapping[str, Call]) -> None:
        self.by_id: dict[str, Any] = {}
        try:
            for spec in plan.communicators:
                if party in spec.parties:
                    communicator = pickle.loads(calls[spec.id].args[0])
                    communicator.initialize(spec.parties.index(party))
                    self.by_id[spec.id] = communicator
        except BaseException:
            self.destroy()
            raise

    def destroy(self) -> None:
        """Ends them, once nothing is moved any more. What one raises is printed, and keeps no other from its end."""
        while self.by_id:
            _, communicator = self.by_id.popitem()
            try:
                communicator.destroy()
            except Exception:
                traceback.print_exc()


def entangled(plan: Plan, others: Iterable[Plan]) -> list[str]:
    """Actors that are in the group of a communicator in this plan and in another one."""
    mine = {party for spec in plan.communicators for party in spec.parties}
    return sorted(
        mine.intersection(party for other in others for spec in other.communicators for party in spec.parties)
    )


def refuse_entangled(plan: Plan, others: Iterable[Plan]) -> None:
    """Communicators of two plans on the same actors could wait for each other across the plans.

    Raises:
        GraphError: there are such.
    """
    if parties := entangled(plan, others):
        raise GraphError(
            f"{', '.join(parties)} take part in a communicator of another graph already, and what both do would wait for each "
            "other",
            hint="tear the other graph down first, or bind everything in one graph",
        )
