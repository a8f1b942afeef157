"""Where a plan's channels lie in memory, and how one party opens its ends of them."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from crossfade.channels.protocol import Collective, Reader, Writer
from crossfade.channels.ring_layout import RingLayout, format_ring
from crossfade.channels.shm_ring import ShmReader, ShmWriter
from crossfade.engines.state import RingState
from crossfade.errors import MissingDependency, UnknownTransport
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory, address_of
from crossfade.host.semaphore import open_semaphore
from crossfade.plan.plan import ChannelSpec, Plan
from crossfade.runtime.bind import Ends
from crossfade.types import Transport

__all__ = [
    "Wiring",
    "board_size_bytes",
    "format_board",
    "gloo_parties",
    "heap_owners",
    "heaps_of",
    "peers_of",
    "ring_states",
]


_JOIN_S = 5.0


def _rings(plan: Plan) -> list[tuple[ChannelSpec, int, RingLayout]]:
    """Each shared-memory channel with the offset of its block on the board. The same list in every process."""
    rings, offset = [], 0
    for spec in plan.channels:
        if spec.transport is Transport.SHM:
            layout = RingLayout(spec.depth, len(spec.readers))
            rings.append((spec, offset, layout))
            offset += layout.size_bytes
    return rings


def board_size_bytes(plan: Plan) -> int:
    """Memory that the blocks of all rings need."""
    return sum(layout.size_bytes for _, _, layout in _rings(plan)) or 1


def format_board(plan: Plan, board: mmap.mmap) -> None:
    """Makes zeroed memory the empty rings of a plan."""
    for _, offset, layout in _rings(plan):
        format_ring(board, offset, layout)


def ring_states(plan: Plan, board: mmap.mmap) -> tuple[RingState, ...]:
    """What lies in each ring at this moment, from the counters on the board."""
    return tuple(
        RingState(
            spec.id,
            spec.writer,
            reader,
            spec.depth,
            open_semaphore(address_of(board, offset) + layout.items(index))._get_value(),
        )
        for spec, offset, layout in _rings(plan)
        for index, reader in enumerate(spec.readers)
    )


def gloo_parties(plan: Plan) -> list[str]:
    """Who meets others over gloo, for channels or for collectives."""
    return sorted({*_link_parties(plan), *(party for spec in plan.collectives for party in spec.parties)})


def _link_parties(plan: Plan) -> list[str]:
    """Who takes part in the group for the plan's gloo channels, in rank order."""
    channels = [spec for spec in plan.channels if spec.transport is Transport.GLOO]
    return sorted({party for spec in channels for party in (spec.writer, *spec.readers)})


def heap_owners(plan: Plan) -> list[str]:
    """Who writes to a shared-memory ring."""
    return list(dict.fromkeys(spec.writer for spec in plan.channels if spec.transport is Transport.SHM))


def heaps_of(plan: Plan, party: str) -> tuple[str, ...]:
    """Whose heaps a party needs: its own, and those of the writers that it reads from."""
    return tuple(
        dict.fromkeys(
            spec.writer
            for spec in plan.channels
            if spec.transport is Transport.SHM and (party == spec.writer or party in spec.readers)
        )
    )


def peers_of(plan: Plan, party: str) -> set[str]:
    """Everybody at the other end of one of the party's channels, in its collectives, and in its gloo group."""
    both = [*((spec.writer, *spec.readers) for spec in plan.channels), *(spec.parties for spec in plan.collectives)]
    both.append(tuple(_link_parties(plan)))
    return {peer for parties in both if party in parties for peer in parties} - {party}


