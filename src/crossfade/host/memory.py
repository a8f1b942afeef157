"""Anonymous shared memory (``memfd_create``): no name, so nothing to leave behind, and no limit of /dev/shm.

A memory is known by its descriptor, which travels over a UNIX socket. Each process maps the parts that it needs.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

PAGE_BYTES = mmap.PAGESIZE

_LARGE_BYTES = 64 << 20
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000  # as on all machines that Linux runs on but a few old ones
_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2


def align(size_bytes: int, boundary_bytes: int) -> int:
    """``size_bytes`` rounded up to a multiple of ``boundary_bytes``."""
    return -(-size_bytes // boundary_bytes) * boundary_bytes


def address_of(mapping: mmap.mmap, offset: int = 0) -> int:
    """The address at which byte ``offset`` of a writable mapping lies in this process."""
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping, offset))


@cache
def libc() -> ctypes.CDLL:
    """The C library, for what the interpreter does not offer."""
    found = ctypes.CDLL(None, use_errno=True)
    found.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    found.mmap.argtypes = (
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    )
    found.mmap.restype = ctypes.c_void_p
    found.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
    found.timerfd_settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    return found


def libc_error() -> OSError:
    """What the last call of `libc` failed of."""
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))


def available_bytes() -> int:
    """Memory that the system can give without swapping, by its own estimate."""
    with suppress(OSError), open("/proc/meminfo") as file:  # possibly no descriptor is left
        for line in file:
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return int(rest.split()[0]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * PAGE_BYTES


@contextmanager
def _size_limit_named() -> Iterator[None]:
    """A context manager that adds words to an EFBIG: to the system, shared memory is a file, which users may not expect."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        limit_bytes = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
        words = f"shared memory counts as a file, and files may have {limit_bytes} bytes here (ulimit -f)"
        raise OSError(errno.EFBIG, f"{error.strerror}: {words}") from None


_MOST_NAME_BYTES = 249  # of a memory: the system takes no more


class Memory:
    """A shared memory, as one process holds it. It owns the descriptor."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls, label: str, size_bytes: int) -> Memory:
        """New zeroed memory. Pages are taken at their first touch; ``label`` shows in /proc for people.

        It can grow and not shrink: no process that holds it can make what another one has mapped a fault.
        """
        memory = cls(
            os.memfd_create(
                f"crossfade-{label}".encode()[:_MOST_NAME_BYTES].decode(errors="ignore"),
                os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING,
            )
        )
        try:
            if size_bytes:
                with _size_limit_named():
                    os.ftruncate(memory.fd, align(size_bytes, PAGE_BYTES))
            fcntl.fcntl(memory.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        except BaseException:
            memory.close()
            raise
        return memory

    @classmethod
    def open_in(cls, pid: int, fd: int, size_bytes: int, key: bytes, key_offset: int) -> Memory:
        """Another process's memory, by its descriptor there, which the kernel opens for processes of the same user.

        By now the numbers may mean another process or file, so a random key lies in the memory.

        Raises:
            OSError, ValueError: it cannot be opened; or it is not memory that cannot shrink, long enough, with the key in it.
        """
        path = f"/proc/{pid}/fd/{fd}"
        if not os.readlink(path).startswith("/memfd:"):  # to open anything else could have effects of its own
            raise ValueError("its descriptor is something else by now")
        memory = cls(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
        try:
            if not fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                raise ValueError("it could shrink")
            if memory.size_bytes < size_bytes or os.pread(memory.fd, len(key), key_offset) != key:
                raise ValueError("its descriptor is other memory by now")
        except BaseException:
            memory.close()
            raise
        return memory

    @property
    def size_bytes(self) -> int:
        """Its present size."""
        return os.fstat(self.fd).st_size

    def map(self, size_bytes: int, offset: int = 0, *, populate: bool = False) -> mmap.mmap:
        """Maps a part, shared and writable. It stays mapped until nobody holds the mapping or a view on it.

        The interpreter's mapping of a file holds a descriptor as long as it lives; one that has none does not. So the addresses are
        taken by one of those, which gives them back when it dies, and the memory is then mapped over them.

        ``offset`` is a multiple of the page size. ``populate`` touches every page now (the first touch of 64 MB costs tens of
        milliseconds).
        """
        place = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
        flags = mmap.MAP_SHARED | _MAP_FIXED | (mmap.MAP_POPULATE if populate else 0)
        address = address_of(place)
        access = mmap.PROT_READ | mmap.PROT_WRITE
        if libc().mmap(address, size_bytes, access, flags, self.fd, offset) != address:
            raise libc_error()
        return place

    def close(self) -> None:
        """Gives the descriptor back; mappings stay."""
        fd, self.fd = self.fd, -1  # before it is closed: another thread may want the same
        if fd >= 0:
            os.close(fd)


class Heap:
    """Memory that one process hands out in page-aligned pieces and that others map by offset.

    It grows at its end; a piece that is given back returns its pages to the system at once, its addresses are not used again.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._end = memory.size_bytes
        self._lock = threading.RLock()  # what comes over wires is taken in by several threads

    def allocate(self, size_bytes: int) -> tuple[int, int]:
        """A new piece, all of its pages taken now: (offset, size in bytes).

        Raises an OSError if there is not so much memory (here, and not as a fault in the middle of a copy).
        """
        size_bytes = align(size_bytes, PAGE_BYTES)
        if size_bytes >= _LARGE_BYTES and size_bytes > (free_bytes := available_bytes()):
            # The system would go on taking pages until it kills a process.
            raise OSError(
                errno.ENOMEM, f"{size_bytes} bytes of shared memory are asked for and {free_bytes} are available"
            )
        with self._lock, _size_limit_named():
            offset = self._end
            os.posix_fallocate(self.memory.fd, offset, size_bytes)
            self._end += size_bytes
        return offset, size_bytes

    def discard(self, offset: int, size_bytes: int) -> None:
        """Gives a piece's pages back. Nobody may use it any more."""
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if libc().fallocate(self.memory.fd, mode, offset, size_bytes) != 0:
            raise libc_error()
