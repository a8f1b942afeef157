"""Raises a MemoryError with figures for values too large for the free memory, before the system kills a process over them."""

from __future__ import annotations

import sys
from itertools import islice
from typing import Any

from crossfade.host.memory import available_bytes

_LARGE_BYTES = 64 << 20
"""Smaller values are not checked: reading how much memory is available takes longer than copying them."""

_MOST_LOOKED_AT = 256  # how many objects inside one value are looked at

_HINT = "send it in parts, or make it on the actor that uses it"


class Fitting:
    """A context manager for pickling a value. Raises a MemoryError if its numpy arrays are larger than the memory that is
    available, or pickling ran out of memory.
    """

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __enter__(self) -> None:
        refuse_too_large(_bytes_in(self._value))

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, MemoryError):
            raise too_large(self._value) from error


def refuse_too_large(size_bytes: int) -> None:
    """Raises a MemoryError if this many bytes are more than the available memory. Sizes below 64 MiB are not checked."""
    if size_bytes >= _LARGE_BYTES and size_bytes > (free_bytes := available_bytes()):
        raise _error(size_bytes, free_bytes)


def too_large(value: object) -> MemoryError:
    """Makes the error for a value whose pickle did not fit into memory."""
    return _error(_bytes_in(value), available_bytes())


def _error(size_bytes: int, free_bytes: int) -> MemoryError:
    value = f"a value with {size_bytes} bytes of arrays" if size_bytes else "the pickle of a value"
    return MemoryError(f"there is no memory for {value}: {free_bytes} bytes are available\nhint: {_HINT}")


def _bytes_in(value: object) -> int:
    """Returns the bytes of the numpy arrays in a value, without calling the value's own code. (An array that repeats one number
    takes little memory itself, but its pickle does not.)
    """
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return 0
    arrays: dict[int, int] = {}  # by id: a pickle contains each array once
    num_left, todo = _MOST_LOOKED_AT, [value]
    while todo and num_left > 0:
        num_left -= 1
        each: Any = todo.pop()
        kind = type(each)
        if kind is numpy.ndarray or kind is numpy.memmap:
            arrays[id(each)] = each.nbytes
        elif kind is tuple or kind is list:
            todo.extend(islice(each, num_left))
        elif kind is dict:
            todo.extend(islice(each.values(), num_left))
    return sum(arrays.values())
