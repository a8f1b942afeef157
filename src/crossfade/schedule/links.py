"""What a measured topology says of transfers between GPUs. Pure; UUIDs name the GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from crossfade.topology import Topology

Pair = tuple[str, str]

_SIGNALLED_APART = "copy"
"""The transport whose measured time has no signal in it: the others are measured until the target has the value."""


def alone_us(topology: Topology, transport: str, source: str, target: str, size_bytes: int) -> float:
    """Time of one transfer when nothing else runs, until the target may use the value. Raises a KeyError if it was not measured."""
    link = topology.link(source, target)
    moved_us = link.duration_us(transport, size_bytes)
    if moved_us is None:
        raise KeyError(
            f"{transport!r} was not measured from {source} to {target}; measured: {', '.join(link.transports) or 'nothing'}"
        )
    return moved_us + ((link.signal_us or 0.0) if transport == _SIGNALLED_APART else 0.0)


def crowding(topology: Topology, transport: str, pair: Pair, others: Sequence[Pair], size_bytes: int) -> float:
    """How much longer a transfer takes when others begin at the same time, as a factor of at least 1.

    Measured crowds of the same shape around the pair's ends say it: as many transfers leave its source, or reach its target. A
    shape that was not measured shares the busier end fairly.
    """
    num_out = 1 + sum(source == pair[0] for source, _ in others)
    num_in = 1 + sum(target == pair[1] for _, target in others)
    return crowding_of(topology, transport, num_out, num_in, size_bytes)


def crowding_of(topology: Topology, transport: str, num_out: int, num_in: int, size_bytes: int) -> float:
    """See `crowding`: where so many transfers leave the source, and so many reach the target, this one among both."""
    if num_out == num_in == 1:
        return 1.0
    crowds = [
        crowd
        for crowd in topology.crowds
        if crowd.transport == transport and (crowd.most_out, crowd.most_in) == (num_out, num_in)
    ]
    if not crowds:
        return float(max(num_out, num_in))
    crowd = min(crowds, key=lambda crowd: abs(crowd.size_bytes - size_bytes))
    alone = [topology.link(*each).duration_us(transport, crowd.size_bytes) for each in crowd.transfers]
    slowest_us = max((time_us for time_us in alone if time_us is not None), default=crowd.duration_us)
    return max(1.0, crowd.duration_us / slowest_us)
