"""What a program runs on: the environment that changes how it runs, and the GPU's clock and power meanwhile."""

from __future__ import annotations

import os
import threading
import time

from crossfade.device.clocks import GpuClocks

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
        self._clocks: GpuClocks | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self, uuid: str) -> None:
        """Begins to read the GPU that has this UUID, ``GPU-...``."""
        clocks = self._clocks = GpuClocks(uuid)
        if not self._read(clocks):
            self.missing = clocks.missing
            return
        self.limits = {"max_mhz": clocks.max_mhz, "limit_w": clocks.limit_w}
        self._thread = threading.Thread(target=self._run, args=(clocks,), name="crossfade-clocks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Reads no longer."""
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()
        if self._clocks is not None:
            self._clocks.close()

    def _run(self, clocks: GpuClocks) -> None:
        while not self._is_over.wait(_PERIOD_S):
            if not self._read(clocks):
                self.missing = f"{clocks.missing}, after {len(self.samples)} samples"
                return

    def _read(self, clocks: GpuClocks) -> bool:
        sample = clocks.read()
        if sample is not None:
            self.samples.append((time.time_ns(), sample.clock_mhz, sample.power_w))
        return sample is not None
