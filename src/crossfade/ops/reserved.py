"""SMs that cuBLAS leaves to others: its products beside a kernel that has to run at the same time.

A product of cuBLAS may keep all SMs until it ends, and then whatever else was enqueued waits for it, however urgent its stream is.
``cublasSetSmCountTarget`` says how many SMs it may use. torch has no function for that, but gives its own handle of cuBLAS for this
thread; the library is the one that torch has loaded, which is found and not loaded again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import DeviceError

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup

__all__ = ["leaving_sms"]

_LIBRARIES = ("libcublas.so.13", "libcublas.so.12")
_ALL = 0
"""What stands for all SMs."""


@cache
def _setter() -> Any:
    """The function, of the cuBLAS that this process has; None if it has none."""
    for name in _LIBRARIES:
        try:
            library = ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_LOCAL)
        except OSError:
            continue
        function = library.cublasSetSmCountTarget
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int], ctypes.c_int
        return function
    return None


@contextmanager
def leaving_sms(group: PeerGroup, num_sms: int) -> Iterator[None]:
    """torch's products that are enqueued inside, by this thread, leave so many SMs alone; also those that are captured.

    It holds for ``torch.mm``, ``torch.bmm`` and ``torch.baddbmm`` as long as torch calls cuBLAS by its handle, which it does unless
    it was told to prefer another library. ``torch.addmm`` with a bias of one dimension goes by cuBLASLt, which does not look at the
    handle: there, as where there is no cuBLAS, nothing is left.

    Raises:
        DeviceError: cuBLAS does not take the number.
    """
    setter = _setter() if num_sms and group.device_type == "cuda" else None
    if setter is None:
        yield
        return
    torch = torch_or_raise()
    device = group.home.driver.device
    handle = torch.cuda.current_blas_handle()
    num_all = torch.cuda.get_device_properties(device).multi_processor_count
    code = setter(handle, max(num_all - num_sms, 1))
    if code:
        raise DeviceError(f"cuBLAS does not leave {num_sms} of {num_all} SMs alone (error {code})", hint="reserve none")
    try:
        yield
    finally:
        setter(handle, _ALL)
