"""Values to bytes and back: pickle protocol 5 with out-of-band buffers.

A message is laid out like this (all offsets from its first byte, numbers are little-endian u64)::

    0        8          16                    16 + 16 n
    ┌────────┬──────────┬─────────────────────┬────────┬─ 64-byte aligned ─┬─...
    │ pickle │ number n │ n x (offset, length │ pickle │ buffer 0          │
    │ bytes  │ of bufs  │      | PRIVATE)     │        │                   │
    │ | ARRAY│          │                     │        │                   │
    └────────┴──────────┴─────────────────────┴────────┴───────────────────┴─...

A numpy array by itself is marked ARRAY: its pickle holds dtype and shape only (``channels.arrays``).

numpy arrays read back as read-only views on the message. torch CPU tensors cannot be made read-only, so their buffers are
marked PRIVATE: a reader that shares the message with others copies them.
"""

from __future__ import annotations

import pickle
import struct
import sys
from collections.abc import Callable, Sequence
from functools import cache
from io import BytesIO
from typing import Any, NamedTuple

from crossfade.errors import Failure
from crossfade.host.memory import align

__all__ = ["PLAIN_TYPES", "Encoded", "Pickled", "buffer_places", "decode", "dump", "encode", "undecodable"]

_HEAD = struct.Struct("<QQ")
_ENTRY = struct.Struct("<QQ")
_PRIVATE = 1 << 63
_ARRAY = 1 << 63
_ALIGNMENT_BYTES = 64
PLAIN_TYPES = frozenset({bytes, bytearray, str, int, float, bool, complex, type(None)})

"""Types whose values hold nothing that needs a look before pickling."""

_by_cloudpickle: set[type] = set()


class Pickled(NamedTuple):
    """A value as a pickle and the buffers that are not in it.

    Attributes:
        pickle: the pickle.
        buffers: contiguous byte views, in the order in which the pickle asks for them.
        private: which of them a reader must not share (positions).
        is_array: the pickle is the description of a numpy array, the buffer its memory.
    """

    pickle: bytes
    buffers: Sequence[memoryview]
    private: frozenset[int] = frozenset()
    is_array: bool = False


class Encoded(NamedTuple):
    """A message that is ready to be copied to where it goes.

    Attributes:
        head: everything before the first buffer.
        buffers: (offset, bytes) of each buffer.
        size_bytes: length of the whole message.
    """

    head: bytes
    buffers: tuple[tuple[int, memoryview], ...]
    size_bytes: int

    def copy_into(self, target: memoryview) -> None:
        """Writes the message to the start of ``target``."""
        target[: len(self.head)] = self.head
        for offset, data in self.buffers:
            target[offset : offset + data.nbytes] = data


def dump(value: object) -> Pickled:
    """Pickles a value: by the C pickler where that is right, else by cloudpickle (lambdas, local classes, ``__main__``).

    Raises:
        Exception: what pickling raised.
    """
    kind = type(value)
    if kind in PLAIN_TYPES:
        return Pickled(pickle.dumps(value, 5), ())
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and (described := _arrays().describe_array(value)) is not None:
        return Pickled(described[0], described[1:], is_array=True)
    if kind in _by_cloudpickle:
        return _dump_by_cloudpickle(value)
    try:
        pickled = _dump_with_tensors(value) if "torch" in sys.modules else _dump_plain(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        pickled = _dump_by_cloudpickle(value)
        _remember(kind)
        return pickled
    if b"__main__" in pickled.pickle:  # a class or function that only this process's main module has
        return _dump_by_cloudpickle(value)
    return pickled


@cache
def _arrays() -> Any:
    """The module that knows numpy; imported with the first array."""
    from crossfade.channels import arrays

    return arrays


def _remember(kind: type) -> None:
    """The next value of this type goes to cloudpickle at once. Containers are judged by what is in them each time."""
    if kind.__module__ != "builtins":
        _by_cloudpickle.add(kind)


def _dump_plain(value: object) -> Pickled:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, 5, buffer_callback=buffers.append)
    return Pickled(data, [buffer.raw() for buffer in buffers]) if buffers else Pickled(data, ())


def _dump_with_tensors(value: object) -> Pickled:
    from crossfade.channels.tensors import TensorPickler

    file = BytesIO()
    pickler = TensorPickler(file)
    pickler.dump(value)
    return Pickled(file.getvalue(), [buffer.raw() for buffer in pickler.buffers], frozenset(pickler.private))


def _dump_by_cloudpickle(value: object) -> Pickled:
    import cloudpickle

    buffers: list[pickle.PickleBuffer] = []
    data = cloudpickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return Pickled(data, [buffer.raw() for buffer in buffers])


def encode(pickled: Pickled) -> Encoded:
    """Lays a message out."""
    offset = _HEAD.size + _ENTRY.size * len(pickled.buffers) + len(pickled.pickle)
    entries, placed = [], []
    for index, data in enumerate(pickled.buffers):
        offset = align(offset, _ALIGNMENT_BYTES)
        entries.append(_ENTRY.pack(offset, data.nbytes | (_PRIVATE if index in pickled.private else 0)))
        placed.append((offset, data))
        offset += data.nbytes
    pickle_bytes = len(pickled.pickle) | (_ARRAY if pickled.is_array else 0)
    head = b"".join((_HEAD.pack(pickle_bytes, len(placed)), *entries, pickled.pickle))
    return Encoded(head, tuple(placed), offset)


def decode(
    message: memoryview, *, private: Callable[[memoryview], object] = bytearray, shared: Callable[[memoryview], object]
) -> Any:
    """The value of a message.

    Args:
        message: the whole message, writable.
        private: what to make of a buffer that only this reader may see (a writable view, or a copy).
        shared: what to make of every other buffer (a read-only view, or a copy).

    Raises:
        Exception: what unpickling raised, or ValueError when the message is not one.
    """
    pickle_bytes, num_buffers = _HEAD.unpack_from(message)
    is_array, pickle_bytes = pickle_bytes & _ARRAY, pickle_bytes & ~_ARRAY
    start = _HEAD.size + _ENTRY.size * num_buffers
    end = message.nbytes
    if start + pickle_bytes > end:
        raise ValueError(
            f"a message of {end} bytes says that it has {num_buffers} buffers and a {pickle_bytes} byte pickle"
        )
    buffers = []
    for index in range(num_buffers):
        offset, length = _ENTRY.unpack_from(message, _HEAD.size + _ENTRY.size * index)
        make = private if length & _PRIVATE else shared
        length &= ~_PRIVATE
        if offset + length > end:
            raise ValueError(f"buffer {index} of a message ends at byte {offset + length} of {end}")
        buffers.append(make(message[offset : offset + length]))
    if is_array and num_buffers == 1:
        return _arrays().rebuild_array(message[start : start + pickle_bytes], buffers[0])
    return pickle.loads(message[start : start + pickle_bytes], buffers=buffers)


def buffer_places(head: memoryview) -> list[tuple[int, int]]:
    """(offset, length) of each buffer of a message, from its first part."""
    _, num_buffers = _HEAD.unpack_from(head)
    entries = (_ENTRY.unpack_from(head, _HEAD.size + _ENTRY.size * index) for index in range(num_buffers))
    return [(offset, length & ~_PRIVATE) for offset, length in entries]


def undecodable(error: BaseException, channel: str) -> Failure:
    """What a reader gets in the place of a value that it cannot unpickle."""
    return Failure.capture(error, actor="the reader", node=f"unpickling the value of {channel}")
