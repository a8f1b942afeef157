"""Device memory that other processes open: a pool of plain allocations.

The caching allocator's memory cannot be exported where it uses expandable segments, so what crosses processes lives here. The side
that opens memory does so in the context of its *own* device and copies from there: in the context of the owner's device a copy
shares the GPU in time slices with the owner's kernels, which is hundreds of times slower.

Freeing device memory may wait for all streams of the device, so blocks are kept for the next user of the same size until
`Pool.trim`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from crossfade.device.driver import DeviceMemory
from crossfade.errors import DeviceError
from crossfade.host.memory import align

BLOCK_BYTES = 2 << 20
"""An exported handle always covers whole pages of this size, so blocks are multiples of it: nothing else is exposed with them."""


class Block:
    """A piece of a pool."""

    def __init__(self, pool: Pool, address: int, size_bytes: int) -> None:
        self.address = address
        self.size_bytes = size_bytes  # a multiple of `BLOCK_BYTES`
        self.label = self.user = ""  # for errors
        self._pool = pool
        self._handle: bytes | None = None

    @property
    def handle(self) -> bytes:
        """What another process opens it by."""
        if self._handle is None:
            self._handle = self._pool.driver.export(self.address)
        return self._handle

    def release(self) -> None:
        """Returns it to the pool. All operations of its user must have finished."""
        self._pool._take_back(self)


class Pool:
    """Exportable memory of one device.

    Where there is no memory although nothing here is idle, it calls ``reclaim``: others in this process may keep some for later. It
    may wait for all streams of the device.
    """

    def __init__(self, driver: DeviceMemory, reclaim: Callable[[], None] | None = None) -> None:
        self.driver = driver
        self._reclaim = reclaim
        self._idle: dict[int, list[Block]] = {}  # by size
        self._used: set[Block] = set()
        self._lock = threading.RLock()  # groups of collectives take and give back in threads of their own

    @property
    def used_bytes(self) -> int:
        """Memory of the blocks in use."""
        return sum(block.size_bytes for block in self._used)

    @property
    def idle_bytes(self) -> int:
        """Memory that waits for its next user."""
        return sum(size_bytes * len(blocks) for size_bytes, blocks in self._idle.items())

    def take(self, size_bytes: int, label: str, user: str, *, gives_back: bool = True) -> Block:
        """A block of at least ``size_bytes``. Raises a `DeviceError` if there is no memory for it.

        Before that, memory that nobody uses is given back, here and then by `reclaim`; not so for a block that is only a wish
        (``gives_back`` is False). That may wait for all streams of the device, which may wait for others; but whatever these wait
        for is enqueued (PL-5), and needs no host of this or of another process, so it comes to an end.
        """
        size_bytes = align(max(size_bytes, 1), BLOCK_BYTES)
        with self._lock:
            idle = self._idle.get(size_bytes)
            block = idle.pop() if idle else Block(self, self._allocate(size_bytes, label, gives_back), size_bytes)
            block.label, block.user = label, user
            self._used.add(block)
        return block

    def _allocate(self, size_bytes: int, label: str, gives_back: bool) -> int:
        for give_back in (self.trim, self._reclaim) if gives_back else ():
            try:
                return self.driver.allocate(size_bytes, label)
            except DeviceError:
                if give_back is None:
                    raise
                give_back()
        return self.driver.allocate(size_bytes, label)

    def _take_back(self, block: Block) -> None:
        with self._lock:
            self._used.remove(block)
            self._idle.setdefault(block.size_bytes, []).append(block)

    def trim(self) -> int:
        """Gives unused blocks back to the device, which may wait for all of its streams. Returns how many bytes."""
        with self._lock:
            idle, self._idle = self._idle, {}
        blocks = [block for each in idle.values() for block in each]
        for block in blocks:
            self.driver.free(block.address)
        return sum(block.size_bytes for block in blocks)

    def close(self) -> None:
        """Gives everything back. Raises a `DeviceError` that names the users if a block is still in use."""
        self.trim()
        if self._used:
            users = "; ".join(f"{block.label}: {block.user}" for block in self._used)
            raise DeviceError(f"exported memory is still in use: {users}", hint="drop the tensors that lie in it")


class OpenedMemory:
    """Another process's block, opened in the context of this process's device."""

    def __init__(self, driver: DeviceMemory, handle: bytes, size_bytes: int, label: str) -> None:
        self._driver = driver
        self.size_bytes = size_bytes
        self.address = driver.open_handle(handle, label)
        self._is_closed = False

    def close(self) -> None:
        """This process's operations on it must have finished. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._driver.close_handle(self.address)
