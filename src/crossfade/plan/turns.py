"""Whose pushes into a reader come before whose: what staggers several senders into one receiver.

Copies that reach one GPU at the same time share its link, so the value that is needed first would come as late as the last one. So
each ``copy`` channel has, at each of its readers, at most one *predecessor*: the channel with the next lower turn there that has
another writer. (What one writer pushes is in order already, on one stream.) All turns are places in one order, in which channels of
equal turns stand as in the plan; so nobody comes before itself, whichever readers are looked at.

Not every channel with a lower turn counts. One whose writer has the reader's GPU takes nothing of the link. And one that is written
only after this one was, in each execution (its writer needs, by whatever way, what this one's writer does later), would be waited
for in vain each time.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from typing import TypeAlias

from crossfade.plan.actions import MAIN, Action, Verb
from crossfade.plan.plan import ChannelSpec, Plan
from crossfade.plan.text import values_used
from crossfade.types import Transport

__all__ = ["LARGE_BYTES", "LINK_GBS", "predecessors", "targets", "turn_peers"]

LARGE_BYTES = 16 << 20
"""Shorter values neither wait for their turn nor are waited for: their 47 us of a link are little beside what hosts do."""

LINK_GBS = 350.0
"""What a link into a GPU moves at least, in 10^9 bytes a second, for values that are not shorter (measured: 356 to 395). Where the
predecessor is not even enqueued, nobody waits for its turn longer than its own transfer takes at this rate."""

_Clock: TypeAlias = dict[str, int]
"""By party, the last of its steps that is known to be over."""


def targets(plan: Plan, writer: str, reader: str) -> tuple[int, ...]:
    """For each device of a writer, in order, the position of the reader's device to which it pushes."""
    num_sources, num_targets = (max(1, len(plan.devices.get(party, ()))) for party in (writer, reader))
    return tuple(range(num_sources)) if num_sources == num_targets else (0,) * num_sources


def predecessors(plan: Plan) -> Mapping[tuple[str, str], str]:
    """(Channel id, reader) of each channel that has a predecessor there: the predecessor's id."""
    arriving: dict[str, list[ChannelSpec]] = defaultdict(list)
    for channel in sorted(plan.channels, key=lambda each: each.turn):  # stable
        for reader in channel.readers if channel.transport is Transport.COPY else ():
            if _takes_a_link(plan, channel.writer, reader):
                arriving[reader].append(channel)
    contested = {
        reader: channels for reader, channels in arriving.items() if len({each.writer for each in channels}) > 1
    }
    if not contested:
        return {}
    known = _known_at_writes(plan, {each.writer for channels in contested.values() for each in channels})
    places = {
        action.target: index
        for actions in plan.programs.values()
        for index, action in enumerate(actions)
        if action.verb is Verb.WRITE
    }
    found: dict[tuple[str, str], str] = {}
    for reader, channels in contested.items():
        for index, channel in enumerate(channels):
            for before in reversed(channels[:index]):
                is_later = known.get(before.id, {}).get(channel.writer, -1) >= places[channel.id]
                if before.writer != channel.writer and not is_later:
                    found[channel.id, reader] = before.id
                    break
    return found


def turn_peers(plan: Plan, party: str, before: Mapping[tuple[str, str], str]) -> set[str]:
    """The writers of predecessors of what a party writes, and of what it writes predecessors of."""
    pairs = [(plan.channel[channel].writer, plan.channel[other].writer) for (channel, _), other in before.items()]
    return {writer for pair in pairs if party in pair for writer in pair} - {party}


def _takes_a_link(plan: Plan, writer: str, reader: str) -> bool:
    """Whether something that is pushed goes from one GPU to another; between actors without GPUs, what stands for it."""
    sources, arriving = plan.devices.get(writer, ()), plan.devices.get(reader, ())
    if not (sources and arriving):
        return True
    return any(
        source != arriving[target] for source, target in zip(sources, targets(plan, writer, reader), strict=True)
    )


def _known_at_writes(plan: Plan, parties: Collection[str]) -> Mapping[str, _Clock]:
    """For each channel that is written, how far some parties are at least when it is written, in one execution.

    Each party goes through its program once, and learns from what it waits for. A plan that stops leaves what it did not come to.
    """
    clocks: dict[str, _Clock] = {party: {} for party in plan.programs}
    facts: dict[str, _Clock] = {}
    waiting: dict[str, list[str]] = defaultdict(list)
    places = dict.fromkeys(plan.programs, 0)
    ready = deque(plan.programs)
    sources = {party: _sources(plan, party) for party in plan.programs}
    while ready:
        party = ready.popleft()
        actions, clock = plan.programs[party], clocks[party]
        while places[party] < len(actions):
            action = actions[places[party]]
            missing = next((fact for fact in _needs(plan, action, party, sources[party]) if fact not in facts), None)
            if missing is not None:
                waiting[missing].append(party)
                break
            for fact in _needs(plan, action, party, sources[party]):
                for other, place in facts[fact].items():
                    clock[other] = max(clock.get(other, -1), place)
            if party in parties:
                clock[party] = places[party]
            if action.verb in (Verb.WRITE, Verb.SEND, Verb.COLL):
                fact = f"{action.target} by {party}"
                facts[fact] = dict(clock)
                ready.extend(waiting.pop(fact, ()))
            places[party] += 1
    return {
        channel.id: facts[fact] for channel in plan.channels if (fact := f"{channel.id} by {channel.writer}") in facts
    }


def _sources(plan: Plan, party: str) -> Mapping[str, tuple[str, ...]]:
    """What has to be over before a party uses a value that comes in the background, by value."""
    found: dict[str, tuple[str, ...]] = {
        channel.value: (f"{channel.id} by {channel.writer}",)
        for channel in plan.channels
        if channel.is_ordered and party in channel.readers
    }
    for collective in plan.collectives:
        joined = tuple([f"{collective.id} by {other}" for other in collective.parties])
        found.update((value, joined) for value in collective.outputs_of(party))
    return found


def _needs(plan: Plan, action: Action, party: str, sources: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """The facts without which a party does not go past an action."""
    if action.verb is Verb.READ or (action.verb is Verb.RECV and action.stream == MAIN and not action.ahead):
        yield f"{action.target} by {plan.channel[action.target].writer}"
    for value in values_used(plan, action, party):
        yield from sources.get(value, ())
