"""Cells: what is given back serves another value."""

from __future__ import annotations

from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import BLOCK_BYTES, Pool
from crossfade.p2p.cells import Cells, Place
from crossfade.p2p.letters import Exported


class Finder:
    """Memory that can be exported, and how often it was asked for."""

    def __init__(self) -> None:
        self.num_asked = 0

    def find(self, address: int, size_bytes: int) -> Place | None:
        self.num_asked += 1
        return Place(Exported(1, size_bytes, True, False, b""), 0)


def test_a_long_cell_serves_values_that_are_at_least_half_as_long() -> None:
    pool, finder = Pool(HostDriver(1.0)), Finder()
    cells = Cells(pool, finder, 5 * BLOCK_BYTES)
    first = cells.take(2 * BLOCK_BYTES - 100, is_urgent=False)
    assert first is not None
    assert cells.used_bytes == 2 * BLOCK_BYTES
    address = first.address
    first.release()
    assert cells.used_bytes == 0
    other = cells.take(BLOCK_BYTES, is_urgent=False)
    assert other is not None
    assert (other.address, cells.used_bytes) == (address, 2 * BLOCK_BYTES), "what the block takes"
    short = cells.take(BLOCK_BYTES * 3 // 4, is_urgent=False)
    assert short is not None
    assert short.address != address
    assert cells.take(3 * BLOCK_BYTES, is_urgent=False) is None, "too many are in use"
    assert (finder.num_asked, pool.used_bytes) == (2, 3 * BLOCK_BYTES)
    for cell in (other, short):
        cell.release()
    small = cells.take(BLOCK_BYTES * 5 // 8, is_urgent=False)
    assert small is not None
    assert small.address == short.address, "the smallest that is long enough"
    small.release()
    assert cells.used_bytes == 0
    cells.close()
    pool.close()
