"""A GPU's clock and power, as NVML (the package nvidia-ml-py) tells them."""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

_NEAR = 0.97
_POWER_CAP = 0x4  # NVML's bit for clocks that are lowered for the sake of power


class Sample(NamedTuple):
    """What was read at one time: the power is the mean over up to a second before, the clock and the cap are instantaneous."""

    clock_mhz: int
    power_w: float
    is_capped: bool  # whether the clock is lowered since power is at its limit


class GpuClocks:
    """Reads one GPU, if it can. Any thread may, one at a time.

    Args:
        uuid: of the GPU, ``GPU-...``.

    Attributes:
        max_mhz: the highest clock of its multiprocessors; 0 where nothing can be read.
        limit_w: its power limit; likewise.
        missing: why nothing can be read; empty where something can.
    """

    def __init__(self, uuid: str) -> None:
        self.max_mhz = self.limit_w = 0.0
        self.missing = ""
        self._end: Callable[[], object] = lambda: None
        try:
            nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            self.missing = "the package nvidia-ml-py is not installed"
            return
        self._nvml = nvml
        try:
            nvml.nvmlInit()
        except Exception as error:
            self.missing = f"NVML: {error}"
            return
        self._end = weakref.finalize(self, nvml.nvmlShutdown)
        try:
            self._gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
            max_mhz = nvml.nvmlDeviceGetMaxClockInfo(self._gpu, nvml.NVML_CLOCK_SM)
            limit_w = nvml.nvmlDeviceGetEnforcedPowerLimit(self._gpu) / 1e3
        except Exception as error:  # also of a pynvml that is something else: what is read here is never needed
            self.missing = f"NVML: {error}"
            self._end()
        else:
            self.max_mhz, self.limit_w = max_mhz, limit_w

    def read(self) -> Sample | None:
        """The clock and the power now; None, with the reason in ``missing``, if they cannot be read."""
        if self.missing:
            return None
        nvml, gpu = self._nvml, self._gpu
        try:
            clock_mhz = nvml.nvmlDeviceGetClockInfo(gpu, nvml.NVML_CLOCK_SM)
            reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu)
            return Sample(clock_mhz, nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3, bool(reasons & _POWER_CAP))
        except Exception as error:
            self.missing = f"NVML: {error}"
            return None

    def close(self) -> None:
        """Reads no longer. Idempotent."""
        self.missing = self.missing or "it was closed"
        self._end()


class GpuLoad(NamedTuple):
    """The clock and the power of a GPU for half of the time and more, and the most of each.

    Attributes:
        is_capped: whether NVML said in half of the samples and more that power lowers the clock.
    """

    clock_mhz: float
    max_mhz: float
    power_w: float
    limit_w: float
    is_capped: bool = False

    @classmethod
    def of(
        cls,
        clocks_mhz: Sequence[float],
        powers_w: Sequence[float],
        max_mhz: float,
        limit_w: float,
        capped: Sequence[bool] = (),
    ) -> GpuLoad | None:
        """Of some samples; None if there are none. ``capped``: of each, if that is known."""
        if not powers_w or not limit_w:
            return None
        return cls(median(clocks_mhz), max_mhz, median(powers_w), limit_w, bool(capped) and median(capped) > 0)

    @property
    def is_at_power_limit(self) -> bool:
        """Whether power is what keeps the GPU below its highest clock. What is false may be unknown: the mean of a second has to
        reach the limit, or NVML has to say so. (NVML says so for a short peak too: at 650 of 700 W and 1,965 of 1,980 MHz.)
        """
        return not self.is_at_highest_clock and (self.is_capped or self.power_w >= _NEAR * self.limit_w)

    @property
    def is_at_highest_clock(self) -> bool:
        """Whether nothing keeps the GPU below its highest clock."""
        return self.clock_mhz >= _NEAR * self.max_mhz

    def __str__(self) -> str:
        return f"{self.power_w:.0f} of {self.limit_w:.0f} W, at {self.clock_mhz:,.0f} of {self.max_mhz:,.0f} MHz"
