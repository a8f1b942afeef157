"""Copies of buffers; large ones by two cores at once.

One core does not use all of a machine's memory bandwidth, and the party that waits for a large value leaves a core idle
meanwhile. The second half is copied by a helper thread, which is started with the first large copy and sleeps in between.
"""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

__all__ = ["copy_bytes"]

_SPLIT_BYTES = 16 << 20
"""From this size on a copy is split: waking the helper costs some 50 us, copying 16 MiB a millisecond or more."""


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copies ``source`` to the start of ``target``; both are contiguous bytes."""
    size_bytes = source.nbytes
    numpy = sys.modules.get("numpy")  # its copies release the interpreter lock; memoryview's do not
    if size_bytes < _SPLIT_BYTES or numpy is None or not _has_cores():
        target[:size_bytes] = source
        return
    into, data = numpy.frombuffer(target, numpy.uint8, size_bytes), numpy.frombuffer(source, numpy.uint8)
    half = size_bytes // 2 & ~4095
    try:
        second: Any = _helper(os.getpid()).submit(numpy.copyto, into[half:], data[half:])
    except RuntimeError:  # the interpreter is shutting down, or the system has no thread left
        numpy.copyto(into, data)
        return
    try:
        numpy.copyto(into[:half], data[:half])
    finally:
        second.result()  # nobody may touch the memory before


@cache
def _has_cores() -> bool:
    return len(os.sched_getaffinity(0)) > 1


@cache
def _helper(pid: int) -> ThreadPoolExecutor:
    """The helper of this process: a forked child has none of its parent's threads."""
    return ThreadPoolExecutor(1, thread_name_prefix="crossfade-copy")
