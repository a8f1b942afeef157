"""Finds what is wrong with channels and collectives that use user-defined communicators."""

from __future__ import annotations

from collections.abc import Iterator

from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.types import DRIVER

__all__ = ["wrong_communicators"]


def wrong_communicators(plan: Plan) -> Iterator[tuple[str, str, str]]:
    """Yields (id of a channel or collective, a party of it, the problem): its communicator is not in the plan, is not
    for all of its parties, or does not fit its transport; or it is a channel by communicator and has not exactly one reader.
    """
    groups = {spec.id: spec.parties for spec in plan.communicators}
    specs: list[tuple[ChannelSpec | CollectiveSpec, tuple[str, ...]]]
    specs = [(spec, (spec.writer, *spec.readers)) for spec in plan.channels]
    specs += [(spec, spec.parties) for spec in plan.collectives]
    for spec, parties in specs:
        name, party = spec.communicator, next(iter(parties), DRIVER)
        if spec.transport.blocks != bool(name):
            yield spec.id, party, f"{spec.id} goes by {spec.transport}, and by the communicator {name or '(none)'}"
        elif name and name not in groups:
            yield spec.id, party, f"{spec.id} goes by the communicator {name}, which the plan does not have"
        elif name and not set(parties) <= set(groups[name]):
            outside = ", ".join(sorted(set(parties) - set(groups[name])))
            yield spec.id, party, f"{spec.id} goes by the communicator {name}, in whose group {outside} is not"
        elif name and isinstance(spec, ChannelSpec) and len(spec.readers) != 1:
            yield spec.id, party, f"channel {spec.id} goes by a communicator to {len(spec.readers)} readers"
