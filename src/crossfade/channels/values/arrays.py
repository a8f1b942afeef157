"""numpy arrays by themselves, which is what most values are: laid out and read without pickling each one.

Everything in front of an array's memory follows from its dtype and shape, so it is made once for each and remembered; a reader
remembers in the same way what it means. Imported only where numpy already is.
"""

from __future__ import annotations

import math
import pickle
from functools import lru_cache
from typing import Any

import numpy as np

from crossfade.channels.values.layout import Encoded, Pickled, encode

__all__ = ["encode_array", "rebuild_array"]

_MANY = 1024


def encode_array(array: Any) -> Encoded | None:
    """The message of a plain contiguous array; None for one that pickle has to take care of."""
    dtype = array.dtype
    if dtype.hasobject or dtype.names is not None or dtype.kind == "V" or not array.flags.c_contiguous:
        return None
    head, offset, size_bytes = _describe(dtype, array.shape)
    return Encoded(head, ((offset, _memory_of(array)),), size_bytes)


def _memory_of(array: Any) -> memoryview:
    """The bytes of a contiguous array. Dates have no buffer format, and empty arrays cannot be cast."""
    if not array.size:
        return memoryview(b"")
    return memoryview(array.reshape(-1).view(np.uint8)) if array.dtype.kind in "mM" else array.data.cast("B")


@lru_cache(_MANY)
def _describe(dtype: Any, shape: tuple[int, ...]) -> tuple[bytes, int, int]:
    """(what stands before the array's memory, where that starts, length of the message)."""
    memory: Any = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)  # never touched, so it takes none
    message = encode(Pickled(pickle.dumps((dtype.str, shape), 5), [memoryview(memory)], is_array=True))
    return message.head, message.buffers[0][0], message.size_bytes


@lru_cache(_MANY)
def _understand(description: bytes) -> tuple[Any, tuple[int, ...]]:
    """(dtype, shape) from the pickle in an array's message."""
    dtype, shape = pickle.loads(description)
    kind = np.dtype(dtype)
    if kind.hasobject:  # its memory would be taken for pointers
        raise ValueError(f"an array's message says that its type is {dtype!r}")
    return kind, shape


def rebuild_array(description: bytes, data: Any) -> Any:
    """The array on the memory of ``data``; read-only if that is."""
    dtype, shape = _understand(description)
    return np.ndarray(shape, dtype, data)
