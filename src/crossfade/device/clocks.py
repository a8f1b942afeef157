"""A GPU's clock and power, as NVML (the package nvidia-ml-py) tells them."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

_AT_LIMIT = 0.97


class Sample(NamedTuple):
    """What was read at one time."""

    clock_mhz: int
    power_w: float


class GpuClocks:
    """Reads one GPU. Any thread may, one at a time.

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
        self._is_open = False
        try:
            self._nvml: Any = importlib.import_module("pynvml")
        except ImportError:
            self.missing = "the package nvidia-ml-py is not installed"
            return
        try:
            self._nvml.nvmlInit()
            self._is_open = True
            self._gpu = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.max_mhz = self._nvml.nvmlDeviceGetMaxClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM)
            self.limit_w = self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._gpu) / 1e3
        except self._nvml.NVMLError as error:
            self.missing = f"NVML: {error}"

    def read(self) -> Sample | None:
        """The clock and the power now; None, with the reason in ``missing``, if they cannot be read."""
        if self.missing:
            return None
        try:
            clock_mhz = self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM)
            return Sample(clock_mhz, self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3)
        except self._nvml.NVMLError as error:
            self.missing = f"NVML: {error}"
            return None

    def close(self) -> None:
        """Reads no longer. Idempotent."""
        if self._is_open:
            self._is_open = False
            self.missing = self.missing or "it was closed"
            self._nvml.nvmlShutdown()


class GpuLoad(NamedTuple):
    """The clock and the power of a GPU for half of the time and more, and the most of each."""

    clock_mhz: float
    max_mhz: float
    power_w: float
    limit_w: float

    @classmethod
    def of(
        cls, clocks_mhz: Sequence[float], powers_w: Sequence[float], max_mhz: float, limit_w: float
    ) -> GpuLoad | None:
        """Of some samples; None if there are none."""
        if not powers_w or not limit_w:
            return None
        return cls(median(clocks_mhz), max_mhz, median(powers_w), limit_w)

    @property
    def is_at_power_limit(self) -> bool:
        """Whether power is what keeps the GPU below its highest clock."""
        return self.power_w >= _AT_LIMIT * self.limit_w and self.clock_mhz < _AT_LIMIT * self.max_mhz

    def __str__(self) -> str:
        return f"{self.power_w:.0f} of {self.limit_w:.0f} W, at {self.clock_mhz:,.0f} of {self.max_mhz:,.0f} MHz"
