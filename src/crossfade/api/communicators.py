"""Sends user-defined communicators from the driver to the actors."""

from __future__ import annotations

from collections.abc import Mapping
from io import BytesIO
from typing import Any

import cloudpickle

from crossfade.api.remote import ActorHandle
from crossfade.hints import add_note
from crossfade.plan.call import Call
from crossfade.plan.plan import Plan


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles handles of actors as objects that can be compared where they arrive, and nothing else."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ActorHandle):
            return ActorHandle, (value._info,)
        return super().reducer_override(value)


def packed(plan: Plan, calls: Mapping[str, Call]) -> dict[str, Call]:
    """The arguments that travel beside a plan, with each communicator replaced by its pickle. A note at an error names it."""
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
