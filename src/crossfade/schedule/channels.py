"""Passes 2 and 3: a channel for every value that leaves its actor, and how it moves."""

from __future__ import annotations

from crossfade.plan.actions import Action, Verb
from crossfade.plan.plan import ChannelSpec, InputSpec
from crossfade.schedule.draft import Draft
from crossfade.types import DRIVER, Transport

__all__ = ["OVERLAP_DEPTH", "add_channels", "add_start_signal", "choose_transport", "ring_depth"]

OVERLAP_DEPTH = 2
"""Slots of a ring whose transport moves bytes in the background: one is being used while the next one is filled."""


def choose_transport(asked: str, writer: str, reader: str) -> Transport:
    """How a value goes from one party to another.

    On one host shared memory needs no second copy and no core in between, so that is what ``auto`` means. Values from and to
    the driver go that way too, whatever was asked: the wish is about edges between actors.
    """
    if asked == Transport.GLOO and DRIVER not in (writer, reader):
        return Transport.GLOO
    return Transport.SHM


def ring_depth(transport: Transport, max_inflight: int) -> int:
    """How many executions' values a ring holds.

    With as many slots as executions may be under way no shared-memory ring ever stops the pipeline; empty slots cost 1 KB each.
    """
    return max_inflight if transport is Transport.SHM else min(OVERLAP_DEPTH, max_inflight)


def add_channels(draft: Draft, *, buffer_bytes: int) -> Draft:
    """One channel for each value and transport, with every party that needs the value as a reader."""
    readers: dict[str, dict[Transport, dict[str, None]]] = {}
    needs = [(value, node.actor) for node in draft.nodes for value in node.inputs]
    needs += [(value, DRIVER) for value in draft.outputs]
    for value, reader in needs:
        maker = draft.maker[value]
        if reader != maker:
            asked = draft.transport_to.get((value, reader), draft.transport[value])
            transport = choose_transport(asked, maker, reader)
            readers.setdefault(value, {}).setdefault(transport, {})[reader] = None
    for value in draft.maker:  # the order in which the values are made
        for index, (transport, names) in enumerate(readers.get(value, {}).items()):
            draft.channels.append(_channel(draft, value, transport, tuple(names), index > 0, buffer_bytes))
    return draft


def _channel(
    draft: Draft, value: str, transport: Transport, readers: tuple[str, ...], is_second: bool, buffer_bytes: int
) -> ChannelSpec:
    return ChannelSpec(
        id=f"{value}~{transport}" if is_second else value,
        value=value,
        writer=draft.maker[value],
        readers=readers,
        transport=transport,
        depth=ring_depth(transport, draft.max_inflight),
        buffer_bytes=buffer_bytes if transport is Transport.SHM else 0,
    )


def add_start_signal(draft: Draft) -> Draft:
    """An actor whose round does not begin with a receive would run ahead of ``execute``: the driver tells it to start."""
    waiting = (Verb.READ, Verb.RECV)
    unasked = [name for name, actions in draft.programs.items() if name != DRIVER and actions[0].verb not in waiting]
    if unasked:
        value = f"i{len(draft.inputs)}"
        draft.inputs.append(InputSpec(value, "go"))
        draft.maker[value] = DRIVER
        draft.channels.insert(0, _channel(draft, value, Transport.SHM, tuple(unasked), False, 0))
        draft.programs[DRIVER].insert(0, Action(Verb.WRITE, value))
        for name in unasked:
            draft.programs[name].insert(0, Action(Verb.READ, value))
    return draft
