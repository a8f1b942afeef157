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

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from crossfade.plan.order import Order
from crossfade.plan.plan import ChannelSpec, Plan
from crossfade.types import Transport

LARGE_BYTES = 16 << 20
"""Shorter values neither wait for their turn nor are waited for: their 47 us of a link are little beside what hosts do."""

LINK_GBS = 350.0
"""What a link into a GPU moves at least, in 10^9 bytes a second, for values that are not shorter (measured: 356 to 395). Where the
predecessor is not even enqueued, nobody waits for its turn longer than its own transfer takes at this rate."""


def targets(plan: Plan, writer: str, reader: str) -> tuple[int, ...]:
    """For each device of a writer, in order, the position of the reader's device to which it pushes."""
    num_sources, num_targets = (max(1, len(plan.devices.get(party, ()))) for party in (writer, reader))
    return tuple(range(num_sources)) if num_sources == num_targets else (0,) * num_sources


def predecessors(plan: Plan) -> Mapping[tuple[str, str], str]:
    """(Channel id, reader) of each channel that has a predecessor there: the predecessor's id."""
    copies = [channel for channel in plan.channels if channel.transport is Transport.COPY]
    pairs = {(channel.writer, reader) for channel in copies for reader in channel.readers}
    by_link = {pair for pair in pairs if _takes_a_link(plan, *pair)}
    arriving: dict[str, list[ChannelSpec]] = defaultdict(list)
    for channel in sorted(copies, key=lambda each: each.turn):  # stable
        for reader in channel.readers:
            if (channel.writer, reader) in by_link:
                arriving[reader].append(channel)
    contested = {
        reader: channels for reader, channels in arriving.items() if len({each.writer for each in channels}) > 1
    }
    if not contested:
        return {}
    order = Order(plan)
    return {
        (channel.id, reader): before.id
        for reader, channels in contested.items()
        for channel, before in _with_predecessors(order, channels)
    }


def _with_predecessors(order: Order, channels: Sequence[ChannelSpec]) -> Iterator[tuple[ChannelSpec, ChannelSpec]]:
    """Those of a reader's channels, by their turns, that have a predecessor, and that."""
    others: list[int] = []  # for each place, the nearest place before it of a channel with another writer, or -1
    for place, channel in enumerate(channels):
        others.append(place - 1)
        if place and channels[place - 1].writer == channel.writer:
            others[place] = others[place - 1]
        before = others[place]
        while before >= 0 and order.is_written_before(channel, channels[before]):
            before -= 1
            if before >= 0 and channels[before].writer == channel.writer:
                before = others[before]
        if before >= 0:
            yield channel, channels[before]


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
