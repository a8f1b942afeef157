"""CPU values over torch.distributed's gloo: bytes move in the background of both sides.

All gloo channels of a plan share one process group of the plan's own (never the user's default group), on loopback.
A party has one sending thread for each party that it sends to, and one receiving thread, which receives a value for each
permit that the program gave (``try_start``), one after another: several senders into one receiver share its link, and the
value that is needed first should not wait for the others. Between two parties the k-th permit is for the k-th value
(PL-1), which every message's head lets the receiver check.

torch's gloo listens on a loopback port without a key. Before any value is read, both sides of each pair prove that they hold
the group's key (channels/gloo_proof.py): a process that took a party's place while the group connected is refused.

A message is a head of three i64 (channel index, bytes of the first part, bytes of all), the first part (codec table and
pickle, or everything if it is small), then each buffer by itself, received where it will lie.

Closing: each side sends END to those it sends to, and receives until END has come from all who send to it, so no thread stays in
a receive that nobody answers.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from crossfade.channels.gloo_proof import file_store, open_gloo, shared_key
from crossfade.channels.protocol import EMPTY, ChannelStatistics
from crossfade.channels.receive_buffers import ReceiveBuffers
from crossfade.channels.values.codec import decode, message_of, undecodable
from crossfade.channels.values.layout import Encoded, buffer_places
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Memory

_END = -1
_ONE_PART_BYTES = 1 << 16
_TAG = 0xC0FA
_JOIN_S = 5.0


class GlooLink:
    """One party's part in a plan's process group, with its lanes. Making it waits for all ``parties`` (all names, in the same order
    everywhere), and raises a `ChannelError` if they could not connect.
    """

    def __init__(self, store: Memory, parties: Sequence[str], me: str, bell: Bell) -> None:
        self._rank = {name: rank for rank, name in enumerate(parties)}
        self._bell = bell  # this process's own doorbell, rung when a value has come or left
        self._outgoing: dict[str, _SendLane] = {}
        self._incoming: _ReceiveLane | None = None
        self._store = store  # memory that all parties see, for meeting each other; owned by this object from now on
        meeting = file_store(store, len(parties))
        try:
            key = shared_key(meeting)
        except RuntimeError as error:
            raise ChannelError(f"{me} could not join the gloo group of {', '.join(parties)}: {error}") from error
        self._group: Any = open_gloo(meeting, key, parties, self._rank[me])

    def writer(self, name: str, index: int, depth: int, readers: Sequence[str]) -> GlooWriter:
        """The writing end of channel number ``index``."""
        for reader in readers:
            if reader not in self._outgoing:
                self._outgoing[reader] = _SendLane(self._group, self._rank[reader], reader)
        return GlooWriter(name, index, depth, [self._outgoing[reader] for reader in readers], self._bell)

    def reader(self, name: str, index: int, depth: int, writer: str) -> GlooReader:
        """The reading end of channel number ``index``."""
        self._incoming = self._incoming or _ReceiveLane(self._group)
        self._incoming.peers[self._rank[writer]] = writer
        self._incoming.buffers.num_slots += depth
        return GlooReader(name, index, depth, self._incoming, self._rank[writer], self._bell)

    def close(self) -> None:
        """Ends all lanes; waits a moment for their threads."""
        lanes: list[_SendLane | _ReceiveLane] = [*self._outgoing.values()]
        if self._incoming is not None:
            lanes.append(self._incoming)
        for lane in lanes:
            lane.ask_to_end()
        deadline = time.monotonic() + _JOIN_S
        for lane in lanes:
            lane.thread.join(max(0.0, deadline - time.monotonic()))
        if not any(lane.thread.is_alive() for lane in lanes):
            for lane in lanes:
                lane.group = None
            self._group = None
            self._store.close()


@dataclass(slots=True)
class _Transfer:
    """A value on its way to one reader."""

    writer: GlooWriter
    message: Encoded
    is_done: bool = False


class _SendLane:
    """Sends values to one peer, one after another."""

    def __init__(self, group: Any, peer: int, peer_name: str) -> None:
        self.group: Any = group
        self.peer = peer
        self.peer_name = peer_name
        self.queue: SimpleQueue[_Transfer | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=f"crossfade-send-{peer_name}", daemon=True)
        self.thread.start()

    def ask_to_end(self) -> None:
        """After what is queued, END is sent."""
        self.queue.put(None)

    def _run(self) -> None:
        while (transfer := self.queue.get()) is not None:
            writer = transfer.writer
            try:
                start_ns = self._send_message(writer.index, transfer.message)
                transfer.is_done = True
                if writer.on_moved is not None:
                    writer.on_moved(start_ns, time.monotonic_ns())
            except RuntimeError as error:
                writer.break_off(f"gloo could not send to {self.peer_name}: {error}")
            writer.bell.ring_if_asleep()
        with suppress(RuntimeError):  # the peer is gone already
            self._send(_head(_END, 0, 0))

    def _send_message(self, index: int, message: Encoded) -> int:
        """When its head had gone out: until then the peer may not have been ready to take one."""
        if message.size_bytes <= _ONE_PART_BYTES:
            whole = bytearray(message.to_bytes())
            self._send(_head(index, len(whole), len(whole)))
            start_ns = time.monotonic_ns()
            self._send(torch.frombuffer(whole, dtype=torch.uint8))
            return start_ns
        self._send(_head(index, len(message.head), message.size_bytes))
        start_ns = time.monotonic_ns()
        self._send(_as_tensor(memoryview(message.head)))
        for _, data in message.buffers:
            if data.nbytes:
                self._send(_as_tensor(data))
        return start_ns

    def _send(self, tensor: torch.Tensor) -> None:
        self.group.send([tensor], self.peer, _TAG).wait()


class _ReceiveLane:
    """Receives values, one for each permit, one after another."""

    def __init__(self, group: Any) -> None:
        self.group: Any = group
        self.peers: dict[int, str] = {}  # names of those who send to us, by rank
        self.buffers = ReceiveBuffers()
        self._ended: set[int] = set()
        self.permits: SimpleQueue[GlooReader | None] = SimpleQueue()
        self.thread = threading.Thread(target=self._run, name="crossfade-receive", daemon=True)
        self.thread.start()

    def ask_to_end(self) -> None:
        """What the peers still send is received and dropped, up to their END."""
        self.permits.put(None)

    def _run(self) -> None:
        while (reader := self.permits.get()) is not None:
            peer = reader.peer
            try:
                if peer in self._ended or not self._serve(reader):
                    self._ended.add(peer)
                    reader.break_off("the other side closed it")
            except (RuntimeError, ValueError, ChannelError) as error:
                self._ended.add(peer)
                reader.break_off(f"gloo could not receive from {self.peers[peer]}: {error}")
            reader.bell.ring_if_asleep()
        for peer in set(self.peers) - self._ended:
            self._drain(peer)

    def _drain(self, peer: int) -> None:
        with suppress(RuntimeError, ValueError, ChannelError):  # the peer is gone already
            while self._receive_message(peer)[0] != _END:
                pass

    def _serve(self, reader: GlooReader) -> bool:
        """Receives one value; False if END came instead."""
        index, start_ns, message = self._receive_message(reader.peer)
        if index == _END:
            return False
        if index != reader.index:
            raise ChannelError(
                f"PL-1: channel {reader.name} (number {reader.index}) was sent a value of channel number {index}"
            )
        reader.inbox.append(message)
        if reader.on_moved is not None:
            reader.on_moved(start_ns, time.monotonic_ns())
        return True

    def _receive_message(self, peer: int) -> tuple[int, int, memoryview]:
        """(channel index, when its head had come, the message)."""
        head = torch.empty(3, dtype=torch.int64, device="cpu")
        self._receive(head, peer)
        start_ns = time.monotonic_ns()
        index, first_bytes, size_bytes = head.tolist()
        if not 0 <= first_bytes <= size_bytes:
            raise ChannelError(f"a message's head says {first_bytes} of {size_bytes} bytes")
        message = self.buffers.take(size_bytes)
        if not size_bytes:
            return index, start_ns, message
        whole = torch.frombuffer(message, dtype=torch.uint8)
        self._receive(whole[:first_bytes], peer)
        if first_bytes < size_bytes:
            for offset, length in buffer_places(message[:first_bytes], size_bytes):
                if length:
                    self._receive(whole[offset : offset + length], peer)
        return index, start_ns, message

    def _receive(self, tensor: torch.Tensor, peer: int) -> None:
        self.group.recv([tensor], peer, _TAG).wait()


def _head(index: int, first_bytes: int, size_bytes: int) -> torch.Tensor:
    return torch.tensor([index, first_bytes, size_bytes], dtype=torch.int64, device="cpu")


class _Exposed:
    """Memory for numpy to see as writable, whatever it was: torch warns about read-only memory even to send it."""

    def __init__(self, data: memoryview) -> None:
        array = np.frombuffer(data, dtype=np.uint8)
        self._keep = array
        self.__array_interface__ = {**array.__array_interface__, "data": (array.__array_interface__["data"][0], False)}


def _as_tensor(data: memoryview) -> torch.Tensor:
    """The same memory as a tensor, for sending only."""
    return torch.from_numpy(np.asarray(_Exposed(data)))


class _End:
    """What both ends share."""

    on_moved: Callable[[int, int], None] | None = None

    def __init__(self, name: str, index: int, depth: int, bell: Bell) -> None:
        self.name = name
        self.index = index
        self.bell = bell
        self._depth = depth
        self._broken = ""
        self._is_closed = False
        self._num_values = 0
        self._num_bytes = 0

    def break_off(self, reason: str) -> None:
        self._broken = self._broken or reason

    def _raise_if_ended(self) -> None:
        if self._is_closed:
            raise ChannelClosed(f"channel {self.name} was closed by this side")
        if self._broken:
            raise ChannelBroken(f"channel {self.name} is broken: {self._broken}")

    def close(self) -> None:
        """The lanes belong to the link, which tells the other side."""
        self._is_closed = True

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(self._num_values, self._num_bytes)


class GlooWriter(_End):
    """The writing end; made by `GlooLink.writer`."""

    def __init__(self, name: str, index: int, depth: int, lanes: Sequence[_SendLane], bell: Bell) -> None:
        super().__init__(name, index, depth, bell)
        self._lanes = lanes
        self._underway: deque[list[_Transfer]] = deque()

    def try_write(self, value: object) -> bool:
        """A slot is a value that has not reached all readers."""
        if not self.has_room():
            return False
        message = message_of(value)
        transfers = [_Transfer(self, message) for _ in self._lanes]
        self._underway.append(transfers)
        for lane, transfer in zip(self._lanes, transfers, strict=True):
            lane.queue.put(transfer)
        self._num_values += 1
        self._num_bytes += message.size_bytes
        return True

    def has_room(self) -> bool:
        self._raise_if_ended()
        self._forget_done()
        return len(self._underway) < self._depth

    def _forget_done(self) -> None:
        while self._underway and all(transfer.is_done for transfer in self._underway[0]):
            self._underway.popleft()

    def try_flush(self) -> bool:
        self._forget_done()
        if self._underway:
            self._raise_if_ended()
        return not self._underway

    def close(self) -> None:
        super().close()
        self._underway.clear()  # each refers to this; what is queued is sent all the same


class GlooReader(_End):
    """One reading end; made by `GlooLink.reader`."""

    def __init__(self, name: str, index: int, depth: int, lane: _ReceiveLane, peer: int, bell: Bell) -> None:
        super().__init__(name, index, depth, bell)
        self._lane = lane
        self.peer = peer
        self._num_held = 0  # started and not yet released
        self.inbox: deque[memoryview] = deque()

    def try_start(self) -> bool:
        self._raise_if_ended()
        if self._num_held >= self._depth:
            return False
        self._num_held += 1
        self._lane.permits.put(self)
        return True

    def try_read(self) -> object:
        if not self.inbox or self._is_closed:
            self._raise_if_ended()
            return EMPTY
        message = self.inbox.popleft()
        self._num_values += 1
        self._num_bytes += message.nbytes
        try:
            return decode(message, private=memoryview)
        except Exception as error:
            return undecodable(error, self.name)

    def is_idle(self) -> bool:
        return not self.inbox

    def release(self) -> None:
        self._num_held -= 1
