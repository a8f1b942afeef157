"""The user-defined communicators that one actor has in one plan, from opening the plan to leaving it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Iterable, Mapping
from typing import Any

from crossfade.errors import GraphError
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan


class Communicators:
    """The actor's copies of its user-defined communicators, initialized with its ranks. Made and ended by its main thread."""

    def __init__(self, plan: Plan, party: str, calls: Mapping[str, Call]) -> None:
        self.by_id: dict[str, Any] = {}  # the communicators in whose group the actor is
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
        """Destroys the communicators, after the last transfer. An error of one is printed; the others are still destroyed."""
        while self.by_id:
            _, communicator = self.by_id.popitem()
            try:
                communicator.destroy()
            except Exception:
                traceback.print_exc()


def entangled(plan: Plan, others: Iterable[Plan]) -> list[str]:
    """Returns the actors that are in the group of a communicator both in this plan and in one of the others."""
    mine = {party for spec in plan.communicators for party in spec.parties}
    return sorted(
        mine.intersection(party for other in others for spec in other.communicators for party in spec.parties)
    )


def refuse_entangled(plan: Plan, others: Iterable[Plan]) -> None:
    """Refuses a plan whose communicators share actors with those of open plans: they could wait for each other across the plans."""
    if parties := entangled(plan, others):
        raise GraphError(
            f"{', '.join(parties)} take part in a communicator of another graph already, and what both do would wait for each "
            "other",
            hint="tear the other graph down first, or bind everything in one graph",
        )
