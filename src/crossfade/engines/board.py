"""Where a plan's channels lie in memory: the board, the heaps, the row of signals. The same in every process."""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossfade.channels.ring_layout import RingLayout, format_ring
from crossfade.engines.state import RingState
from crossfade.host.memory import PAGE_BYTES, address_of, align
from crossfade.host.semaphore import open_semaphore
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.plan.turns import predecessors, turn_peers
from crossfade.plan.upstream import upstream
from crossfade.types import Transport

if TYPE_CHECKING:
    from crossfade.channels.device_layout import DeviceLayout

__all__ = [
    "RingPlace",
    "board_size_bytes",
    "format_board",
    "gloo_parties",
    "heap_owners",
    "heaps_of",
    "is_on_devices",
    "lanes_of",
    "link_parties",
    "num_devices",
    "peers_of",
    "places",
    "ring_states",
    "signals_size_bytes",
    "uses_devices",
]

_IN_SHARED_MEMORY = (Transport.SHM, Transport.COPY)


@dataclass(frozen=True, slots=True)
class RingPlace:
    """A channel whose records lie on the board.

    Attributes:
        spec: the channel.
        offset, ring: the block of its ring.
        lanes_offset, lanes: the blocks of its lanes, for ``copy``.
        first_signal: where its signals begin in the row of the plan's signals.
    """

    spec: ChannelSpec
    offset: int
    ring: RingLayout
    lanes: DeviceLayout | None = None
    first_signal: int = 0

    @property
    def lanes_offset(self) -> int:
        """Where the blocks of its lanes begin."""
        return self.offset + self.ring.size_bytes

    @property
    def end(self) -> int:
        """Where the next channel's block begins."""
        return self.lanes_offset + (self.lanes.size_bytes if self.lanes else 0)


def num_devices(plan: Plan, party: str) -> int:
    """Devices of a party; the CPU is one for who has no GPU."""
    return max(1, len(plan.devices.get(party, ())))


def places(plan: Plan) -> Iterator[RingPlace]:
    """Each channel whose records lie on the board, in order."""
    offset = signal = 0
    for spec in plan.channels:
        if spec.transport not in _IN_SHARED_MEMORY:
            continue
        ring = RingLayout(spec.depth, len(spec.readers))
        lanes = None
        if spec.transport is Transport.COPY:
            from crossfade.channels.device_layout import DeviceLayout

            lanes = DeviceLayout(len(spec.readers), num_devices(plan, spec.writer), spec.slots)
        place = RingPlace(spec, offset, ring, lanes, signal)
        yield place
        offset = place.end
        signal += lanes.num_signals if lanes else 0


def lanes_of(place: RingPlace) -> DeviceLayout:
    """The lanes of a channel that has some."""
    if place.lanes is None:
        raise ValueError(f"channel {place.spec.id} has no lanes")
    return place.lanes


def board_size_bytes(plan: Plan) -> int:
    """Memory that the blocks of all rings need."""
    return max((place.end for place in places(plan)), default=1)


def signals_size_bytes(plan: Plan) -> int:
    """Memory that the signals of all lanes need; 0 if nobody uses devices."""
    size_bytes = sum(place.lanes.signals_bytes for place in places(plan) if place.lanes)
    is_used = size_bytes or any(is_on_devices(spec) for spec in plan.collectives)
    return align(max(size_bytes, 1), PAGE_BYTES) if is_used else 0


def format_board(plan: Plan, board: mmap.mmap) -> None:
    """Makes zeroed memory the empty rings of a plan."""
    for place in places(plan):
        format_ring(board, place.offset, place.ring)
        if place.lanes:
            from crossfade.channels.device_layout import format_lanes

            format_lanes(board, place.lanes_offset, place.lanes)


def ring_states(plan: Plan, board: mmap.mmap) -> tuple[RingState, ...]:
    """What lies in each ring at this moment, from the counters on the board."""
    return tuple(
        RingState(
            place.spec.id,
            place.spec.writer,
            reader,
            place.spec.depth,
            open_semaphore(address_of(board, place.offset) + place.ring.items(index))._get_value(),
        )
        for place in places(plan)
        for index, reader in enumerate(place.spec.readers)
    )


def uses_devices(plan: Plan, party: str) -> bool:
    """Whether a party has an end of a lane, or does collectives on its devices."""
    lanes = (spec for spec in plan.channels if spec.transport is Transport.COPY)
    return any(party in (spec.writer, *spec.readers) for spec in lanes) or any(
        party in spec.parties for spec in plan.collectives if is_on_devices(spec)
    )


def gloo_parties(plan: Plan) -> list[str]:
    """Who meets others over gloo, for channels or for collectives."""
    return sorted({*link_parties(plan), *(party for spec in plan.collectives for party in spec.parties)})


def link_parties(plan: Plan) -> list[str]:
    """Who takes part in the group for the plan's gloo channels, in rank order."""
    channels = [spec for spec in plan.channels if spec.transport is Transport.GLOO]
    return sorted({party for spec in channels for party in (spec.writer, *spec.readers)})


def heap_owners(plan: Plan) -> list[str]:
    """Who writes to a shared-memory ring."""
    return list(dict.fromkeys(spec.writer for spec in plan.channels if spec.transport in _IN_SHARED_MEMORY))


def heaps_of(plan: Plan, party: str) -> tuple[str, ...]:
    """Whose heaps a party needs: its own, and those of the writers that it reads from."""
    return tuple(
        dict.fromkeys(
            spec.writer
            for spec in plan.channels
            if spec.transport in _IN_SHARED_MEMORY and (party == spec.writer or party in spec.readers)
        )
    )


def is_on_devices(spec: ChannelSpec | CollectiveSpec) -> bool:
    """Whether what goes through it is a matter of streams, so that hosts do not see it come (`crossfade.plan.upstream`)."""
    return spec.transport in (Transport.COPY, Transport.STAGED, Transport.NCCL)


def peers_of(plan: Plan, party: str, before: Mapping[tuple[str, str], str] | None = None) -> set[str]:
    """Whose deaths a party has to know of: everybody at the other end of one of its channels, in its collectives, in its gloo
    group, those whose tensors may reach it through others' devices, and those who push to its readers in turn with it.

    Args:
        plan: the plan.
        party: who has to know.
        before: the plan's `predecessors`, for who asks often; None to look for them.
    """
    both = [*((spec.writer, *spec.readers) for spec in plan.channels), *(spec.parties for spec in plan.collectives)]
    both.append(tuple(link_parties(plan)))
    return (
        {peer for parties in both if party in parties for peer in parties}
        | upstream(plan, party, is_on_devices)
        | turn_peers(plan, party, predecessors(plan) if before is None else before)
    ) - {party}
