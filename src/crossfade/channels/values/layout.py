"""Messages: how a pickle and the buffers that are not in it lie in memory.

All offsets count from the message's first byte, numbers are little-endian u64::

    0        8          16                    16 + 16 n
    ┌────────┬──────────┬─────────────────────┬────────┬─ 64-byte aligned ─┬─...
    │ pickle │ number n │ n x (offset, length │ pickle │ buffer 0          │
    │ bytes  │ of bufs  │      | PRIVATE)     │        │                   │
    │ | ARRAY│ | APART  │                     │        │                   │
    └────────┴──────────┴─────────────────────┴────────┴───────────────────┴─...

A numpy array by itself is marked ARRAY: its pickle holds dtype and shape only (``channels.values.arrays``). A buffer marked PRIVATE
must not be shared by two readers (``channels.values.tensors``). A message marked APART is not the whole value: tensors of it lie on
a device (``channels.values.device_codec``).
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

from crossfade.channels.values.fitting import refuse_too_large
from crossfade.host.memory import align

_HEAD = struct.Struct("<QQ")
_ENTRY = struct.Struct("<QQ")
_FLAG = 1 << 63
_ALIGNMENT_BYTES = 64

_SPLIT_BYTES = 16 << 20
"""From this size on a copy is split: waking the helper costs some 50 us, copying 16 MiB a millisecond or more."""


@dataclass(slots=True)
class Pickled:
    """A value as a pickle and the buffers that are not in it."""

    pickle: bytes
    buffers: Sequence[memoryview]  # contiguous byte views, in the order in which the pickle asks for them
    private: frozenset[int] = frozenset()  # which of them a reader must not share (positions)
    is_array: bool = False  # the pickle is the description of a numpy array, the buffer its memory
    is_apart: bool = False  # tensors of the value lie elsewhere


@dataclass(slots=True)
class Encoded:
    """A message that is ready to be copied to where it goes."""

    head: bytes  # everything before the first buffer
    buffers: tuple[tuple[int, memoryview], ...]  # (offset, bytes) of each buffer
    size_bytes: int

    def copy_into(self, target: memoryview | mmap.mmap, at: int = 0) -> None:
        target[at : at + len(self.head)] = self.head
        for offset, data in self.buffers:
            copy_bytes(target, at + offset, data, data.nbytes)

    def to_bytes(self) -> bytes:
        """The message in one piece. Raises a MemoryError if it is larger than the memory that is available."""
        refuse_too_large(self.size_bytes)
        whole = bytearray(self.size_bytes)
        self.copy_into(memoryview(whole))
        return bytes(whole)


Parts: TypeAlias = tuple[bool, bool, memoryview, list[tuple[memoryview, bool]]]
"""A message taken apart: ``is_array`` and ``is_apart`` of `Pickled`, where the pickle lies, (memory, whether it is private) of each
buffer."""


def encode(pickled: Pickled) -> Encoded:
    """Lays a message out."""
    offset = _HEAD.size + _ENTRY.size * len(pickled.buffers) + len(pickled.pickle)
    entries, placed = [], []
    for index, data in enumerate(pickled.buffers):
        offset = align(offset, _ALIGNMENT_BYTES)
        entries.append(_ENTRY.pack(offset, data.nbytes | (_FLAG if index in pickled.private else 0)))
        placed.append((offset, data))
        offset += data.nbytes
    start = _HEAD.pack(
        len(pickled.pickle) | (_FLAG if pickled.is_array else 0), len(placed) | (_FLAG if pickled.is_apart else 0)
    )
    return Encoded(b"".join((start, *entries, pickled.pickle)), tuple(placed), offset)


def split(message: memoryview) -> Parts:
    """Takes a message apart. Raises a ValueError if it is none."""
    if message.nbytes < _HEAD.size:
        raise ValueError(f"a message of {message.nbytes} bytes has no room for its head")
    pickle_bytes, num_buffers = _HEAD.unpack_from(message)
    is_array, pickle_bytes = pickle_bytes >= _FLAG, pickle_bytes & ~_FLAG
    is_apart, num_buffers = num_buffers >= _FLAG, num_buffers & ~_FLAG
    start, end = _HEAD.size + _ENTRY.size * num_buffers, message.nbytes
    if start + pickle_bytes > end:
        raise ValueError(
            f"a message of {end} bytes says that it has {num_buffers} buffers and a {pickle_bytes} byte pickle"
        )
    buffers = []
    for index in range(num_buffers):
        offset, length = _ENTRY.unpack_from(message, _HEAD.size + _ENTRY.size * index)
        is_private, length = length >= _FLAG, length & ~_FLAG
        if offset + length > end:
            raise ValueError(f"buffer {index} of a message ends at byte {offset + length} of {end}")
        buffers.append((message[offset : offset + length], is_private))
    return is_array, is_apart, message[start : start + pickle_bytes], buffers


def buffer_places(head: memoryview, size_bytes: int) -> list[tuple[int, int]]:
    """(offset, length) of each buffer of a message of ``size_bytes``, from its first part. Raises a ValueError if it is none."""
    num_buffers = _HEAD.unpack_from(head)[1] & ~_FLAG if head.nbytes >= _HEAD.size else 0
    if head.nbytes < _HEAD.size + _ENTRY.size * num_buffers:
        raise ValueError(f"the first {head.nbytes} bytes of a message say that it has {num_buffers} buffers")
    entries = (_ENTRY.unpack_from(head, _HEAD.size + _ENTRY.size * index) for index in range(num_buffers))
    places = [(offset, length & ~_FLAG) for offset, length in entries]
    for offset, length in places:
        if offset < head.nbytes or offset + length > size_bytes:
            raise ValueError(f"a buffer lies at bytes {offset} to {offset + length} of a message of {size_bytes}")
    return places


def copy_bytes(target: memoryview | mmap.mmap, at: int, source: Any, size_bytes: int) -> None:
    """Copies the bytes of ``source``, a buffer in one piece, to ``at`` in ``target``. Large ones are copied by two cores at once.

    A memoryview takes only what is bytes; a mapping takes what has any type.

    One core does not use all of a machine's memory bandwidth, and the party that waits for a large value leaves a core idle
    meanwhile. The second half is copied by a helper thread, which is started with the first large copy and sleeps in between.
    """
    numpy = None if size_bytes < _SPLIT_BYTES else sys.modules.get("numpy")  # its copies release the interpreter lock
    if numpy is None or not _has_cores():
        target[at : at + size_bytes] = source
        return
    into, data = numpy.frombuffer(target, numpy.uint8, size_bytes, at), numpy.frombuffer(source, numpy.uint8)
    half = size_bytes // 2 & ~4095
    try:
        second: Any = _helper(os.getpid()).submit(numpy.copyto, into[half:], data[half:])
    except RuntimeError:  # the interpreter is shutting down, or the system has no thread left
        numpy.copyto(into, data)
        return
    try:
        numpy.copyto(into[:half], data[:half])
    finally:
        second.result()  # nobody may touch the memory before


@cache
def _has_cores() -> bool:
    return len(os.sched_getaffinity(0)) > 1


@cache
def _helper(pid: int) -> ThreadPoolExecutor:
    """The helper of this process: a forked child has none of its parent's threads."""
    return ThreadPoolExecutor(1, thread_name_prefix="crossfade-copy")
