"""From whom a party's values come without a host in between.

What a stream computes after the watchdog has let it go is rubbish, and it travels from device to device with all its signals right:
no host on the way notices. Hosts are where it ends, because a host asks who is alive before it publishes a value. Whom it has to
ask about is here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TypeAlias

from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan

DeviceEdge: TypeAlias = Callable[[ChannelSpec | CollectiveSpec], bool]
"""Whether what goes through it stays on devices, so that its arrival is a matter of streams and not of hosts."""


def upstream(plan: Plan, party: str, is_device: DeviceEdge) -> frozenset[str]:
    """The other parties whose device data can reach what ``party`` gives to a host, directly or through others.

    Actors are not looked into: what came to one at any time may have changed what all its methods return. In a collective all
    parties' data reach all parties. ``is_device`` says which channels and collectives count.
    """
    sources: dict[str, set[str]] = defaultdict(set)
    for channel in filter(is_device, plan.channels):
        for reader in channel.readers:
            sources[reader].add(channel.writer)
    for collective in filter(is_device, plan.collectives):
        for each in collective.parties:
            sources[each].update(collective.parties)
    found = {party}
    front = [party]
    while front:
        new = sources[front.pop()] - found
        found |= new
        front += new
    return frozenset(found - {party})
