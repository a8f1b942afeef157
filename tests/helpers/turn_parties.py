"""The copy ends of all parties of a plan in one process, on devices whose streams run when a test says so."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from crossfade.device.context import DeviceContext
from crossfade.edges.by_copies import OutgoingCopies
from crossfade.edges.life import Event
from crossfade.edges.reader import DeviceReader
from crossfade.edges.writer import DeviceWriter
from crossfade.engines.board import board_size_bytes, device_memories, format_board, places
from crossfade.engines.device_ends import DeviceEnds
from crossfade.graph.nodes import ActorInfo, InputNode
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap, Memory
from crossfade.plan.plan import Plan
from crossfade.types import DRIVER
from tests.helpers import small_graphs
from tests.helpers.bells import new_bell
from tests.helpers.host_rings import home_on
from tests.helpers.late_driver import LateDriver
from tests.helpers.small_graphs import actor, compiled

LIMIT_S = 20.0


def call(where: ActorInfo, method: str, *args: Any) -> Any:
    return small_graphs.call(where, method, *args).with_tensor_transport("copy")


def fan_in(num_senders: int = 3, *, overlap: bool = False) -> Plan:
    """R uses what S0 makes, then what S1 makes, ...: channels n0, n1, ... with these turns."""
    inp = InputNode()
    made = [call(actor(f"S{i}"), "make", inp) for i in range(num_senders)]
    return compiled(call(actor("R"), "take", *made), overlap=overlap)


class LateStreams(LateDriver):
    """A late driver whose counters are written and waited for on its streams too, and which notes what it copied.

    Args:
        who: whose device it is.
        log: of all devices: who copied how much, in order.
    """

    def __init__(self, who: str, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self._who = who
        self._log = log

    def copy(self, target: int, source: int, size_bytes: int, stream: int) -> None:
        self.give(stream, lambda: self._log.append((self._who, size_bytes)))
        super().copy(target, source, size_bytes, stream)

    def write_value(self, stream: int, address: int, value: int) -> None:
        self.give(stream, lambda: self._store(address, value))

    def is_idle(self, stream: int) -> bool:
        self.let_go()  # what others have set meanwhile
        return super().is_idle(stream)

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self._enqueue(stream, lambda: (ctypes.c_uint32.from_address(address).value - value) & 0xFFFF_FFFF < 0x8000_0000)


@dataclass
class Party:
    """One party's ends."""

    ends: DeviceEnds
    home: DeviceContext
    bell: Bell
    writers: dict[str, DeviceWriter]
    readers: dict[str, DeviceReader]
    wakes: list[float]

    @property
    def driver(self) -> Any:
        return self.home.driver

    def hold(self) -> None:
        self.driver.hold(self.home.push_stream)

    def let_go(self) -> None:
        self.driver.let_go(self.home.push_stream)


class Parties(dict[str, Party]):
    """By name. `now_s` is the clock that says how long pushes are held."""

    now_s = 0.0
    log: list[tuple[str, int]]

    def serve(self) -> None:
        for party in self.values():
            party.ends.progress()

    def try_write(self, channel: str, value: object) -> bool:
        """After the hosts have said all they have to say (a longer value asks for slots first)."""
        (party,) = (each for each in self.values() if channel in each.writers)
        for _ in range(4):
            self.serve()
            if party.writers[channel].try_write(value):
                return True
        return False

    def run(self) -> None:
        """Lets all streams that are not held go on, as far as they come."""
        for _ in range(len(self)):
            for party in self.values():
                party.driver.let_go()


@contextmanager
def open_parties(plan: Plan) -> Iterator[Parties]:
    """All ends of a plan's copy channels; on leaving, everything is let go, settles, and nothing may be held."""
    log: list[tuple[str, int]] = []
    parties = Parties()
    parties.log = log
    board_memory = Memory.create("board", board_size_bytes(plan))
    board = board_memory.map(board_memory.size_bytes)
    format_board(plan, board)
    shared = {name: Memory.create(name, size_bytes) for name, size_bytes in device_memories(plan).items()}
    names = [name for name in plan.programs if name != DRIVER]
    heaps = {name: Memory.create("heap", 0) for name in names}
    bells = {name: new_bell() for name in names}
    for name in names:
        home = home_on(LateStreams(name, log))
        wakes: list[float] = []
        devices: Any = SimpleNamespace(homes=[home])
        own = {what: Memory(os.dup(memory.fd)) for what, memory in shared.items()}
        ends = DeviceEnds(plan, name, own, devices, {}, wakes.append)
        party = parties[name] = Party(ends, home, bells[name], {}, {}, wakes)
        heap = Heap(heaps[name])
        for place in places(plan):
            if place.lanes is None:
                continue
            spec = place.spec
            if spec.writer == name:
                writer = ends.writer(place, board, heap, bells)
                assert isinstance(writer.carrier, OutgoingCopies)
                party.writers[spec.id] = writer
                if writer.carrier.turns is not None:
                    writer.carrier.turns._now_s = lambda: parties.now_s
            if name in spec.readers:
                reader = ends.reader(place, board, heaps[spec.writer], bells[spec.writer], None)
                party.readers[spec.id] = reader
    try:
        yield parties
    finally:
        _close(parties)
        for memory in (board_memory, *shared.values(), *heaps.values()):
            memory.close()
        for bell in bells.values():
            bell.close()


def _close(parties: Mapping[str, Party]) -> None:
    for party in parties.values():
        party.let_go()
        ends: list[Any] = [*party.writers.values(), *party.readers.values()]
        for end in ends:
            end.close()
        party.ends.on(Event.CLOSE)
    deadline = time.monotonic() + LIMIT_S
    while not all([party.ends.drain() for party in parties.values()]):
        for party in parties.values():
            party.driver.let_go()
        assert time.monotonic() < deadline, "the ends did not settle"
    for party in parties.values():
        party.ends.on(Event.DRAINED)
        while party.ends.is_referenced:
            party.ends.progress()
            assert time.monotonic() < deadline, "tensors are kept"
        party.ends.on(Event.UNREFERENCED)
        party.home.streams.close()
        party.home.pool.close()
        assert party.driver.ledger.held() == []
