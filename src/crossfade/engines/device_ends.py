"""One party's ends of a plan's channels between devices, on the devices of its process."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from crossfade.device.capabilities import check_pairs, read_facts
from crossfade.device.home import DeviceHome
from crossfade.device.signals import WORD_BYTES, BoardPart, HostBoard, Releasable, SignalBoard
from crossfade.engines.board import (
    SIGNALS,
    STAGING,
    RingPlace,
    is_on_devices,
    lanes_of,
    nccl_links,
    num_devices,
    pushes,
    staged_layout,
)
from crossfade.engines.device_turns import DeviceTurns
from crossfade.engines.devices import Devices
from crossfade.engines.explained import torch_needed
from crossfade.engines.fault_place import fault_text
from crossfade.errors import ChannelBroken, DeviceError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory
from crossfade.plan.actions import Action, Verb
from crossfade.plan.device_streams import DeviceStream, stream_in, stream_out
from crossfade.plan.plan import ChannelSpec, Plan
from crossfade.plan.upstream import upstream
from crossfade.runtime.alive import Alive
from crossfade.runtime.device_record import DeviceRecorder
from crossfade.types import TargetDevice, Transport

if TYPE_CHECKING:
    from crossfade.edges.copy_engine import CopyWriter
    from crossfade.edges.copy_reader import CopyReader
    from crossfade.edges.host_copies import HostCopies
    from crossfade.edges.nccl import NcclReader, NcclWriter
    from crossfade.edges.nccl_link import NcclLink
    from crossfade.edges.staged_engine import StagedReader, StagedWriter

    _Writer: TypeAlias = CopyWriter | StagedWriter | NcclWriter
    _Reader: TypeAlias = CopyReader | StagedReader | NcclReader

__all__ = ["DeviceEnds"]

_WHAT = "channels between devices"


class DeviceEnds:
    """The ends of channels between devices of one party in one plan.

    Args:
        plan: the plan.
        party: who this is.
        shared: the plan's `crossfade.engines.board.device_memories`; owned by this object from now on.
        devices: of this process.
        pidfds: of the plan's other parties; they stay the caller's.
        wake_in: wakes the actor's loop after so many seconds, at the latest.

    Attributes:
        alive: those whose tensors may reach this party.

    Raises:
        MissingDependency: torch or cuda-bindings is not installed.
        DeviceError: CUDA cannot start; or a copy channel goes between GPUs whose signals cannot be trusted.
    """

    def __init__(
        self,
        plan: Plan,
        party: str,
        shared: Mapping[str, Memory],
        devices: Devices,
        pidfds: Mapping[str, int],
        wake_in: Callable[[float], None],
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
            self._close_memories()
            raise
        before = upstream(plan, party, is_on_devices)
        self.alive = Alive({peer: pidfd for peer, pidfd in pidfds.items() if peer in before})
        signals = [self._boards[home.device] for home in self._homes] if self._boards else []
        self._turns = DeviceTurns(plan, signals, wake_in)
        self._writers: list[tuple[ChannelSpec, _Writer]] = []
        self._readers: list[tuple[ChannelSpec, _Reader]] = []
        self._links: dict[tuple[str, str], NcclLink] = {}
        self._lock = threading.Lock()
        self._is_left = False

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
                from crossfade.edges.staged_lane import make_streams
            for home in self._homes:
                make_streams(home)

    def _close_memories(self) -> None:
        for memory in self._shared.values():
            memory.close()

    @property
    def home(self) -> DeviceHome:
        """The device on which collectives are done: the first."""
        return self._homes[0]

    def meet(self, store: Memory) -> None:
        """Makes this party's links of NCCL, each with the party at its other end, for which it waits. Any thread may call it.

        Args:
            store: where the parties meet; stays the caller's.

        Raises:
            DeviceError: this process has no GPU that NCCL can use.
            ChannelError: the parties could not connect, or meanwhile the plan was given up.
        """
        for pair in nccl_links(self._plan):
            if self._party in pair:
                with torch_needed(_WHAT):
                    from crossfade.edges.nccl_link import NcclLink
                homes = self._homes if self._party == pair[0] else self._targets(pair[0])
                self._add_link(pair, NcclLink(store, pair, self._party, homes))

    def _add_link(self, pair: tuple[str, str], link: NcclLink) -> None:
        with self._lock:
            if not self._is_left:
                self._links[pair] = link
                return
        link.break_off("the plan was given up")
        raise ChannelBroken(f"the plan was given up while {self._party} met the others")

    def writer(
        self, place: RingPlace, board: mmap.mmap, heap: Heap, bells: Mapping[str, Bell], node: str = ""
    ) -> _Writer:
        """Opens the writing end of a channel.

        Args:
            place: where it lies.
            board: the plan's board.
            heap: of this party.
            bells: those of all that this party knows.
            node: what makes the values, for errors.
        """
        spec, homes = place.spec, self._homes
        args = spec.id, board, place.offset, place.ring, heap, [bells[reader] for reader in spec.readers]
        writer: _Writer
        match spec.transport:
            case Transport.COPY:
                signals, turns = self._signals_of(place, homes), self._turns.open(place, board, bells)
                with torch_needed(_WHAT):
                    from crossfade.edges.copy_engine import CopyWriter
                writer = CopyWriter(
                    *args,
                    **_lanes(place),
                    homes=homes,
                    signals=signals,
                    turns=turns,
                    actor=self._party,
                    node=node,
                )
            case Transport.STAGED:
                with torch_needed(_WHAT):
                    from crossfade.edges.staged_engine import StagedWriter
                writer = StagedWriter(*args, **_lanes(place), homes=homes, chunks=self._chunks(place))
            case _:
                links = [self._links[self._party, reader] for reader in spec.readers]
                with torch_needed(_WHAT):
                    from crossfade.edges.nccl import NcclWriter
                writer = NcclWriter(*args, homes=homes, links=links)
        self._writers.append((spec, writer))
        return writer

    def reader(
        self, place: RingPlace, board: mmap.mmap, heap: Memory, bell: Bell, copies: HostCopies | None
    ) -> _Reader:
        """Opens a reading end of a channel. ``copies`` brings CPU tensors to the device, where they are wanted there."""
        spec, homes = place.spec, self._targets(place.spec.writer)
        copies = copies if spec.device is TargetDevice.CUDA else None
        args = spec.id, board, place.offset, place.ring, spec.readers.index(self._party), heap, bell
        reader: _Reader
        match spec.transport:
            case Transport.COPY:
                signals = self._signals_of(place, homes)
                with torch_needed(_WHAT):
                    from crossfade.edges.copy_reader import CopyReader
                reader = CopyReader(
                    *args,
                    **_lanes(place),
                    homes=homes,
                    signals=signals,
                    slot_bytes=spec.buffer_bytes,
                    copies=copies,
                )
            case Transport.STAGED:
                with torch_needed(_WHAT):
                    from crossfade.edges.staged_engine import StagedReader
                reader = StagedReader(*args, **_lanes(place), homes=homes, chunks=self._chunks(place), copies=copies)
            case _:
                with torch_needed(_WHAT):
                    from crossfade.edges.nccl import NcclReader
                reader = NcclReader(*args, link=self._links[spec.writer, self._party], copies=copies)
        self._readers.append((spec, reader))
        return reader

    def _targets(self, writer: str) -> list[DeviceHome]:
        """For each device of a writer, the device of this process on which its tensors arrive."""
        num_sources = num_devices(self._plan, writer)
        return self._homes if num_sources == len(self._homes) else self._homes[:1] * num_sources

    def _signals_of(self, place: RingPlace, homes: Sequence[DeviceHome]) -> list[SignalBoard]:
        """A channel's signals, as each of these devices sees them."""
        num_signals = lanes_of(place).num_signals
        return [BoardPart(self._boards[home.device], place.first_signal, num_signals) for home in homes]

    def _chunks(self, place: RingPlace) -> Any:
        with torch_needed(_WHAT):
            from crossfade.edges.staged_lane import Chunks
        return Chunks(self._shared[STAGING], place.chunks_offset, staged_layout())

    def distrust(self) -> ChannelBroken | None:
        """Why what was computed here cannot be trusted, if so. Any thread may ask."""
        if self._links:
            for (_, reader), link in self._links.items():
                if link.reason and reader == self._party:  # what had been enqueued of it was let go
                    return ChannelBroken(f"the value may have been made of what did not come: {link.reason}")
        dead = self.alive.check()
        if not dead:
            return None
        return ChannelBroken(f"{', '.join(dead)} died, and the value may have been made of what came from there")

    def record(self, devices: Sequence[DeviceRecorder]) -> None:
        """Records every copy from now on; ``devices`` are the recorders of this party's devices."""
        device_of = dict(zip({id(home): home for home in self._homes}, devices, strict=True))
        for spec, writer in self._writers:
            action = Action(Verb.SEND if spec.is_ordered else Verb.WRITE, spec.id)
            for number, end in enumerate(writer.recorded):
                device = device_of[id(self._homes[number % len(self._homes)])]
                end.around = device.around(stream_out(spec.transport), action, spec.id)
        for spec, reader in self._readers:
            action = Action(Verb.RECV if spec.is_ordered else Verb.READ, spec.id)
            for home, arriving in zip(self._targets(spec.writer), reader.recorded, strict=False):
                arriving.around = device_of[id(home)].around(stream_in(spec.transport), action, spec.id)
            reader.brought.around = devices[0].around(DeviceStream.DOWN, action, spec.id)

    def break_off(self, peer: str, reason: str) -> None:
        """A process is gone. If it is a party of the plan, all ends hear of it, whether or not it is at the other end of a lane.
        Any thread may call it.
        """
        if peer not in self._plan.programs:
            return
        for spec, writer in self._writers:
            if peer in spec.readers:
                writer.lose(spec.readers.index(peer), reason)
            else:
                writer.give_up(reason)
        for spec, end in self._readers:
            if spec.writer == peer:
                end.break_off(reason)
            else:
                end.give_up(reason)
        for pair, link in self._links.items():  # once everything here is marked: it lets streams go
            if peer in pair:
                link.break_off(reason)

    def go_without(self, absent: Sequence[str]) -> None:
        """These parties could not open the plan: nobody is there who would say that nothing comes."""
        for spec, reader in self._readers:
            if spec.writer in absent:
                reader.break_off(f"{spec.writer} could not open it")

    def end(self) -> None:
        """No step is taken any more: readers hear that no more values come."""
        for _, writer in self._writers:
            writer.end()

    def serve(self) -> bool:
        """Sees to what is not on a value's way; after the doorbell rang. Whether it should soon be called again.

        Raises:
            DeviceError: a device refused what a channel needs, which the message names: the program may stand at another one.
        """
        has_more = False
        for end in self._ends():
            try:
                has_more = end.serve() or has_more
            except DeviceError as error:
                raise DeviceError(fault_text(error, self._plan, self._action_of(end))) from error
        return has_more

    def _action_of(self, end: _Writer | _Reader) -> Action:
        """What of a program an end is there for."""
        for spec, writer in self._writers:
            if writer is end:
                return Action(Verb.SEND if spec.is_ordered else Verb.WRITE, spec.id)
        return next(
            Action(Verb.RECV if spec.is_ordered else Verb.READ, spec.id)
            for spec, reader in self._readers
            if reader is end
        )

    def settle(self) -> bool:
        """Once the ends are closed: goes on with closing, without waiting; whether no value is on its way any more."""
        with self._lock:
            self._is_left = True
        if not (all([end.settle() for end in self._ends()]) and all([link.settle() for link in self._links.values()])):
            return False
        self._turns.end()
        return True

    def abandon(self) -> None:
        """Once the ends are closed, and the device refuses what settling takes: the other sides need not wait for this one, whose
        device does nothing more.
        """
        for _, writer in self._writers:
            writer.abandon()

    def _ends(self) -> list[_Writer | _Reader]:
        return [*(writer for _, writer in self._writers), *(reader for _, reader in self._readers)]

    @property
    def is_empty(self) -> bool:
        """Once settled: whether no tensor of this plan is kept any more."""
        return all(reader.is_empty for _, reader in self._readers)

    def release(self) -> None:
        """Once empty, and once nobody looks at `signals` any more: takes them away from the devices, with all other memory."""
        self.alive.close()
        for end in self._ends():
            end.give_back()
        for board in self._boards.values():
            board.close()
        self._close_memories()

    def signals(self, peer: str) -> list[Releasable]:
        """What a peer sets and streams of this process may wait for. Any thread may ask."""
        found: list[Releasable] = [*self._turns.awaited(peer)]
        for spec, writer in self._writers:
            if peer in spec.readers:
                found += writer.signals(spec.readers.index(peer))
        for spec, reader in self._readers:
            if spec.writer == peer:
                found += reader.signals()
        return found


def _lanes(place: RingPlace) -> dict[str, Any]:
    return {"lanes_offset": place.lanes_offset, "layout": lanes_of(place)}