class Wiring:
    """One party's channels of one plan.

    Args:
        plan: the plan.
        party: who this is.
        board: the mapped board, formatted.
        heaps: the heaps that the party needs, by owner.
        bells: the doorbells of its peers, and its own.
        store: where the parties of the gloo group meet, if there are any; owned by the wiring from now on.
    """

    def __init__(
        self,
        plan: Plan,
        party: str,
        board: mmap.mmap,
        heaps: Mapping[str, Memory],
        bells: Mapping[str, Bell],
        store: Memory | None = None,
    ) -> None:
        for spec in plan.channels:
            if spec.transport not in (Transport.SHM, Transport.GLOO) and party in (spec.writer, *spec.readers):
                raise UnknownTransport(
                    f"channel {spec.id} goes by {spec.transport}, which the local engine does not have yet"
                )
        self.ends = Ends()
        self._plan = plan
        self._party = party
        self._heaps = heaps
        self._bells = bells
        self._groups = self._open_groups(store)  # in one order everywhere: each waits for its parties
        self._link = self._open_link(store)
        own_heap = Heap(heaps[party]) if party in heaps else None
        for spec, offset, layout in _rings(plan):
            if spec.writer == party and own_heap is not None:
                self.ends.writers[spec.id] = self._ring_writer(spec, board, offset, layout, own_heap)
            if party in spec.readers:
                self.ends.readers[spec.id] = self._ring_reader(spec, board, offset, layout)
        for index, spec in enumerate(plan.channels):
            if spec.transport is Transport.GLOO:
                self._open_gloo(spec, index)

    def _ring_writer(self, spec: ChannelSpec, board: mmap.mmap, offset: int, layout: RingLayout, heap: Heap) -> Writer:
        bells = [self._bells[reader] for reader in spec.readers]
        return ShmWriter(spec.id, board, offset, layout, heap, bells, buffer_bytes=spec.buffer_bytes)

    def _ring_reader(self, spec: ChannelSpec, board: mmap.mmap, offset: int, layout: RingLayout) -> Reader:
        index = spec.readers.index(self._party)
        return ShmReader(spec.id, board, offset, layout, index, self._heaps[spec.writer], self._bells[spec.writer])

    def _open_link(self, store: Memory | None) -> Any:
        parties = _link_parties(self._plan)
        if store is None or self._party not in parties:
            if store is not None:
                store.close()
            return None
        try:
            from crossfade.channels.gloo import GlooLink
        except ImportError as error:
            raise MissingDependency("torch", extra="torch", needed_for="the transport 'gloo'") from error
        return GlooLink(store, parties, self._party, self._bells[self._party])

    def _open_gloo(self, spec: ChannelSpec, index: int) -> None:
        if self._link is None:
            return
        if spec.writer == self._party:
            self.ends.writers[spec.id] = self._link.writer(spec.id, index, spec.depth, spec.readers)
        if self._party in spec.readers:
            self.ends.readers[spec.id] = self._link.reader(spec.id, index, spec.depth, spec.writer)

    def _open_groups(self, store: Memory | None) -> list[Any]:
        """A group for each set of parties of collectives in which this party is, with its ends of them."""
        groups: dict[tuple[str, ...], Any] = {}
        if store is None:
            return []
        number_of = {
            group: number for number, group in enumerate(dict.fromkeys(s.group for s in self._plan.collectives))
        }
        for number, spec in enumerate(self._plan.collectives):
            if self._party not in spec.parties:
                continue
            try:
                from crossfade.channels.collective import Meeting
                from crossfade.channels.gloo_collective import GlooGroup
            except ImportError as error:
                raise MissingDependency("torch", extra="torch", needed_for="a collective") from error
            if spec.group not in groups:
                own = Memory(os.dup(store.fd))
                bell = self._bells[self._party]
                groups[spec.group] = GlooGroup(own, number_of[spec.group], spec.group, self._party, bell)
            meeting = Meeting(spec.id, spec.kind, spec.op, spec.root, spec.parties)
            rank, num_outputs = spec.parties.index(self._party), len(spec.outputs_of(self._party))
            self.ends.collectives[spec.id] = groups[spec.group].collective(meeting, number, rank, num_outputs)
        return list(groups.values())

    def break_off(self, peer: str, reason: str) -> None:
        """A peer is gone: the ends of all channels with it say so from now on."""
        for name, writer in self.ends.writers.items():
            if peer in self._plan.channel[name].readers:
                writer.break_off(reason)
        for name, reader in self.ends.readers.items():
            if peer == self._plan.channel[name].writer:
                reader.break_off(reason)
        for name, collective in self.ends.collectives.items():
            if peer in self._plan.collective[name].parties:
                collective.break_off(reason)

    def close(self) -> None:
        """Closes all ends and gives the heaps back; values that were read stay valid."""
        ends: Sequence[Writer | Reader | Collective] = (
            *self.ends.writers.values(),
            *self.ends.readers.values(),
            *self.ends.collectives.values(),
        )
        for end in ends:
            end.close()
        for group in self._groups:
            group.ask_to_end()
        if self._link is not None:
            self._link.close()
        deadline = time.monotonic() + _JOIN_S
        for group in self._groups:
            group.close(deadline)
        for memory in self._heaps.values():
            memory.close()
