"""What a pool does where the device has no memory left: first its own idle blocks go back, then what others keep unused."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from crossfade.device.memory import BLOCK_BYTES, Pool
from crossfade.engines import devices
from crossfade.errors import DeviceError


class Small:
    """A device with room for so many bytes; a cache beside the pool holds some of them."""

    def __init__(self, free_bytes: int, cached_bytes: int) -> None:
        self.free_bytes, self.cached_bytes = free_bytes, cached_bytes
        self.num_reclaimed = 0
        self._sizes: dict[int, int] = {}

    def allocate(self, size_bytes: int, label: str) -> int:
        if size_bytes > self.free_bytes:
            raise DeviceError(f"no {size_bytes} bytes for {label}")
        self.free_bytes -= size_bytes
        address = (len(self._sizes) + 1) << 40
        self._sizes[address] = size_bytes
        return address

    def free(self, address: int) -> None:
        self.free_bytes += self._sizes[address]

    def reclaim(self) -> None:
        self.num_reclaimed += 1
        self.free_bytes, self.cached_bytes = self.free_bytes + self.cached_bytes, 0


def pool_on(device: Any) -> Pool:
    return Pool(device, device.reclaim)


def test_what_others_keep_unused_is_asked_for_last() -> None:
    device = Small(2 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    pool = pool_on(device)
    pool.take(BLOCK_BYTES, "slots", "a").drop("a")
    pool.take(2 * BLOCK_BYTES, "slots", "b")  # the idle block is enough
    assert (device.num_reclaimed, pool.idle_bytes) == (0, 0)
    pool.take(2 * BLOCK_BYTES, "slots", "c")
    assert (device.num_reclaimed, device.free_bytes) == (1, 0)


def test_no_memory_even_so() -> None:
    device = Small(BLOCK_BYTES, BLOCK_BYTES)
    pool = pool_on(device)
    with pytest.raises(DeviceError, match="for slots of n0"):
        pool.take(3 * BLOCK_BYTES, "slots of n0", "a")
    assert device.num_reclaimed == 1
    assert pool.used_bytes == 0
    pool.take(2 * BLOCK_BYTES, "slots of n0", "a")


def test_a_pool_that_nobody_can_help() -> None:
    device: Any = Small(BLOCK_BYTES, BLOCK_BYTES)
    with pytest.raises(DeviceError):
        Pool(device).take(2 * BLOCK_BYTES, "slots", "a")
    assert device.num_reclaimed == 0


@pytest.mark.parametrize("is_initialized", [True, False])
def test_torchs_cache_is_emptied_where_it_has_one(is_initialized: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[int] = []
    cuda = SimpleNamespace(is_initialized=lambda: is_initialized, empty_cache=lambda: emptied.append(1))
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(devices, "_host_driver", lambda: Small(0, 0))
    pool = devices.Devices((), lambda peer: [], lambda peer: None).homes[0].pool
    with pytest.raises(DeviceError):
        pool.take(1, "slots", "a")
    assert len(emptied) == is_initialized
