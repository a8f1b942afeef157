"""An actor that does what tests of faults and of event loops need of one, and its graphs."""

from __future__ import annotations

import ctypes
import os
import resource
from pathlib import Path
from typing import Any

import numpy as np

import crossfade
from crossfade.channels import shm_ring

TRY_WRITE = shm_ring.ShmWriter.try_write


class Unpicklable:
    """Is pickled, and does not unpickle."""

    def __reduce__(self) -> Any:
        return int, ("this is no number",)


class Doer:
    def echo(self, value: Any) -> Any:
        return value

    def add(self, one: Any, other: Any) -> Any:
        return one + other

    @crossfade.method(num_returns=2)
    def both(self, value: Any) -> Any:
        return value, -value

    def fail(self, value: Any) -> Any:
        raise KeyError(value)

    def array(self, num_bytes: int) -> Any:
        return np.zeros(num_bytes, np.uint8)

    def length(self, value: Any) -> int:
        return len(value)

    def pid(self) -> int:
        return os.getpid()

    def leave(self, code: int) -> None:
        raise SystemExit(code)

    def read(self, path: str) -> str:
        """Returns once somebody has written to a named pipe and closed it."""
        return Path(path).read_text()

    def hold_the_lock(self, seconds: int) -> None:
        ctypes.PyDLL(None).sleep(seconds)

    def break_writing(self, is_broken: bool) -> None:
        def fail(writer: Any, value: object) -> bool:
            raise RuntimeError("planted")

        writer: Any = shm_ring.ShmWriter
        writer.try_write = fail if is_broken else TRY_WRITE

    def limit_files(self, num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    def limit_addresses(self, more_bytes: int) -> None:
        with open("/proc/self/statm") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + more_bytes, resource.RLIM_INFINITY))

    def fork_and_return(self, value: Any) -> Any:
        """Both processes return from this method; the parent waits for the other's end."""
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return value

    def fork_a_helper(self, value: Any) -> Any:
        """The usual way to fork."""
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [value, -value])


Actor = crossfade.remote(Doer)


def graph_of(actor: Any, method: str, **options: Any) -> crossfade.CompiledGraph:
    graph: crossfade.CompiledGraph = getattr(actor, method).bind(crossfade.InputNode()).compile(**options)
    return graph
