"""Communicators of the user's on their way from the driver to actors, and who may have one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

import cloudpickle

from crossfade.api.remote import ActorHandle
from crossfade.errors import GraphError
from crossfade.hints import add_note
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan

__all__ = ["check_apart", "packed"]


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Takes handles of actors along, which can be compared where they arrive."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ActorHandle):
            return ActorHandle, (value._info,)
        return super().reducer_override(value)


def packed(plan: Plan, calls: Mapping[str, Call]) -> dict[str, Call]:
    """What travels beside a plan, with each communicator as its pickle.

    Raises:
        Exception: what pickling one raised, with a note that names it.
    """
    found = dict(calls)
    for spec in plan.communicators:
        (communicator,) = calls[spec.id].args
        file = BytesIO()
        try:
            _Pickler(file, 5).dump(communicator)
        except Exception as error:
            name = type(communicator).__name__
            add_note(
                error,
                f"the communicator {name} cannot be pickled\nhint: each actor gets a copy; let initialize() make what cannot "
                "travel, such as sockets and process groups",
            )
            raise
        found[spec.id] = Call((file.getvalue(),), {})
    return found


def check_apart(plan: Plan, others: Iterable[Plan]) -> None:
    """Looks whether other graphs have communicators on the same actors, which could wait for each other across the graphs.

    Raises:
        GraphError: one has.
    """
    mine = {party for spec in plan.communicators for party in spec.parties}
    for other in others:
        both = mine.intersection(party for spec in other.communicators for party in spec.parties)
        if both:
            raise GraphError(
                f"{', '.join(sorted(both))} take part in a communicator of another graph already, and what both do would wait for "
                "each other",
                hint="tear the other graph down first, or bind everything in one graph",
            )
