"""One party's ends of a plan's channels between devices, on the devices of its process."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.channels.tcp import TcpWriter
from crossfade.device.capabilities import check_pairs, read_facts
from crossfade.device.context import DeviceContext
from crossfade.device.signals import WORD_BYTES, HostBoard, Releasable, SignalBoard
from crossfade.edges.life import Action, Event, Life, State
from crossfade.engines.board import (
    SIGNALS,
    STAGING,
    RingPlace,
    action_of,
    is_on_devices,
    lanes_of,
    layout_of,
    nccl_links,
    num_devices,
    pushes,
    staged_layout,
)
from crossfade.engines.device_turns import DeviceTurns
from crossfade.engines.devices import Devices, distinct
from crossfade.engines.explained import fault_text, torch_needed
from crossfade.errors import ChannelBroken, DeviceError
from crossfade.host.bulletin import Bulletin
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory
from crossfade.host.processes import Alive
from crossfade.plan.device_streams import DeviceStream, stream_in, stream_out
from crossfade.plan.plan import ChannelSpec, Plan
from crossfade.plan.upstream import upstream
from crossfade.runtime.device_record import DeviceRecorder
from crossfade.types import TargetDevice, Transport

if TYPE_CHECKING:
    from crossfade.edges.carrier import Incoming, Outgoing
    from crossfade.edges.host_copies import HostCopies
    from crossfade.edges.nccl_link import NcclLink
    from crossfade.edges.reader import DeviceReader
    from crossfade.edges.writer import DeviceWriter

_WHAT = "channels between devices"


class DeviceEnds:
    """The ends of channels between devices of one party in one plan. Raises a `MissingDependency` if torch or cuda-bindings is not
    installed, and a `DeviceError` if CUDA cannot start or a copy channel goes between GPUs whose signals cannot be trusted.
    """

    def __init__(
        self,
        plan: Plan,
        party: str,
        # The plan's `crossfade.engines.board.device_memories`; owned by this object from now on.
        shared: Mapping[str, Memory],
        devices: Devices,
        pidfds: Mapping[str, int],  # of the plan's other parties; they stay the caller's
        wake_in: Callable[[float], None],  # wakes the actor's loop after so many seconds, at the latest
    ) -> None:
        self._plan = plan
        self._party = party
        self._shared = shared
        self._boards: dict[int, HostBoard] = {}  # by device, as each sees the signals
        try:
            self._homes = list(devices.homes)
            self._check_reach()
            if SIGNALS in shared:
                self._open_boards(shared[SIGNALS])
            self._make_streams()
        except BaseException:
            self._close_shared()
            raise
        before = upstream(plan, party, is_on_devices)
        # Those whose tensors may reach this party.
        self.alive = Alive({peer: pidfd for peer, pidfd in pidfds.items() if peer in before})
        signals = [self._boards[home.device] for home in self._homes] if self._boards else []
        self._turns = DeviceTurns(plan, signals, wake_in)
        self._writers: list[tuple[ChannelSpec, DeviceWriter]] = []
        self._readers: list[tuple[ChannelSpec, DeviceReader]] = []
        self._links: dict[tuple[str, str], NcclLink] = {}
        self.life = Life()  # where the plan stands on this process's devices
        self._lock = threading.Lock()

    def _check_reach(self) -> None:
        """A measured topology may be another machine's; and where copies do not reach, flags could come before data."""
        pairs = [(here, there) for here, there in pushes(self._plan, self._party) if here != there]
        if pairs and not self._homes[0].is_host:
            hint = "'staged' goes through the host, and 'auto' takes it there; `crossfade topology` measures the links anew"
            check_pairs(read_facts().links, pairs, hint=hint)

    def _open_boards(self, memory: Memory) -> None:
        for home in self._homes:
            if home.device not in self._boards:
                self._boards[home.device] = HostBoard(home.driver, memory, memory.size_bytes // WORD_BYTES, "a plan")

    def _make_streams(self) -> None:
        """Those of staged copies, before any death is looked out for that may have to let them go."""
        mine = [spec for spec in self._plan.channels if self._party in (spec.writer, *spec.readers)]
        if any(spec.transport is Transport.STAGED for spec in mine):
            with torch_needed(_WHAT):
                from crossfade.edges.by_staging import make_streams
            for home in self._homes:
                make_streams(home)

    def _close_shared(self) -> None:
        """Closes the boards of signals, and then the shared memory that they are views of."""
        with ExitStack() as closing:
            for memory in self._shared.values():
                closing.callback(memory.close)
            for board in self._boards.values():
                closing.callback(board.close)

    @property
    def home(self) -> DeviceContext:
        """The device on which collectives are done: the first."""
        return self._homes[0]

    def meet(self, store: Memory, bulletin: Bulletin | None) -> None:
        """Makes this party's links of NCCL, each with the party at its other end, for which it waits: in ``store``, or over
        ``bulletin`` where that one is on another host. Both stay the caller's. Any thread may call it.

        Raises a `DeviceError` if this process has no GPU that NCCL can use, and a `ChannelError` if the parties could not connect,
        or meanwhile the plan was given up.
        """
        for pair in nccl_links(self._plan):
            if self._party in pair:
                with torch_needed(_WHAT):
                    from crossfade.edges.nccl_link import NcclLink
                homes = self._homes if self._party == pair[0] else self._targets(pair[0])
                place = bulletin if bulletin is not None and self._plan.is_apart(pair) else store
                self._add_link(pair, NcclLink(place, pair, self._party, homes))

    def _add_link(self, pair: tuple[str, str], link: NcclLink) -> None:
        with self._lock:
            if self.life.state in (State.OPEN, State.BROKEN):
                self._links[pair] = link
                return
        link.break_off("the plan was given up")
        raise ChannelBroken(f"the plan was given up while {self._party} met the others")

    def writer(
        self, place: RingPlace, board: mmap.mmap, heap: Heap, bells: Mapping[str, Bell], node: str = ""
    ) -> DeviceWriter:
        """Opens the writing end of a channel of this host. ``bells`` are all that this party knows; ``node`` is for errors."""
        spec, homes = place.spec, self._homes
        to_readers = [bells[reader] for reader in spec.readers]
        ring = ShmWriter(spec.id, place.block(board), heap, to_readers)
        carrier: Outgoing
        match spec.transport:
            case Transport.COPY:
                with torch_needed(_WHAT):
                    from crossfade.edges.by_copies import OutgoingCopies

                signals, turns = self._signals_of(place, homes), self._turns.open(place, board, bells)
                carrier = OutgoingCopies(
                    ring, lanes_of(place, board), homes, signals, to_readers, turns=turns, actor=self._party, node=node
                )
            case Transport.STAGED:
                with torch_needed(_WHAT):
                    from crossfade.edges.by_staging import OutgoingChunks

                carrier = OutgoingChunks(ring, lanes_of(place, board), self._chunks(place), homes, to_readers)
            case _:
                return self.nccl_writer(spec, ring)
        return self._written(spec, carrier)

    def nccl_writer(self, spec: ChannelSpec, ring: ShmWriter | TcpWriter) -> DeviceWriter:
        """Opens the writing end of a channel by NCCL, whose messages go through ``ring``."""
        with torch_needed(_WHAT):
            from crossfade.edges.by_nccl import OutgoingNccl
        links = [self._links[self._party, reader] for reader in spec.readers]
        return self._written(spec, OutgoingNccl(ring, self._homes, links))

    def _written(self, spec: ChannelSpec, carrier: Outgoing) -> DeviceWriter:
        from crossfade.edges.writer import DeviceWriter

        writer = DeviceWriter(carrier)
        self._writers.append((spec, writer))
        return writer

    def reader(
        self, place: RingPlace, board: mmap.mmap, heap: Memory, bell: Bell, copies: HostCopies | None
    ) -> DeviceReader:
        """Opens a reading end of a channel, from ``heap``; ``bell`` is that of whoever fills its ring. ``copies`` brings CPU
        tensors to the device, where they are wanted there.
        """
        spec, homes = place.spec, self._targets(place.spec.writer)
        index = spec.readers.index(self._party)
        with torch_needed(_WHAT):
            from crossfade.edges.host_copies import Joiner
            from crossfade.edges.reader import DeviceReader
        joiner = Joiner(copies if spec.device is TargetDevice.CUDA else None)
        ring = ShmReader(spec.id, place.block(board), index, heap, bell)
        carrier: Incoming
        match spec.transport:
            case Transport.COPY:
                from crossfade.edges.by_copies_in import IncomingCopies

                lanes, signals = lanes_of(place, board), self._signals_of(place, homes)
                carrier = IncomingCopies(
                    spec.id, index, lanes, homes, signals, bell, ring.nudge(), joiner, spec.buffer_bytes
                )
            case Transport.STAGED:
                from crossfade.edges.by_staging import IncomingChunks

                lanes = lanes_of(place, board)
                carrier = IncomingChunks(spec.id, index, lanes, self._chunks(place), homes, bell, joiner)
            case _:
                from crossfade.edges.by_nccl import IncomingNccl

                carrier = IncomingNccl(spec.id, index, self._links[spec.writer, self._party], joiner)
        reader = DeviceReader(ring, carrier)
        if spec.transport is Transport.NCCL:
            self._links[spec.writer, self._party].readers.append(reader)
        self._readers.append((spec, reader))
        return reader

    def _targets(self, writer: str) -> list[DeviceContext]:
        """For each device of a writer, the device of this process on which its tensors arrive."""
        num_sources = num_devices(self._plan, writer)
        return self._homes if num_sources == len(self._homes) else self._homes[:1] * num_sources

    def _signals_of(self, place: RingPlace, homes: Sequence[DeviceContext]) -> list[SignalBoard]:
        """A channel's signals, as each of these devices sees them."""
        num_signals = layout_of(place).num_signals
        return [self._boards[home.device].part(place.first_signal, num_signals) for home in homes]

    def _chunks(self, place: RingPlace) -> Any:
        from crossfade.edges.by_staging import Chunks

        return Chunks(self._shared[STAGING], place.chunks_offset, staged_layout())

    def distrust(self) -> ChannelBroken | None:
        """Why what was computed here cannot be trusted, if so. Any thread may ask, before it gives a value to a host.

        A peer that has died leaves streams waiting. Its neighbours' watchdogs let them go, and what these streams then send to
        others is rubbish that looks right. A neighbour releases them only after it saw the death in the descriptor of the dead
        process, and that is the system's word, the same for all. So a party that looks at the descriptors of all parties upstream
        (`crossfade.plan.upstream`) *after* its value has come (a look before proves nothing), and *before* it publishes it, finds a
        death that can have spoilt the value.
        """
        if self._links:
            for (_, reader), link in self._links.items():
                if link.reason and reader == self._party:  # the transfers that had been enqueued were released
                    return ChannelBroken(f"the value may have been made of what did not come: {link.reason}")
        dead = self.alive.check()
        if not dead:
            return None
        return ChannelBroken(f"{', '.join(dead)} died, and the value may have been made of what came from there")

    def record(self, devices: Sequence[DeviceRecorder]) -> None:
        """Records every copy from now on; ``devices`` are the recorders of this party's devices."""
        device_of = dict(zip(map(id, distinct(self._homes)), devices, strict=True))
        for spec, writer in self._writers:
            action = action_of(spec, writer=True)
            for number, end in enumerate(writer.carrier.recorded):
                device = device_of[id(self._homes[number % len(self._homes)])]
                end.around = device.around(stream_out(spec.transport), action, spec.id)
        for spec, reader in self._readers:
            action = action_of(spec, writer=False)
            for home, arriving in zip(self._targets(spec.writer), reader.carrier.recorded, strict=False):
                arriving.around = device_of[id(home)].around(stream_in(spec.transport), action, spec.id)
            reader.carrier.brought.around = devices[0].around(DeviceStream.DOWN, action, spec.id)

    def on(self, event: Event, peer: str = "", reason: str = "") -> None:
        """Something happened to the plan on this process: every end does what its life asks for (``edges.life``).

        Any thread may bring `Event.PEER_DIED`, with the ``peer`` that died; a process that is no party of the plan changes nothing.
        Calls raise errors with ``reason`` from now on.
        """
        if event is Event.PEER_DIED and peer not in self._plan.programs:
            return
        with self._lock:
            actions = self.life.on(event)
        for action in actions:
            match action:
                case Action.END:
                    for _, writer in self._writers:
                        writer.end()
                case Action.MUTE:
                    self._mute(peer, reason)
                case Action.REFUSE:
                    self._refuse(reason)
                    for pair, link in self._links.items():  # once everything here is marked: it lets streams run on
                        if peer in pair:
                            link.break_off(reason)
                case Action.NOTIFY:
                    for _, writer in self._writers:
                        writer.carrier.notify()
                case Action.RELEASE:
                    self._release()

    def _mute(self, peer: str, reason: str) -> None:
        for spec, writer in self._writers:
            if peer in spec.readers:
                writer.carrier.mute(spec.readers.index(peer), reason)
        for spec, reader in self._readers:
            if spec.writer == peer:
                reader.break_off(reason)

    def _refuse(self, reason: str) -> None:
        """No value passes any more, whether or not the dead party is at the other end."""
        for _, writer in self._writers:
            writer.break_off(reason)
        for _, reader in self._readers:
            reader.carrier.refuse(reason)

    def _ends(self) -> list[tuple[ChannelSpec, DeviceWriter | DeviceReader]]:
        return [*self._writers, *self._readers]

    def go_without(self, absent: Sequence[str]) -> None:
        """These parties could not open the plan: none of their processes will say that nothing comes."""
        for spec, reader in self._readers:
            if spec.writer in absent:
                reader.break_off(f"{spec.writer} could not open it")

    def progress(self) -> bool:
        """Handles control records and values under way, after the doorbell rang. True if it should be called again soon. Raises a
        `DeviceError` that names the channel if a device refused what it needs: the program may stand at another one.
        """
        has_more = False
        for spec, end in self._ends():
            try:
                has_more = end.carrier.progress() or has_more
            except DeviceError as error:
                action = action_of(spec, writer=spec.writer == self._party)
                raise DeviceError(fault_text(error, self._plan, action)) from error
        return has_more

    def drain(self) -> bool:
        """Once closed, without waiting: whether no value is on its way any more. Raises a `DeviceError` if the device refuses."""
        ends = [end.drain() for _, end in self._ends()]
        if not (all(ends) and all([link.drain() for link in self._links.values()])):
            return False
        self._turns.end()
        return True

    @property
    def is_referenced(self) -> bool:
        """Once drained: whether tensors of this plan are still in use."""
        return any(reader.carrier.is_referenced for _, reader in self._readers)

    def _release(self) -> None:
        """Takes signals and all other memory away from the devices."""
        self.alive.close()
        for _, end in self._ends():
            end.carrier.release()
        self._close_shared()

    def signals(self, peer: str) -> list[Releasable]:
        """What a peer sets and streams of this process may wait for. Any thread may ask."""
        found: list[Releasable] = [*self._turns.awaited(peer)]
        for spec, writer in self._writers:
            if peer in spec.readers:
                found += writer.carrier.signals(spec.readers.index(peer))
        for spec, reader in self._readers:
            if spec.writer == peer:
                found += reader.carrier.signals()
        return found
