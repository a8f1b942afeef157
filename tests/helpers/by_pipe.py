"""A transport that did not exist: CPU tensors travel apart from their message, through a pipe to each reader.

It shows what a new carrier takes (docs/contributing.md): this file, and one line in the conformance test. The message goes through
the ring, ahead of the bytes. A pipe holds 64 KB, so both sides move in `progress` what does not fit at once.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import torch

from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.channels.values.codec import undecodable
from crossfade.channels.values.device_codec import Split, Splitter, join, notes_of, places_of
from crossfade.edges.arrivals import Coming, Requests
from crossfade.edges.carrier import Incoming, Outgoing
from crossfade.edges.reader import DeviceReader
from crossfade.edges.writer import DeviceWriter
from crossfade.errors import ChannelBroken
from tests.helpers.copy_pair import Edge, pair_of


class OutgoingPipes(Outgoing):
    """The writer's side: ``pipes`` are the ends to write to, one for each reader."""

    def __init__(self, ring: ShmWriter, pipes: Sequence[int]) -> None:
        self.ring = ring
        self._splitter = Splitter(lambda tensor: 0 if tensor.device.type == "cpu" else None, note_bytes=1)
        self._unsent: dict[int, deque[memoryview]] = {pipe: deque() for pipe in pipes}
        for pipe in pipes:
            os.set_blocking(pipe, False)

    def split(self, value: object) -> Split:
        return self._splitter.split(value)

    def try_send(self, parts: Split) -> bool:
        if any(self._unsent.values()):
            return False
        self.ring.stage(parts.message)
        self.ring.publish()
        for unsent in self._unsent.values():
            unsent += [_bytes_of(each.tensor) for each in parts.tensors if each.size_bytes]
        self.progress()
        return True

    def progress(self) -> bool:
        for pipe, unsent in self._unsent.items():
            with suppress(BlockingIOError):
                while unsent:
                    unsent[0] = unsent[0][os.write(pipe, unsent[0]) :]
                    if not unsent[0]:
                        unsent.popleft()
        return not self.is_flushed()

    def is_flushed(self) -> bool:
        return not any(self._unsent.values())

    def mute(self, reader: int, reason: str) -> None:
        self._unsent[list(self._unsent)[reader]].clear()

    def drain(self) -> bool:
        try:
            self.progress()
        except BrokenPipeError:  # a reader has closed
            self.notify()
        return self.is_flushed()

    def notify(self) -> None:
        super().notify()
        for unsent in self._unsent.values():
            unsent.clear()

    def release(self) -> None:
        for pipe in self._unsent:
            os.close(pipe)


class IncomingPipe(Incoming):
    """The reader's side: ``pipe`` is the end to read from."""

    def __init__(self, name: str, pipe: int) -> None:
        self.requests = Requests()
        self._name = name
        self._pipe = pipe
        self._bytes = bytearray()
        self._refusal = ""
        os.set_blocking(pipe, False)

    def decode(self, ring: ShmReader, message: memoryview, slot: int | None, is_private: bool) -> object:
        return Coming(message, is_private, {})

    def _places(self, coming: Coming) -> list[tuple[int, int, int]]:
        """(offset in its lane, offset in the pipe's bytes, length) of a value's tensors."""
        places, at = [], 0
        for _, offset, size_bytes in places_of(coming.message) if notes_of(coming.message) is not None else ():
            places.append((offset, at, size_bytes))
            at += size_bytes
        return places

    def is_here(self, coming: Coming) -> bool:
        with suppress(BlockingIOError):
            while data := os.read(self._pipe, 1 << 16):
                self._bytes += data
        is_here = sum(size for _, _, size in self._places(coming)) <= len(self._bytes)
        if self._refusal and not is_here:
            raise ChannelBroken(f"channel {self._name} is broken: {self._refusal}")
        return is_here

    def finish(self, coming: Coming) -> object:
        places = self._places(coming)
        num_bytes = sum(size for _, _, size in places)
        data, self._bytes = self._bytes[:num_bytes], self._bytes[num_bytes:]
        starts = {offset: at for offset, at, _ in places}

        def make(lane: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
            size = torch.Size(shape).numel() * dtype.itemsize
            part = data[starts[offset] : starts[offset] + size]
            return torch.frombuffer(part, dtype=dtype).view(shape) if size else torch.empty(shape, dtype=dtype)

        try:
            return join(coming.message, lambda _: make)
        except Exception as error:
            return undecodable(error, self._name)

    def refuse(self, reason: str) -> None:
        self._refusal = reason

    def release(self) -> None:
        os.close(self._pipe)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


@contextmanager
def open_pipe_ends(depth: int, num_readers: int) -> Iterator[tuple[DeviceWriter, list[DeviceReader]]]:
    edge, pipes = Edge(depth, num_readers), [os.pipe() for _ in range(num_readers)]
    writer = DeviceWriter(OutgoingPipes(edge.ring_writer(), [pipe for _, pipe in pipes]))
    readers = [DeviceReader(edge.ring_reader(i), IncomingPipe("c", pipe)) for i, (pipe, _) in enumerate(pipes)]
    with edge.opened(writer, readers):
        yield writer, readers


open_pipe_pair = pair_of(open_pipe_ends)
