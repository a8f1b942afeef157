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
from collections.abc import Callable
from typing import TypeAlias

from crossfade.device.driver import Allocation, Driver, HostRange, OwnerGone
from crossfade.device.ledger import Ledger
from crossfade.errors import DeviceError
from crossfade.host.memory import PAGE_BYTES, Heap, Memory, address_of, align
from crossfade.host.processes import is_ending

_HANDLE = struct.Struct("<IIQ16s")
_KEY_BYTES = 16
Pin: TypeAlias = Callable[[Memory, int], HostRange]
"""Pins the first bytes of a memory for a device."""
_HINT = "both processes must run as one user and see each other's process ids, and the memory must not be freed yet"


class HostMemory:
    """Memory as one process has it: made by `create`, or opened by `open`. It begins on a page boundary and takes whole pages."""

    def __init__(self, memory: Memory, size_bytes: int, key: bytes, pin: Pin | None = None) -> None:
        self.size_bytes = size_bytes
        self._memory = memory
        self._key = key
        self._pinned: HostRange | None = None
        self._mapping: mmap.mmap | None = None
        if pin is None:
            self._mapping = memory.map(size_bytes)
            self.address = address_of(self._mapping)
        else:
            self._pinned = pin(memory, size_bytes)
            self.address = self._pinned.address

    @classmethod
    def create(cls, size_bytes: int, pin: Pin | None = None) -> HostMemory:
        """New zeroed memory; all of its pages are taken now. Raises a `DeviceError` if there is no such amount of memory.

        With ``pin`` it is pinned for a device, and its address is the device's.
        """
        size_bytes = align(max(size_bytes, 1), PAGE_BYTES)
        memory, key = Memory.create("device", 0), secrets.token_bytes(_KEY_BYTES)
        try:
            Heap(memory).allocate(size_bytes + PAGE_BYTES)
            os.pwrite(memory.fd, key, size_bytes)
            return cls(memory, size_bytes, key, pin)
        except DeviceError:
            memory.close()
            raise
        except OSError as error:
            memory.close()
            raise DeviceError(f"allocating {size_bytes} bytes of shared memory failed: {error.strerror}") from None

    @classmethod
    def open(cls, handle: bytes, label: str, pin: Pin | None = None) -> HostMemory:
        """Another process's memory, or this one's once more. Raises a `DeviceError` if the handle does not, or no longer, lead to
        the memory that it was made for: an `OwnerGone` where the process that made it is ending.
        """
        if len(handle) != _HANDLE.size:
            raise DeviceError(f"{len(handle)} bytes are no handle of shared memory: opening {label}")
        pid, fd, size_bytes, key = _HANDLE.unpack(handle)
        try:
            memory = Memory.open_in(pid, fd, size_bytes + PAGE_BYTES, key, size_bytes)
            try:
                return cls(memory, size_bytes, key, pin)
            finally:
                memory.close()  # a mapping needs no descriptor
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            is_known = os.path.exists(f"/proc/{pid}")  # who watches its end will tell of it
            kind = OwnerGone if is_known and is_ending(pid) else DeviceError
            raise kind(f"the memory of {label} in process {pid} cannot be opened: {reason}", hint=_HINT) from None

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
        if self._pinned is not None:
            self._pinned.close()
        self._memory.close()


class HostMemories:
    """The host's memory as that of a device (see `crossfade.device.driver.DeviceMemory`).

    With ``driver`` it is pinned for that driver's GPU, which two GPUs that cannot reach each other have in common.
    """

    def __init__(self, device: int, ledger: Ledger, driver: Driver | None = None) -> None:
        self.device = device
        self.ledger = ledger
        self._pinned_for = driver
        self._memories: dict[int, HostMemory] = {}

    def _pin(self, label: str) -> Pin | None:
        driver = self._pinned_for
        return None if driver is None else lambda memory, size_bytes: driver.map_host(memory, 0, size_bytes, label)

    def _hold(self, kind: str, memory: HostMemory, label: str) -> int:
        self._memories[memory.address] = memory
        self.ledger.take_at(kind, memory.address, label)
        return memory.address

    def _let_go(self, kind: str, address: int) -> None:
        self.ledger.drop_at(kind, address)
        self._memories.pop(address).close()

    def allocate(self, size_bytes: int, label: str) -> int:
        """Raises a `DeviceError` if there is no such amount of memory."""
        label = f"{label}, {size_bytes} bytes"
        return self._hold("memory", HostMemory.create(size_bytes, self._pin(label)), label)

    def free(self, address: int) -> None:
        self._let_go("memory", address)

    def export(self, address: int) -> bytes:
        return self._memories[address].handle

    def open_handle(self, handle: bytes, label: str) -> int:
        """Raises a `DeviceError` if the handle does not, or no longer, lead to the memory that it was made for."""
        return self._hold("opened", HostMemory.open(handle, label, self._pin(label)), label)

    def close_handle(self, address: int) -> None:
        self._let_go("opened", address)

    def allocation_of(self, address: int) -> Allocation | None:
        for begin, memory in list(self._memories.items()):
            if begin <= address < begin + memory.size_bytes and memory.is_own:
                return Allocation(begin, memory.size_bytes, memory.identity)
        return None

    def identity_of(self, address: int) -> int:
        found = self.allocation_of(address)
        return found.identity if found is not None else 0
