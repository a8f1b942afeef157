"""The communicators of the user's that one actor has in one plan, from when it opens the plan to when it leaves it."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping
from typing import Any

from crossfade.plan.call import Call
from crossfade.plan.plan import Plan

__all__ = ["Communicators"]


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
