"""Memory of the host that stands for a device's: one process makes it, others open it by a handle.

A handle names a process and a descriptor in it, which the kernel opens under /proc for processes of the same user. By the time that
a handle arrives both numbers may mean something else: another process, another file. So a handle holds a key as well, random bytes
that lie in a page behind the memory. What a handle names is mapped only if it is memory that cannot shrink (what is mapped then
never faults), is long enough, and has the key.

Nothing has a name outside of the processes, so nothing stays when they are killed. What was opened stays good when its maker dies.
"""

from __future__ import annotations

import mmap
import os
import secrets
import struct

from crossfade.errors import DeviceError
from crossfade.host.memory import PAGE_BYTES, Heap, Memory, address_of, align

__all__ = ["HostMemory"]

_HANDLE = struct.Struct("<IIQ16s")
_KEY_BYTES = 16
_HINT = "both processes must run as one user and see each other's process ids, and the memory must not be freed yet"


class HostMemory:
    """Memory as one process has it: made by `create`, or opened by `open`. It begins on a page boundary and takes whole pages."""

    def __init__(self, memory: Memory, size_bytes: int, key: bytes) -> None:
        self.size_bytes = size_bytes
        self._memory = memory
        self._key = key
        self._mapping: mmap.mmap | None = memory.map(size_bytes)
        self.address = address_of(self._mapping)

    @classmethod
    def create(cls, size_bytes: int) -> HostMemory:
        """New zeroed memory; all of its pages are taken now. Raises a `DeviceError` if there is no such amount of memory."""
        size_bytes = align(max(size_bytes, 1), PAGE_BYTES)
        memory, key = Memory.create("device", 0), secrets.token_bytes(_KEY_BYTES)
        try:
            Heap(memory).allocate(size_bytes + PAGE_BYTES)
            os.pwrite(memory.fd, key, size_bytes)
            return cls(memory, size_bytes, key)
        except OSError as error:
            memory.close()
            raise DeviceError(f"allocating {size_bytes} bytes of shared memory failed: {error.strerror}") from None

    @classmethod
    def open(cls, handle: bytes, label: str) -> HostMemory:
        """Another process's memory, or this one's once more. Raises a `DeviceError` if the handle does not, or no longer, lead to
        the memory that it was made for.
        """
        if len(handle) != _HANDLE.size:
            raise DeviceError(f"{len(handle)} bytes are no handle of shared memory: opening {label}")
        pid, fd, size_bytes, key = _HANDLE.unpack(handle)
        try:
            memory = Memory.open_in(pid, fd, size_bytes + PAGE_BYTES, key, size_bytes)
            try:
                return cls(memory, size_bytes, key)
            finally:
                memory.close()  # a mapping needs no descriptor
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise DeviceError(
                f"the memory of {label} in process {pid} cannot be opened: {reason}", hint=_HINT
            ) from None

    @property
    def handle(self) -> bytes:
        """Another process opens it by this, until `close`. Raises a `DeviceError` if it was opened, or closed, here."""
        if self._memory.fd < 0:
            raise DeviceError("memory is exported by the process that made it, as long as it has it")
        return _HANDLE.pack(os.getpid(), self._memory.fd, self.size_bytes, self._key)

    @property
    def is_own(self) -> bool:
        """Whether it was made here, and not opened."""
        return self._memory.fd >= 0

    @property
    def identity(self) -> int:
        """A number that no other memory has."""
        return int.from_bytes(self._key, "little")

    def close(self) -> None:
        """Releases it; nothing of it may be used any more. Idempotent."""
        self._mapping = None
        self._memory.close()
