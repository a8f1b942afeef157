"""A stand-in for pynvml, NVML's Python package."""

from __future__ import annotations

import threading


class FakeNvml:
    """A GPU at its power limit. After ``num`` readings it is lost."""

    NVML_CLOCK_SM = 1

    class NVMLError(Exception):
        pass

    def __init__(self, num: int) -> None:
        self.left = num
        self.num_open = 0
        self.is_failed = threading.Event()

    def nvmlInit(self) -> None:
        self.num_open += 1

    def nvmlShutdown(self) -> None:
        self.num_open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetMaxClockInfo(self, gpu: str, kind: int) -> int:
        return 1980

    def nvmlDeviceGetEnforcedPowerLimit(self, gpu: str) -> int:
        return 700_000

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu: str) -> int:
        return 0x4

    def nvmlDeviceGetPowerUsage(self, gpu: str) -> int:
        return 699_000

    def nvmlDeviceGetClockInfo(self, gpu: str, kind: int) -> int:
        self.left -= 1
        if self.left < 0:
            self.is_failed.set()
            raise self.NVMLError("lost")
        return 1500
