"""Which number a stream has in traces: CUPTI's, which torch's profiler has loaded."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

_MAPPED = re.compile(r"\s(/\S*/libcupti\.so\S*)$", re.MULTILINE)
_DRIVER = "libcuda.so.1"


class StreamNumbers:
    """Asks CUPTI once for each stream; knows nothing where CUPTI is not loaded as a library."""

    def __init__(self) -> None:
        self.known: dict[int, int] = {}  # by the driver's handle
        self._asked: set[int] = set()
        self._cupti: ctypes.CDLL | None = None
        self._driver: ctypes.CDLL | None = None

    def open(self) -> None:
        """Finds the library among those of this process; the profiler has to run."""
        maps = Path("/proc/self/maps")
        found = _MAPPED.search(maps.read_text()) if maps.exists() else None
        if found is None:
            return
        try:
            cupti, driver = ctypes.CDLL(found[1]), ctypes.CDLL(_DRIVER)
            cupti.cuptiGetStreamIdEx.argtypes = [
                ctypes.c_void_p,
                ctypes.c_void_p,
                ctypes.c_uint8,
                ctypes.POINTER(ctypes.c_uint32),
            ]
            driver.cuCtxGetCurrent.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
        except (OSError, AttributeError):
            return
        self._cupti, self._driver = cupti, driver

    def see(self, stream: int) -> None:
        """Finds the number of a stream that exists now, and whose context is the calling thread's."""
        if stream in self._asked or self._cupti is None or self._driver is None:
            return
        self._asked.add(stream)
        context, number = ctypes.c_void_p(), ctypes.c_uint32()
        if self._driver.cuCtxGetCurrent(ctypes.byref(context)) != 0 or not context.value:
            return
        if self._cupti.cuptiGetStreamIdEx(context, stream, 0, ctypes.byref(number)) == 0:
            self.known[stream] = number.value
