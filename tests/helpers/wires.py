"""A channel over TCP with both of its ends in this process: over loopback, into a ring of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from crossfade.channels.landing import Landing
from crossfade.channels.protocol import Reader, Writer
from crossfade.channels.ring_layout import RingBlock, RingLayout, format_ring
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.channels.tcp import TcpReader, TcpWriter
from crossfade.channels.wire import Wire
from crossfade.channels.wires import Wires
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.memory import Heap, Memory
from crossfade.host.tcp import Stream


def stream_pair() -> tuple[Stream, Stream]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        one = socket.create_connection(listening.getsockname())
        other, _ = listening.accept()
    return Stream(one), Stream(other)


def new_bell(undo: ExitStack) -> Bell:
    fds = Doorbell.create_fds("test")
    for fd in fds:
        undo.callback(os.close, fd)
    bell = Bell.of(*fds)
    undo.callback(bell.close)
    return bell


def new_ring(undo: ExitStack, bell: Bell, depth: int, num_readers: int) -> tuple[Landing, list[ShmReader]]:
    layout = RingLayout(depth, num_readers)
    board_memory = Memory.create("board", layout.size_bytes)
    board = board_memory.map(board_memory.size_bytes)
    format_ring(board, 0, layout)
    undo.callback(board_memory.close)
    heap = Memory.create("heap", 0)
    undo.callback(heap.close)
    block = RingBlock(board, 0, layout)
    landing = Landing(ShmWriter("n0", block, Heap(heap), [bell] * num_readers), is_counted=num_readers == 1)
    return landing, [ShmReader("n0", block, index, heap, bell) for index in range(num_readers)]


def new_wires(bell: Bell) -> tuple[Wire, Wire]:
    ours, theirs = Wire(bell, None, "peer", "there"), Wire(bell, None, "peer", "there")
    for wire, stream in zip((ours, theirs), stream_pair(), strict=True):
        wire.connect(stream)
    return ours, theirs


@contextmanager
def open_tcp(depth: int, num_readers: int) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    """The first reader is in the process of the landing, the others on its host."""
    with ExitStack() as undo:
        bell = new_bell(undo)
        ours, theirs = new_wires(bell)
        landing, rings = new_ring(undo, bell, depth, num_readers)
        theirs.add_landing(0, landing)
        writer = TcpWriter("n0", ours, 0, depth)
        readers: list[Reader] = [TcpReader(rings[0], theirs, landing), *rings[1:]]
        for wire in (ours, theirs):
            undo.callback(Wires(bell, [wire]).close)
        undo.callback(writer.close)
        for reader in readers:
            undo.callback(reader.close)
        yield writer, readers


@contextmanager
def open_both_ways(depth: int) -> Iterator[tuple[tuple[TcpWriter, TcpReader], tuple[TcpWriter, TcpReader]]]:
    """Both ends of a wire with a channel each way, and no thread that looks after it."""
    with ExitStack() as undo:
        bell = new_bell(undo)
        wires, ends = new_wires(bell), []
        for channel, wire in enumerate(wires):
            landing, (ring,) = new_ring(undo, bell, depth, 1)
            wire.add_landing(1 - channel, landing)
            ends.append((TcpWriter(f"n{channel}", wire, channel, depth), TcpReader(ring, wire, landing)))
            undo.callback(wire.close)
            undo.callback(ends[-1][1].close)
        yield ends[0], ends[1]
