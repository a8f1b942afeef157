"""Memory to receive large values into, used again once the value that lay there has died.

The C library gives allocations of more than 32 MiB back to the system when they are freed, so each such value would be received
into pages that the system has to make and clear first, which takes longer than the transfer. Imported only with torch.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["ReceiveBuffers"]

_REUSED_BYTES = 16 << 20


class ReceiveBuffers:
    """The buffers of one receiving thread. Any thread may drop the last view of a value, and so give its buffer back.

    Attributes:
        num_slots: how many values may be held at once, which is how many free buffers are kept.
    """

    def __init__(self) -> None:
        self.num_slots = 0
        self._free: list[Any] = []  # numpy arrays of bytes; appended to by any thread
        self._lent: dict[int, weakref.ref[Any]] = {}  # by address: the array that all views of the value hang on

    def take(self, size_bytes: int) -> Any:
        """A numpy array of bytes; its memory is used again when the last view of it has died."""
        if size_bytes < _REUSED_BYTES:
            return torch.empty(size_bytes, dtype=torch.uint8).numpy()
        whole = self._fitting(size_bytes)
        if whole is None:
            # An eighth more, so that values which grow a little fit into the old memory.
            whole = torch.empty(size_bytes + size_bytes // 8, dtype=torch.uint8).numpy()
        part = whole[:size_bytes]
        address = whole.ctypes.data

        # numpy arrays are not looked into by the garbage collector, so this is called when nothing can see the memory any more.
        def give_back(_: object) -> None:
            del self._lent[address]
            self._free.append(whole)

        self._lent[address] = weakref.ref(part, give_back)
        return part

    def _fitting(self, size_bytes: int) -> Any:
        """The free buffer that was used last, if it fits without much waste; those beyond ``num_slots`` are dropped."""
        del self._free[: max(0, len(self._free) - self.num_slots)]
        for index in reversed(range(len(self._free))):
            if size_bytes <= self._free[index].nbytes <= 2 * size_bytes:
                return self._free.pop(index)
        if self._free and len(self._free) + len(self._lent) >= self.num_slots:
            self._free.pop(0)  # as many as can be needed exist, and none fits: the oldest makes room
        return None
