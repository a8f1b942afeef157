"""Where a plan's channels lie in memory: the board, the heaps, what devices see. The same in every process.

Who has nothing to do with devices imports nothing of them here.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossfade.channels.ring_layout import RingBlock, RingLayout, format_ring
from crossfade.engines.state import RingState
from crossfade.host.memory import PAGE_BYTES, address_of, align
from crossfade.host.semaphore import open_semaphore
from crossfade.plan.actions import Action, Verb
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.plan.turns import predecessors, turn_peers
from crossfade.plan.upstream import upstream
from crossfade.types import DRIVER, Transport

if TYPE_CHECKING:
    from crossfade.device.staged_layout import StagedLayout
    from crossfade.edges.layout import DeviceLayout, Lanes

SIGNALS, STAGING = "signals", "chunks"
"""Names of `device_memories`: the signals of copy channels' lanes, and the chunks of staged channels'."""

_HAVE_RECORDS = (
    Transport.SHM,
    Transport.COPY,
    Transport.STAGED,
    Transport.NCCL,
    Transport.COMMUNICATOR,
    Transport.TCP,
)
_HAVE_SLOTS = (Transport.SHM, Transport.TCP)
_HAVE_LANES = (Transport.COPY, Transport.STAGED)


@dataclass(frozen=True, slots=True)
class RingPlace:
    """A channel whose records lie on the board."""

    spec: ChannelSpec
    offset: int  # this and the next: the block of its ring
    ring: RingLayout
    lanes: DeviceLayout | None = None  # for ``copy`` and ``staged``
    first_signal: int = 0  # for ``copy``, where its signals begin in the row of the plan's signals
    chunks_offset: int = 0  # for ``staged``, where its lanes' chunks begin in the memory of the plan's chunks

    def block(self, board: mmap.mmap) -> RingBlock:
        return RingBlock(board, self.offset, self.ring)

    @property
    def lanes_offset(self) -> int:
        """Where the blocks of its lanes begin."""
        return self.offset + self.ring.size_bytes

    @property
    def end(self) -> int:
        """Where the next channel's block begins."""
        return self.lanes_offset + (self.lanes.size_bytes if self.lanes else 0)


def num_devices(plan: Plan, party: str) -> int:
    """Devices of a party; the CPU is the one of a party without a GPU."""
    return max(1, len(plan.devices.get(party, ())))


def pushes(plan: Plan, party: str) -> list[tuple[int, int]]:
    """From which GPU to which the party's copy channels go, by index; each pair once. None where the CPU stands for them."""
    found: dict[tuple[int, int], None] = {}
    sources = plan.devices.get(party, ())
    for spec in plan.channels:
        if spec.transport is Transport.COPY and spec.writer == party:
            for targets in (plan.devices.get(reader, ()) for reader in spec.readers):
                there = targets if len(targets) == len(sources) else targets[:1] * len(sources)
                found.update(dict.fromkeys(zip(sources, there, strict=False)))
    return list(found)


def places(plan: Plan, host: str = "") -> Iterator[RingPlace]:
    """Each channel whose records lie on the board of a host, in order: with its readers, as those of ``tcp`` do."""
    offset = signal = chunks_offset = 0
    for spec in plan.channels:
        if spec.transport not in _HAVE_RECORDS or plan.host_of(spec.landing) != host:
            continue
        ring = RingLayout(spec.depth, len(spec.readers))
        lanes = None
        if spec.transport in _HAVE_LANES:
            from crossfade.edges.layout import DeviceLayout

            lanes = DeviceLayout(len(spec.readers), num_devices(plan, spec.writer), spec.slots)
        place = RingPlace(spec, offset, ring, lanes, signal, chunks_offset)
        yield place
        offset = place.end
        signal += lanes.num_signals if lanes and spec.transport is Transport.COPY else 0
        chunks_offset += _chunks_bytes(place)


def staged_layout() -> StagedLayout:
    """Memory of each lane of a staged channel: with 4 chunks none has to wait for the one before to be free."""
    from crossfade.device.staged_layout import StagedLayout

    return StagedLayout(num_chunks=4, chunk_bytes=4 << 20)


def _chunks_bytes(place: RingPlace) -> int:
    if place.lanes is None or place.spec.transport is not Transport.STAGED:
        return 0
    return place.lanes.num_lanes * staged_layout().size_bytes


def lanes_of(place: RingPlace, board: mmap.mmap) -> Lanes:
    """Where the lanes of a channel lie that has some."""
    from crossfade.edges.layout import Lanes

    return Lanes(board, place.lanes_offset, layout_of(place))


def layout_of(place: RingPlace) -> DeviceLayout:
    """How the lanes of a channel lie that has some."""
    if place.lanes is None:
        raise ValueError(f"channel {place.spec.id} has no lanes")
    return place.lanes


def board_size_bytes(plan: Plan, host: str = "") -> int:
    """Memory that the blocks of all rings of a host need."""
    return max((place.end for place in places(plan, host)), default=1)


