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


def test_a_long_cell_serves_values_of_other_lengths_whose_blocks_are_as_long() -> None:
    pool, finder = Pool(HostDriver(1.0)), Finder()
    cells = Cells(pool, finder, 2 * BLOCK_BYTES)
    first = cells.take(BLOCK_BYTES, is_urgent=False)
    assert first is not None
    assert cells.used_bytes == BLOCK_BYTES
    address = first.address
    first.release()
    assert cells.used_bytes == 0
    other = cells.take(BLOCK_BYTES * 3 // 4, is_urgent=False)
    assert other is not None
    assert (other.address, cells.used_bytes) == (address, BLOCK_BYTES * 3 // 4)
    longer = cells.take(BLOCK_BYTES * 5 // 4, is_urgent=False)
    assert longer is not None
    assert longer.address != address
    assert cells.take(BLOCK_BYTES // 4, is_urgent=False) is None, "too many are in use"
    assert (finder.num_asked, pool.used_bytes) == (2, 3 * BLOCK_BYTES)
    for cell in (other, longer):
        cell.release()
    cells.close()
    pool.close()
