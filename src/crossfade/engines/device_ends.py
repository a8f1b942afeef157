"""One party's ends of a plan's lanes, on the devices of its process."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from crossfade.channels.asking import all_of, any_of
from crossfade.channels.device_home import DeviceHome
from crossfade.device.signals import WORD_BYTES, BoardPart, HostBoard, Releasable, SignalBoard
from crossfade.engines.board import RingPlace, is_on_devices, lanes_of, num_devices, signals_size_bytes
from crossfade.engines.device_turns import DeviceTurns
from crossfade.engines.devices import Devices
from crossfade.errors import ChannelBroken, MissingDependency
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory
from crossfade.plan.actions import Action, Verb
from crossfade.plan.plan import ChannelSpec, Plan
from crossfade.plan.upstream import upstream
from crossfade.runtime.alive import Alive
from crossfade.runtime.device_record import DeviceLane, DeviceRecorder

if TYPE_CHECKING:
    from crossfade.channels.copy_engine import CopyReader, CopyWriter

__all__ = ["DeviceEnds"]


class DeviceEnds:
    """The ends of copy channels of one party in one plan.

    Args:
        plan: the plan.
        party: who this is.
        memory: the plan's signals; owned by this object from now on.
        devices: of this process.
        pidfds: of the plan's other parties; they stay the caller's.
        wake_in: wakes the actor's loop after so many seconds, at the latest.

    Attributes:
        alive: those whose tensors may reach this party.

    Raises:
        MissingDependency: torch or cuda-bindings is not installed.
        DeviceError: CUDA cannot start.
    """

    def __init__(
        self,
        plan: Plan,
        party: str,
        memory: Memory,
        devices: Devices,
        pidfds: Mapping[str, int],
        wake_in: Callable[[float], None],
    ) -> None:
        self._plan = plan
        self._party = party
        self._homes = list(devices.homes)
        num_signals = signals_size_bytes(plan) // WORD_BYTES
        self._boards: dict[int, HostBoard] = {}  # by device, as each sees the signals
        try:
            for home in self._homes:
                if home.device not in self._boards:
                    self._boards[home.device] = HostBoard(home.driver, memory, num_signals, "a plan")
        finally:
            memory.close()
        before = upstream(plan, party, is_on_devices)
        self.alive = Alive({peer: pidfd for peer, pidfd in pidfds.items() if peer in before})
        self._turns = DeviceTurns(plan, [self._boards[home.device] for home in self._homes], wake_in)
        self._writers: list[tuple[ChannelSpec, CopyWriter]] = []
        self._readers: list[tuple[ChannelSpec, CopyReader]] = []

    @property
    def home(self) -> DeviceHome:
        """The device on which collectives are done: the first."""
        return self._homes[0]

    def writer(
        self, place: RingPlace, board: mmap.mmap, heap: Heap, bells: Mapping[str, Bell], node: str = ""
    ) -> CopyWriter:
        """Opens the writing end of a channel.

        Args:
            place: where it lies.
            board: the plan's board.
            heap: of this party.
            bells: those of all that this party knows.
            node: what makes the values, for errors.
        """
        layout = lanes_of(place)
        writer: CopyWriter = _module().CopyWriter(
            place.spec.id,
            board,
            place.offset,
            place.ring,
            heap,
            [bells[reader] for reader in place.spec.readers],
            lanes_offset=place.lanes_offset,
            layout=layout,
            homes=self._homes,
            signals=[self._part(place, home.device) for home in self._homes],
            turns=self._turns.open(place, board, bells),
            actor=self._party,
            node=node,
        )
        self._writers.append((place.spec, writer))
        return writer

    def reader(self, place: RingPlace, board: mmap.mmap, heap: Memory, bell: Bell) -> CopyReader:
        """Opens a reading end of a channel."""
        layout = lanes_of(place)
        has_same = num_devices(self._plan, place.spec.writer) == len(self._homes)
        homes = self._homes if has_same else self._homes[:1] * layout.num_sources
        reader: CopyReader = _module().CopyReader(
            place.spec.id,
            board,
            place.offset,
            place.ring,
            place.spec.readers.index(self._party),
            heap,
            bell,
            lanes_offset=place.lanes_offset,
            layout=layout,
            homes=homes,
            signals=[self._part(place, home.device) for home in homes],
            slot_bytes=place.spec.buffer_bytes,
        )
        self._readers.append((place.spec, reader))
        return reader

    def _part(self, place: RingPlace, device: int) -> SignalBoard:
        return BoardPart(self._boards[device], place.first_signal, lanes_of(place).num_signals)

    def distrust(self) -> ChannelBroken | None:
        """Why what was computed here cannot be trusted, if so. Any thread may ask."""
        dead = self.alive.check()
        if not dead:
            return None
        return ChannelBroken(f"{', '.join(dead)} died, and the value may have been made of what came from there")

    def record(self, devices: Sequence[DeviceRecorder]) -> None:
        """Records every copy from now on; ``devices`` are the recorders of this party's devices."""
        for spec, writer in self._writers:
            for number, lane in enumerate(writer.lanes):
                device = devices[number % len(self._homes) % len(devices)]
                lane.ring.around = device.around(DeviceLane.PUSH, Action(Verb.WRITE, spec.id), spec.id)

    def break_off(self, peer: str, reason: str) -> None:
        """A party of the plan is gone, whether or not it is at the other end of a lane. Any thread may call it."""
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
        """Sees to what is not on a value's way; after the doorbell rang. Whether it should soon be called again."""
        return any_of(end.serve() for end in self._ends())

    def settle(self) -> bool:
        """Once the ends are closed: goes on with closing, without waiting; whether no value is on its way any more."""
        if not all_of(end.settle() for end in self._ends()):
            return False
        self._turns.end()
        return True

    def _ends(self) -> list[CopyWriter | CopyReader]:
        return [*(writer for _, writer in self._writers), *(reader for _, reader in self._readers)]

    @property
    def is_empty(self) -> bool:
        """Once settled: whether no tensor of this plan is kept any more."""
        return all(reader.is_empty for _, reader in self._readers)

    def release(self) -> None:
        """Once empty: takes the signals away from the devices."""
        self.alive.close()
        for board in self._boards.values():
            board.close()

    def signals(self, peer: str) -> list[Releasable]:
        """What a peer sets and streams of this process may wait for. Any thread may ask."""
        found: list[Releasable] = [*self._turns.awaited(peer)]
        for spec, writer in self._writers:
            for reader, name in enumerate(spec.readers):
                if name == peer:
                    first = reader * len(self._homes)
                    for lane in writer.lanes[first : first + len(self._homes)]:
                        found += lane.ring.signals()
        for spec, end in self._readers:
            if spec.writer == peer:
                for arriving in end.lanes:
                    found += arriving.ring.signals()
        return found


def _module() -> Any:
    try:
        from crossfade.channels import copy_engine
    except ImportError as error:
        raise MissingDependency("torch", extra="torch", needed_for="the transport 'copy'") from error
    return copy_engine
