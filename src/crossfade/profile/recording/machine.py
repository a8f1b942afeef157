"""What a program runs on: the environment that changes how it runs, and the GPU's clock and power meanwhile."""

from __future__ import annotations

import importlib
import os
import threading
import time
from typing import Any

_VARIABLES = ("CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_PREFIXES = ("NCCL_", "TORCH_NCCL_")
_PERIOD_S = 0.02


def environment() -> dict[str, str]:
    """The variables that matter to CUDA's queues, to memory and to NCCL, of those that are set."""
    return {name: value for name, value in os.environ.items() if name in _VARIABLES or name.startswith(_PREFIXES)}


class GpuSampler:
    """Reads a GPU's clock and power every 20 ms, on a thread of its own, from `open` to `close`.

    Attributes:
        samples: [time in ns, clock of the SMs in MHz, power in W].
        limits: ``max_mhz`` and ``limit_w``; empty where nothing could be read.
        missing: why nothing is read; empty where something is.
    """

    def __init__(self) -> None:
        self.samples: list[tuple[int, int, float]] = []
        self.limits: dict[str, float] = {}
        self.missing = ""
        self._nvml: Any = None
        self._gpu: Any = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, uuid: str) -> None:
        """Begins to read the GPU that has this UUID, ``GPU-...``."""
        try:
            self._nvml = importlib.import_module("pynvml")
        except ImportError:
            self.missing = "the package nvidia-ml-py is not installed"
            return
        try:
            self._nvml.nvmlInit()
            self._gpu = self._nvml.nvmlDeviceGetHandleByUUID(uuid)
            self.limits = {
                "max_mhz": self._nvml.nvmlDeviceGetMaxClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM),
                "limit_w": self._nvml.nvmlDeviceGetEnforcedPowerLimit(self._gpu) / 1e3,
            }
            self._read()
        except self._nvml.NVMLError as error:
            self.missing = f"NVML: {error}"
            return
        self._thread = threading.Thread(target=self._run, name="crossfade-clocks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Reads no longer."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
            self._nvml.nvmlShutdown()

    def _run(self) -> None:
        while not self._is_over.wait(_PERIOD_S):
            try:
                self._read()
            except self._nvml.NVMLError as error:
                self.missing = f"NVML, after {len(self.samples)} samples: {error}"
                return

    def _read(self) -> None:
        clock = self._nvml.nvmlDeviceGetClockInfo(self._gpu, self._nvml.NVML_CLOCK_SM)
        self.samples.append((time.time_ns(), clock, self._nvml.nvmlDeviceGetPowerUsage(self._gpu) / 1e3))
