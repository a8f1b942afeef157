"""Passes 2 and 3: a channel for every value that leaves its actor, and how it moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from crossfade.plan.actions import Action, Verb
from crossfade.plan.plan import ChannelSpec, InputSpec
from crossfade.schedule.draft import Draft
from crossfade.schedule.transports import Gpus, Way, choose
from crossfade.types import DRIVER, TargetDevice, Transport

OVERLAP_DEPTH = 2
"""Slots of a ring whose transport moves bytes in the background: one is being used while the next one is filled."""
DEVICE_SLOTS = 2
"""Slots in device memory of each reader of a copy channel, also where one execution is under way at a time: with a single slot
every value would be copied out of it, so that a kept one cannot stop the ring."""


def ring_depth(transport: Transport, max_inflight: int) -> int:
    """How many executions' values a ring holds.

    With as many slots as executions may be under way no shared-memory ring ever stops the pipeline; empty slots cost 1 KB each.
    A copy channel's records lie in such a ring; its slots on the device are few.
    """
    is_in_background = transport not in (Transport.SHM, Transport.COPY, Transport.TCP)
    return min(OVERLAP_DEPTH, max_inflight) if is_in_background else max_inflight


def add_channels(draft: Draft, gpus: Gpus, *, buffer_bytes: int) -> Draft:
    """One channel for each value and way, with every party that needs the value that way as a reader."""
    ways: dict[str, dict[Way, dict[str, None]]] = {}
    chosen: dict[tuple[object, ...], Way] = {}  # by what is asked for, and from whom to whom
    needs = [(value, node.actor) for node in draft.nodes for value in node.inputs]
    needs += [(value, DRIVER) for value in draft.outputs]
    for value, reader in needs:
        maker = draft.maker[value]
        if reader != maker:
            wish = draft.wish(value, reader)
            asked = wish.transport, wish.device, wish.communicator, maker, reader
            if asked not in chosen:
                chosen[asked] = choose(wish, maker, reader, gpus, size_bytes=buffer_bytes)
            ways.setdefault(value, {}).setdefault(chosen[asked], {})[reader] = None
    moves = [
        (value, way, tuple(names), index > 0)
        for value in draft.maker  # the order in which the values are made
        for index, (way, names) in enumerate(_merged(ways.get(value, {}), gpus).items())
    ]
    turns = _turns(draft, moves)
    draft.channels += [_channel(draft, *move, buffer_bytes, turns.get(place, 0)) for place, move in enumerate(moves)]
    return draft


def _merged(ways: dict[Way, dict[str, None]], gpus: Gpus) -> dict[Way, dict[str, None]]:
    """Readers without a GPU share a ring with those that have one and want the tensors elsewhere than by default: the value is
    written once, and the wish is nothing to them.
    """
    if len(ways) < 2:
        return ways
    plain = Way(Transport.SHM)
    others = [way for way in ways if way.transport is Transport.SHM and way != plain]
    if plain not in ways or not others or any(gpus.of.get(reader) for reader in ways[plain]):
        return ways
    shared = {**ways[others[0]], **ways[plain]}
    return {way: shared if way == others[0] else names for way, names in ways.items() if way != plain}


def _channel(
    draft: Draft, value: str, way: Way, readers: tuple[str, ...], is_second: bool, buffer_bytes: int, turn: int = 0
) -> ChannelSpec:
    where = "" if way.device is TargetDevice.DEFAULT else f"-{way.device}"
    where += f"-{way.reader or way.host}" if way.reader or way.host else ""
    has_own_slots = way.transport in (Transport.SHM, Transport.COPY, Transport.TCP)
    if way.transport is Transport.TCP:  # an actor is always there to take in what comes; the driver only when it waits
        readers = tuple(sorted(readers, key=DRIVER.__eq__))
    return ChannelSpec(
        id=f"{value}~{way.transport}{where}" if is_second else value,
        value=value,
        writer=draft.maker[value],
        readers=readers,
        transport=way.transport,
        depth=ring_depth(way.transport, draft.max_inflight),
        buffer_bytes=buffer_bytes if has_own_slots else 0,
        device=way.device,
        slots=DEVICE_SLOTS if way.transport is Transport.COPY else 0,
        turn=turn,
        communicator=way.communicator,
    )


def _turns(draft: Draft, moves: Sequence[tuple[str, Way, tuple[str, ...], bool]]) -> dict[int, int]:
    """The turn of each copy channel, by its place: among what comes to a reader that way, the place of its first use.

    Copies to one reader share its link, and the value that is needed first should come first. A channel with several readers has
    the lowest of its turns. What a writer makes at one step it pushes in that order.
    """
    steps: dict[str, dict[str, int]] = {}
    for node in draft.nodes:
        seen = steps.setdefault(node.actor, {})
        for value in node.inputs:
            seen.setdefault(value, len(seen))
    num_before: Counter[str] = Counter()
    uses = [
        (steps[reader][value], reader, place)
        for place, (value, way, readers, _) in enumerate(moves)
        for reader in (readers if way.transport is Transport.COPY else ())
    ]
    turns: dict[int, int] = {}
    for _, reader, place in sorted(uses):
        turns[place] = min(turns.get(place, num_before[reader]), num_before[reader])
        num_before[reader] += 1
    return turns


def add_start_signal(draft: Draft) -> Draft:
    """An actor whose round does not begin with a receive would run ahead of ``execute``: the driver tells it to start."""
    waiting = (Verb.READ, Verb.RECV)
    unasked = [
        name
        for name, actions in draft.programs.items()
        if name != DRIVER and not (actions and actions[0].verb in waiting)
    ]
    if unasked:
        value = f"i{len(draft.inputs)}"
        draft.inputs.append(InputSpec(value, "go"))
        draft.maker[value] = DRIVER
        ways: dict[Way, list[str]] = {}
        for name in unasked:
            ways.setdefault(_start_way(draft, name), []).append(name)
        for index, (way, names) in enumerate(ways.items()):
            channel = _channel(draft, value, way, tuple(names), index > 0, 0)
            draft.channels.insert(0, channel)
            draft.programs[DRIVER].insert(0, Action(Verb.WRITE, channel.id))
            for name in names:
                draft.programs[name].insert(0, Action(Verb.READ, channel.id))
    return draft


def _start_way(draft: Draft, actor: str) -> Way:
    host = draft.hosts.get(actor, "")
    return Way(Transport.SHM) if host == draft.hosts.get(DRIVER, "") else Way(Transport.TCP, host=host)