def set_aside_bytes(plan: Plan) -> int:
    """Shared memory that a plan takes on the driver's host before its first value: the board, and the slots that ``buffer_bytes``
    asks for, which are an eighth larger (`crossfade.channels.slots`).
    """
    here = plan.host_of(DRIVER)
    rings = [spec for spec in plan.channels if spec.transport in _HAVE_SLOTS and plan.host_of(spec.landing) == here]
    return board_size_bytes(plan, here) + sum(
        spec.depth * (spec.buffer_bytes + spec.buffer_bytes // 8) for spec in rings
    )


def device_memories(plan: Plan, host: str = "") -> Mapping[str, int]:
    """Memory beside the board that ends on devices need, by name: its length. Every party that uses devices gets all of it."""
    found = list(places(plan, host))
    signals = [place.lanes.signals_bytes for place in found if place.lanes and place.spec.transport is Transport.COPY]
    sizes_bytes = {SIGNALS: align(sum(signals), PAGE_BYTES), STAGING: sum(map(_chunks_bytes, found))}
    return {name: size_bytes for name, size_bytes in sizes_bytes.items() if size_bytes}


def format_board(plan: Plan, board: mmap.mmap, host: str = "") -> None:
    """Makes zeroed memory the empty rings of a plan on a host."""
    for place in places(plan, host):
        format_ring(board, place.offset, place.ring)
        if place.lanes:
            from crossfade.edges.layout import format_lanes

            format_lanes(board, place.lanes_offset, place.lanes)


def ring_states(plan: Plan, board: mmap.mmap, host: str = "") -> tuple[RingState, ...]:
    """What lies in each ring at this moment, from the counters on the board."""
    return tuple(
        RingState(
            place.spec.id,
            place.spec.writer,
            reader,
            place.spec.depth,
            open_semaphore(address_of(board, place.offset) + place.ring.items(index))._get_value(),
        )
        for place in places(plan, host)
        for index, reader in enumerate(place.spec.readers)
    )


def uses_devices(plan: Plan, party: str) -> bool:
    """Whether a party has an end of a channel between devices, or does collectives on its devices."""
    edges = [(spec.writer, *spec.readers) for spec in plan.channels if is_on_devices(spec)]
    return any(party in parties for parties in edges) or any(
        party in spec.parties for spec in plan.collectives if is_on_devices(spec)
    )


def nccl_links(plan: Plan) -> list[tuple[str, str]]:
    """(writer, reader) of every NCCL channel, each pair once, in an order that is the same everywhere."""
    channels = [spec for spec in plan.channels if spec.transport is Transport.NCCL]
    return sorted({(spec.writer, reader) for spec in channels for reader in spec.readers})


def meeting_parties(plan: Plan) -> list[str]:
    """Who meets others over the plan's store: for gloo channels, for NCCL's, or for collectives."""
    collectives = [party for spec in plan.collectives for party in spec.parties]
    return sorted({*link_parties(plan), *collectives, *(party for pair in nccl_links(plan) for party in pair)})


def link_parties(plan: Plan) -> list[str]:
    """Who takes part in the group for the plan's gloo channels, in rank order."""
    channels = [spec for spec in plan.channels if spec.transport is Transport.GLOO]
    return sorted({party for spec in channels for party in (spec.writer, *spec.readers)})


def heap_of(plan: Plan, spec: ChannelSpec) -> str:
    """Whose heap the slots of a ring lie in: the writer's, or one of the landing's process for what comes from other hosts."""
    return f"{spec.landing}<" if plan.is_wired(spec) else spec.writer


def heap_owners(plan: Plan, host: str = "") -> list[str]:
    """The heaps of a host."""
    return list(dict.fromkeys(heap_of(plan, place.spec) for place in places(plan, host)))


def heaps_of(plan: Plan, party: str) -> tuple[str, ...]:
    """The heaps that a party needs: its own, and those of the rings that it reads from."""
    return tuple(
        dict.fromkeys(
            heap_of(plan, place.spec)
            for place in places(plan, plan.host_of(party))
            if party == place.spec.writer or party in place.spec.readers
        )
    )


def wired_peers(plan: Plan, party: str) -> list[str]:
    """The parties on other hosts with which one has a connection (`crossfade.channels.wire`), each once, in order."""
    ends = [{spec.writer, spec.landing} for spec in plan.channels if plan.is_wired(spec)]
    return _others(party, ends)


def told_peers(plan: Plan, party: str) -> list[str]:
    """The parties with which one shares a `Bulletin`: those of its collectives and NCCL edges that are not within one host."""
    groups = [set(parties) for parties in (*(spec.parties for spec in plan.collectives), *nccl_links(plan))]
    return _others(party, [group for group in groups if plan.is_apart(group)])


def _others(party: str, groups: Iterable[set[str]]) -> list[str]:
    return sorted({peer for group in groups if party in group for peer in group - {party}})


def is_on_devices(spec: ChannelSpec | CollectiveSpec) -> bool:
    """Whether what goes through it is a matter of streams, so that hosts do not see it come (`crossfade.plan.upstream`)."""
    return spec.transport in (Transport.COPY, Transport.STAGED, Transport.NCCL)


def peers_of(plan: Plan, party: str, before: Mapping[tuple[str, str], str] | None = None) -> set[str]:
    """The peers whose deaths a party has to know of: all at the other end of one of its channels, in its collectives, in its gloo
    group, those whose tensors may reach it through others' devices, and those who push to its readers in turn with it. ``before``
    may be given as the plan's `predecessors`, to save looking for them.
    """
    both = [*((spec.writer, *spec.readers) for spec in plan.channels), *(spec.parties for spec in plan.collectives)]
    both.append(tuple(link_parties(plan)))
    return (
        {peer for parties in both if party in parties for peer in parties}
        | upstream(plan, party, is_on_devices)
        | turn_peers(plan, party, predecessors(plan) if before is None else before)
    ) - {party}


def action_of(spec: ChannelSpec, *, writer: bool) -> Action:
    """What of a program an end is there for."""
    verbs = (Verb.SEND, Verb.WRITE) if writer else (Verb.RECV, Verb.READ)
    return Action(verbs[0] if spec.is_ordered else verbs[1], spec.id)
