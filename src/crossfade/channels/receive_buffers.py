"""Memory to receive large values into, used again once the value that lay there has died.

The C library gives allocations of more than 32 MiB back to the system when they are freed, so each such value would be received
into pages that the system has to make and clear first, which takes longer than the transfer. Imported only with torch.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any, NamedTuple

import torch

from crossfade.interrupted import brief

_REUSED_BYTES = 16 << 20


class _Buffer(NamedTuple):
    """Memory, and the ctypes type of all of it (making a type for each value would cost more than the rest)."""

    memory: Any
    array_type: Any


class ReceiveBuffers:
    """The buffers of one receiving thread. Any thread may drop the last view of a value, and so give its buffer back."""

    def __init__(self) -> None:
        self.num_slots = 0  # how many values may be held at once, which is how many free buffers are kept
        self._free: list[_Buffer] = []  # appended to by any thread
        self._lent: dict[int, weakref.ref[Any]] = {}  # by address: the exporter that all views of the value hang on

    def take(self, size_bytes: int) -> memoryview:
        """Writable memory, which is used again when the last view of it has died."""
        if size_bytes < _REUSED_BYTES:
            array: Any = torch.empty(size_bytes, dtype=torch.uint8, device="cpu").numpy()
            return memoryview(array)
        buffer = self._fitting(size_bytes) or _new_buffer(size_bytes)
        # numpy refers to the array behind a memoryview, and of an array that is a view to what is behind that. So the exporter
        # whose death is waited for must be no numpy array: a ctypes array is kept by every view of it.
        exporter = buffer.array_type.from_buffer(buffer.memory)
        address = ctypes.addressof(exporter)

        @brief
        def give_back(_: object) -> None:
            del self._lent[address]
            self._free.append(buffer)

        self._lent[address] = weakref.ref(exporter, give_back)
        return memoryview(exporter)[:size_bytes]

    def _fitting(self, size_bytes: int) -> _Buffer | None:
        """The free buffer that was used last, if it fits without much waste; those beyond ``num_slots`` are dropped."""
        del self._free[: max(0, len(self._free) - self.num_slots)]
        for index in reversed(range(len(self._free))):
            if size_bytes <= self._free[index].memory.nbytes <= 2 * size_bytes:
                return self._free.pop(index)
        if self._free and len(self._free) + len(self._lent) >= self.num_slots:
            self._free.pop(0)  # as many as can be needed exist, and none fits: the oldest makes room
        return None


def _new_buffer(size_bytes: int) -> _Buffer:
    # An eighth more, so that values which grow a little fit into the old memory.
    capacity_bytes = size_bytes + size_bytes // 8
    return _Buffer(
        torch.empty(capacity_bytes, dtype=torch.uint8, device="cpu").numpy(), ctypes.c_uint8 * capacity_bytes
    )
