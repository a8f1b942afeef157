"""``cuda.bindings``, loaded when first needed: its driver module, its errors, its handles."""

from __future__ import annotations

from functools import cache
from typing import Any

from crossfade.device.driver import Allocation
from crossfade.errors import DeviceError, MissingDependency

_MOST_HANDLES = 4096


@cache
def bindings() -> Any:
    """The module ``cuda.bindings.driver``, initialised. Raises a `MissingDependency` if it is not installed, and a `DeviceError` if
    there is no driver or no GPU.
    """
    try:
        from cuda.bindings import driver
    except ImportError:
        raise MissingDependency("cuda-bindings", extra="gpu", needed_for="moving values between GPUs") from None
    try:
        (code,) = driver.cuInit(0)
    except Exception as error:  # the bindings load libcuda at their first call
        raise DeviceError(
            f"the NVIDIA driver cannot be loaded: {error}", hint="nvidia-smi shows it, if there is one"
        ) from None
    if code:
        raise DeviceError(f"CUDA cannot start: {code.name}", hint="nvidia-smi shows whether the driver sees a GPU")
    return driver


def check(result: Any, what: str) -> Any:
    """The values that a driver call returned. Raises a `DeviceError` if it failed."""
    code = result[0]
    if code:
        _, text = bindings().cuGetErrorString(code)
        words = text.decode() if isinstance(text, bytes) else str(text)
        raise DeviceError(f"{what} failed: {code.name}: {words}")
    return result[1] if len(result) == 2 else result[1:]


class Handles(dict[int, Any]):
    """Numbers as the bindings' own objects, which they take without making new ones: 0.2 us an argument."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, number: int) -> Any:
        if len(self) >= _MOST_HANDLES:
            self.clear()
        made = self[number] = self._make(number)
        return made


class Allocations:
    """What the driver knows of device memory, asked for once for each allocation: each question takes a microsecond."""

    def __init__(self) -> None:
        driver = bindings()
        names = ("BUFFER_ID", "RANGE_START_ADDR", "RANGE_SIZE", "IS_LEGACY_CUDA_IPC_CAPABLE")
        self._ask = driver.cuPointerGetAttribute
        self._identity, *self._rest = (
            getattr(driver.CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{name}") for name in names
        )
        self._known: dict[int, Allocation | None] = {}  # by identity, which no other allocation of the process ever has

    def of(self, address: int) -> Allocation | None:
        """The allocation in which an address lies; None if it cannot be exported."""
        code, found = self._ask(self._identity, address)
        if code:
            return None
        identity = int(found)
        if identity not in self._known:
            if len(self._known) >= _MOST_HANDLES:
                self._known.clear()
            self._known[identity] = self._read(address, identity)
        return self._known[identity]

    def _read(self, address: int, identity: int) -> Allocation | None:
        read = [self._ask(attribute, address) for attribute in self._rest]
        if any(code for code, _ in read):
            return None
        begin, size_bytes, is_exportable = (int(value) for _, value in read)
        return Allocation(begin, size_bytes, identity) if is_exportable else None


def relax_captures() -> None:
    """Lets this thread make any call while another one captures: it never captures itself, nor touches what is captured."""
    driver = bindings()
    check(
        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED), "relaxing"
    )
