"""numpy arrays by themselves, which is what most values are: laid out and read without pickling each one.

Everything in front of an array's memory follows from its dtype and shape, so it is made once for each and remembered; a reader
remembers in the same way what it means. Imported only where numpy already is.
"""

from __future__ import annotations

import math
import pickle
from functools import lru_cache
from typing import Any, Final

import numpy as np

from crossfade.channels.values.layout import Encoded, Pickled, encode

_MANY = 1024
_new_array: Final[Any] = np.ndarray


def describe_array(array: Any) -> bytes | None:
    """What `make_array` makes a plain contiguous array of, beside its memory; None for one that pickle has to take care of."""
    is_plain = array.flags.c_contiguous and array.dtype.metadata is None
    return _description(array.dtype, array.shape) if is_plain else None


def encode_array(array: Any) -> Encoded | None:
    """The message of a plain contiguous array; None for one that pickle has to take care of."""
    if (description := describe_array(array)) is None:
        return None
    head, offset = _head(description, array.nbytes)
    return Encoded(head, ((offset, _memory_of(array)),), offset + array.nbytes)


def _memory_of(array: Any) -> memoryview:
    """The bytes of a contiguous array. Dates have no buffer format, and empty arrays cannot be cast."""
    if not array.size:
        return memoryview(b"")
    return memoryview(array.reshape(-1).view(np.uint8)) if array.dtype.kind in "mM" else array.data.cast("B")


@lru_cache(_MANY)
def _description(dtype: Any, shape: tuple[int, ...]) -> bytes | None:
    if dtype.hasobject or dtype.names is not None or dtype.kind == "V":
        return None
    return pickle.dumps((dtype.str, shape), 5)


@lru_cache(_MANY)
def _head(description: bytes, num_bytes: int) -> tuple[bytes, int]:
    """(what stands before the array's memory in a message, where that starts)."""
    memory: Any = np.empty(num_bytes, np.uint8)  # never touched, so it takes none
    message = encode(Pickled(description, [memoryview(memory)], is_array=True))
    return message.head, message.buffers[0][0]


@lru_cache(_MANY)
def understand(description: bytes) -> tuple[Any, tuple[int, ...], int]:
    """(dtype, shape, number of bytes) from an array's description."""
    dtype, shape = pickle.loads(description)
    kind = np.dtype(dtype)
    if kind.hasobject:  # its memory would be taken for pointers
        raise ValueError(f"an array's message says that its type is {dtype!r}")
    return kind, shape, math.prod(shape) * kind.itemsize


def make_array(understood: tuple[Any, tuple[int, ...], int], data: Any, size_bytes: int) -> Any:
    """The array that `understand` has understood, of ``size_bytes`` at the start of ``data``; read-only if that is.

    Raises:
        ValueError: it has another size.
    """
    dtype, shape, num_bytes = understood
    if num_bytes != size_bytes:
        raise ValueError(f"{size_bytes} bytes came for an array {shape} of {dtype}, which has {num_bytes}")
    return _new_array(shape, dtype, data)
