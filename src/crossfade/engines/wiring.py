"""How one party opens its ends of a plan's channels, and closes them."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from crossfade.channels.landing import Landing
from crossfade.channels.protocol import Reader, Writer
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import CheckedWriter, ShmWriter
from crossfade.channels.tcp import TcpReader, TcpWriter
from crossfade.channels.wire import Wire
from crossfade.channels.wires import Wires
from crossfade.collectives.protocol import Collective
from crossfade.edges.life import Event
from crossfade.engines.board import RingPlace, action_of, heap_of, is_on_devices, link_parties, places
from crossfade.engines.explained import torch_needed
from crossfade.errors import ChannelError, MissingDependency
from crossfade.host.bulletin import Bulletin
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory
from crossfade.plan.actions import Action, Verb
from crossfade.plan.device_streams import DeviceStream, stream_in, stream_out
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.runtime.bind import Ends, maker_of
from crossfade.types import TargetDevice, Transport

if TYPE_CHECKING:
    from crossfade.collectives.group import Group
    from crossfade.collectives.terms import Terms
    from crossfade.edges.carrier import Outgoing
    from crossfade.edges.host_copies import HostCopies
    from crossfade.edges.reader import DeviceReader
    from crossfade.engines.device_ends import DeviceEnds
    from crossfade.engines.exchanges import Exchanges
    from crossfade.runtime.device_record import DeviceRecorder


_JOIN_S = 5.0
_MEET_S = 60.0


class Wiring:
    """One party's channels of one plan. Raises a `CrossfadeError` or an OSError if something could not be opened; what was is
    closed again.
    """

    def __init__(
        self,
        plan: Plan,
        party: str,
        board: mmap.mmap,  # the mapped board, formatted
        heaps: Mapping[str, Memory],  # the heaps that the party needs, by owner
        bells: Mapping[str, Bell],  # the doorbells of its peers, and its own
        store: Memory | None = None,  # where parties meet, if this one has to; owned by the wiring from now on
        # Opens its ends of channels between devices, and has its devices, if it uses any.
        device_ends: DeviceEnds | None = None,
        host_copies: HostCopies | None = None,  # how it brings tensors to its devices and from there, if it has any
        # Called, in another thread, when a peer has died, before any stream that waits for it is released.
        on_death: Callable[[str], None] | None = None,
        # Is told of the groups in which it does collectives on its devices, if it has any.
        exchanges: Exchanges | None = None,
        # The user-defined communicators that move tensors, by id; they stay the caller's.
        communicators: Mapping[str, Any] | None = None,
        # Its connections to other hosts, by peer, and its bulletin, if it has one; owned by the wiring from now on.
        wires: Mapping[str, Wire] | None = None,
        bulletin: Bulletin | None = None,
    ) -> None:
        self.ends = Ends()
        self._wire_to = wires or {}
        self._bulletin = bulletin
        self.wires: Wires | None = None  # the thread that looks after them, if there are any
        self.device_ends = device_ends
        self._on_death = on_death
        self._exchanges = exchanges
        self._communicators = communicators or {}
        self._host_copies = host_copies
        self._from_devices: list[tuple[ChannelSpec, Outgoing]] = []
        self._onto_devices: list[tuple[ChannelSpec, DeviceReader]] = []
        self._plan = plan
        self._party = party
        self._heaps = heaps
        self._bells = bells
        self._groups: list[Group] = []
        self._link: Any = None
        try:
            self._open(board, store)
        except BaseException:
            if store is not None and self._link is None:
                store.close()
            self.give_up()
            raise
        if bulletin is not None:
            bulletin.on_lost = self._lose
            for peer in list(bulletin.lost):  # meanwhile
                self._lose(peer)

    def _lose(self, peer: str) -> None:
        """A peer of another host cannot be reached any more. Any thread may call it."""
        self.break_off(peer, f"{peer} cannot be reached any more")
        self._bells[self._party].ring_if_asleep()

    def _open(self, board: mmap.mmap, store: Memory | None) -> None:
        plan, party = self._plan, self._party
        if self._bulletin is not None:
            try:
                self._bulletin.await_peers(_MEET_S)
            except (ConnectionError, TimeoutError) as error:
                raise ChannelError(f"{party} could not meet those of other hosts: {error}") from error
        if store is not None and self.device_ends is not None:
            self.device_ends.meet(store, self._bulletin)
        self._open_groups(store)  # in one order everywhere: each waits for its parties
        self._link = self._open_link(store)
        own_heap = Heap(self._heaps[party]) if party in self._heaps else None
        self._open_wires(board)
        for place in places(plan, plan.host_of(party)):
            if plan.is_wired(place.spec):
                continue
            if place.spec.writer == party and own_heap is not None:
                self.ends.writers[place.spec.id] = self._ring_writer(place, board, own_heap)
            if party in place.spec.readers:
                self.ends.readers[place.spec.id] = self._ring_reader(place, board)
        for index, spec in enumerate(plan.channels):
            if spec.transport is Transport.GLOO:
                self._open_gloo(spec, index)

    def _open_wires(self, board: mmap.mmap) -> None:
        """The ends of channels from and to other hosts."""
        plan, party, wires = self._plan, self._party, self._wire_to
        indices = {spec.id: index for index, spec in enumerate(plan.channels)}
        for spec in plan.channels:
            if plan.is_wired(spec) and spec.writer == party:
                writer = TcpWriter(spec.id, wires[spec.landing], indices[spec.id], spec.depth)
                on_devices = self.device_ends if spec.transport is Transport.NCCL else None
                self.ends.writers[spec.id] = writer if on_devices is None else on_devices.nccl_writer(spec, writer)
        heaps: dict[str, Heap] = {}
        for place in places(plan, plan.host_of(party)):
            spec = place.spec
            if not plan.is_wired(spec) or party not in spec.readers:
                continue
            memory, block, landing = self._heaps[heap_of(plan, spec)], place.block(board), None
            if party == spec.landing:
                heap = heaps.setdefault(heap_of(plan, spec), Heap(memory))
                bells = [self._bells[reader] for reader in spec.readers]
                is_counted = len(spec.readers) == 1 and spec.transport is Transport.TCP
                ring_writer = ShmWriter(spec.id, block, heap, bells, buffer_bytes=spec.buffer_bytes)
                landing = Landing(ring_writer, is_counted=is_counted)
                wires[spec.writer].add_landing(indices[spec.id], landing)
            bell = self._bells[spec.landing]
            if spec.transport is Transport.NCCL and self.device_ends is not None:
                self.ends.readers[spec.id] = self.device_ends.reader(place, board, memory, bell, self._host_copies)
                continue
            ring = ShmReader(spec.id, block, spec.readers.index(party), memory, bell)
            self.ends.readers[spec.id] = ring if landing is None else TcpReader(ring, wires[spec.writer], landing)
        if wires:
            self.wires = Wires(self._bells[party], list(wires.values()))

    def _ring_writer(self, place: RingPlace, board: mmap.mmap, heap: Heap) -> Writer:
        spec = place.spec
        if is_on_devices(spec) and self.device_ends is not None:
            return self.device_ends.writer(place, board, heap, self._bells, maker_of(self._plan, spec.value))
        bells = [self._bells[reader] for reader in spec.readers]
        block = place.block(board)
        distrust = self.device_ends.distrust if self.device_ends is not None else None
        if spec.transport is Transport.COMMUNICATOR:
            with torch_needed("a communicator"):
                from crossfade.edges.by_communicator import OutgoingByCommunicator
                from crossfade.edges.writer import DeviceWriter
            ring = ShmWriter(spec.id, block, heap, bells)
            return DeviceWriter(OutgoingByCommunicator(ring, *self._mover_to(spec, spec.readers[0])), distrust)
        if self._host_copies is not None:
            from crossfade.edges.by_host import open_to_host

            writer = open_to_host(
                spec.id,
                block,
                heap,
                bells,
                self._host_copies,
                buffer_bytes=spec.buffer_bytes,
                actor=self._party,
                node=maker_of(self._plan, spec.value),
                distrust=distrust,
            )
            self._from_devices.append((spec, writer.carrier))
            return writer
        if distrust is not None:
            return CheckedWriter(spec.id, block, heap, bells, distrust=distrust, buffer_bytes=spec.buffer_bytes)
        return ShmWriter(spec.id, block, heap, bells, buffer_bytes=spec.buffer_bytes)

    def _ring_reader(self, place: RingPlace, board: mmap.mmap) -> Reader:
        spec = place.spec
        heap, bell = self._heaps[spec.writer], self._bells[spec.writer]
        if is_on_devices(spec) and self.device_ends is not None:
            return self.device_ends.reader(place, board, heap, bell, self._host_copies)
        args = spec.id, place.block(board), spec.readers.index(self._party), heap, bell
        if spec.transport is Transport.COMMUNICATOR:
            with torch_needed("a communicator"):
                from crossfade.edges.by_communicator import IncomingByCommunicator
                from crossfade.edges.reader import DeviceReader
            return DeviceReader(ShmReader(*args), IncomingByCommunicator(spec.id, *self._mover_to(spec, spec.writer)))
        if self._host_copies is not None:
            from crossfade.edges.by_host import open_from_host

            reader = open_from_host(*args, self._host_copies, spec.device)
            self._onto_devices.append((spec, reader))
            return reader
        if spec.device is TargetDevice.CUDA and self._plan.devices.get(self._party):
            raise MissingDependency(
                "torch or cuda-bindings", extra="gpu", needed_for=f"tensors of {spec.id} on {self._party}'s GPU"
            )
        return ShmReader(*args)

    def _mover_to(self, spec: ChannelSpec, peer: str) -> tuple[Any, int, str]:
        """Returns what moves the tensors of a channel between this party and another: communicator, rank of the peer, device."""
        ranks = next(each.parties for each in self._plan.communicators if each.id == spec.communicator)
        device = "cuda" if self._plan.devices.get(self._party) else "cpu"
        return self._communicators[spec.communicator], ranks.index(peer), device

    def _open_link(self, store: Memory | None) -> Any:
        parties = link_parties(self._plan)
        if store is None or self._party not in parties:
            if store is not None:
                store.close()
            return None
        with torch_needed("the transport 'gloo'"):
            from crossfade.channels.gloo import GlooLink
        return GlooLink(store, parties, self._party, self._bells[self._party])

    def _open_gloo(self, spec: ChannelSpec, index: int) -> None:
        if self._link is None:
            return
        if spec.writer == self._party:
            self.ends.writers[spec.id] = self._link.writer(spec.id, index, spec.depth, spec.readers)
        if self._party in spec.readers:
            self.ends.readers[spec.id] = self._link.reader(spec.id, index, spec.depth, spec.writer)

    def _open_groups(self, store: Memory | None) -> None:
        """A group for each set of parties and transport of collectives in which this party is, with its ends of them."""
        if store is None or not any(self._party in spec.parties for spec in self._plan.collectives):
            return
        with torch_needed("a collective"):
            from crossfade.collectives.end import GroupCollective
        groups: dict[_GroupKey, Group] = {}
        keys = list(dict.fromkeys(map(_group_key, self._plan.collectives)))
        for number, spec in enumerate(self._plan.collectives):
            if self._party not in spec.parties:
                continue
            key = _group_key(spec)
            if key not in groups:
                groups[key] = self._open_group(store, keys.index(key), key)
                self._groups.append(groups[key])
            rank, num_outputs = spec.parties.index(self._party), len(spec.outputs_of(self._party))
            self.ends.collectives[spec.id] = GroupCollective(groups[key], _terms(spec), number, rank, num_outputs)

    def _open_group(self, store: Memory, number: int, key: _GroupKey) -> Group:
        from crossfade.collectives.opening import open_group

        parties, transport, communicator = key
        is_apart = self._plan.is_apart(parties)
        near = [self._party] if is_apart else parties
        group = open_group(
            transport,
            self._bulletin if is_apart and self._bulletin is not None else Memory(os.dup(store.fd)),
            number,
            parties,
            self._party,
            bells={party: self._bells[party] for party in near},
            terms=[_terms(spec) for spec in self._plan.collectives if _group_key(spec) == key],
            context=None if self.device_ends is None else self.device_ends.home,
            on_death=self._on_death,
            communicator=self._communicators.get(communicator),
        )
        if self._exchanges is not None and transport.moves_device_memory:
            self._exchanges.add(group)
        return group

    def record(self, devices: Sequence[DeviceRecorder]) -> None:
        """Records, from now on, what goes between hosts and this party's devices, whose recorders these are, and what they do of
        collectives.
        """
        for spec, carrier in self._from_devices:
            for site, device in zip(carrier.recorded, devices, strict=True):
                site.around = device.around(stream_out(spec.transport), action_of(spec, writer=True), spec.id)
        for spec, reader in self._onto_devices:
            action = action_of(spec, writer=False)
            reader.carrier.brought.around = devices[0].around(stream_in(spec.transport), action, spec.id)
        for name, end in self.ends.collectives.items():
            collective, recorded = self._plan.collective[name], cast(Any, end)
            if collective.transport.moves_device_memory:
                recorded.around = devices[0].around(DeviceStream.COLL, Action(Verb.COLL, name), str(collective.kind))

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
        if self.device_ends is not None:
            self.device_ends.on(Event.PEER_DIED, peer, reason)

    def close(self) -> None:
        """Closes all ends and gives the heaps back; values that were read stay valid."""
        self._close_ends()
        self._join()

    def give_up(self) -> None:
        """Closes everything without waiting for the others, which have not heard of it yet."""
        self._close_ends()
        if self._groups or self._link is not None or self._wire_to or self._bulletin is not None:
            threading.Thread(target=self._join, name="crossfade-give-up", daemon=True).start()
        else:
            self._join()

    def _close_ends(self) -> None:
        ends: Sequence[Writer | Reader | Collective] = (
            *self.ends.writers.values(),
            *self.ends.readers.values(),
            *self.ends.collectives.values(),
        )
        for end in ends:
            end.close()
        for group in self._groups:
            group.ask_to_end()
        deadline = time.monotonic() + _JOIN_S
        for group in self._groups:
            group.finish(deadline)

    def _join(self) -> None:
        if self._link is not None:
            self._link.close()
        deadline = time.monotonic() + _JOIN_S
        for group in self._groups:
            group.close(deadline)
        if self._bulletin is not None:
            self._bulletin.close()
        if self.wires is not None:
            self.wires.close()
        else:
            for wire in self._wire_to.values():
                wire.close()
        for memory in self._heaps.values():
            memory.close()


_GroupKey: TypeAlias = tuple[tuple[str, ...], Transport, str]


def _group_key(spec: CollectiveSpec) -> _GroupKey:
    """Returns what all collectives of one group have in common."""
    return spec.group, spec.transport, spec.communicator


def _terms(spec: CollectiveSpec) -> Terms:
    from crossfade.collectives.terms import Terms

    return Terms(spec.id, spec.kind, spec.op, spec.root, spec.parties)
