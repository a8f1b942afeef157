"""Cells: pieces of memory that other ranks reach, each for one value, which is copied into it first."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

from crossfade.device.memory import Block, Pool
from crossfade.errors import DeviceError
from crossfade.host.memory import align
from crossfade.p2p.letters import Exported

_SLAB_BYTES: Final = 4 << 20
_LARGEST_CELL_BYTES: Final = 1 << 20
_SMALLEST_CELL_BYTES: Final = 4 << 10
_USER: Final = "crossfade.p2p"
_NONE: Final = iter(())


class Place(NamedTuple):
    """Where a value lies, as other ranks find it."""

    exported: Exported
    offset: int


class Finder(Protocol):
    """Finds memory of this process that other ranks reach (see `crossfade.p2p.memory.Exports`)."""

    def find(self, address: int, size_bytes: int) -> Place | None:
        """Where a value lies; None if its memory cannot be exported."""


class Cell:
    """A piece of exportable memory, for one value. It ends by `release`, once, and serves another value then."""

    def __init__(self, cells: Cells, address: int, size_bytes: int, place: Place, block: Block | None) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self.place = place
        self.block = block  # its own, where it is long
        self._cells = cells

    def release(self) -> None:
        """Gives it back; all copies out of it must have finished."""
        self._cells.take_back(self)


class Cells:
    """Cells for values of all lengths: short ones share a block, a long one has its own."""

    def __init__(self, pool: Pool, exports: Finder, most_bytes: int) -> None:
        self.used_bytes = 0
        self.ended: deque[Cell] = deque()  # those of `own` whose tensors have died
        self._pool = pool
        self._exports = exports
        self._most_bytes = most_bytes
        self._spare: dict[int, list[Cell]] = {}  # by length: of a short cell, or of a long one's block
        self._uncut: dict[int, Iterator[Cell]] = {}  # by length: those of the last slab that are not made yet
        self._blocks: list[Block] = []  # slabs, and those of long cells
        self._num_owned = 0

    @property
    def are_lived_in(self) -> bool:
        """Whether there are tensors of `own`."""
        return self._num_owned > len(self.ended)

    @property
    def is_roomy(self) -> bool:
        """Whether at most a sixteenth of the memory is in use."""
        return 16 * self.used_bytes <= self._most_bytes

    def own(self, size_bytes: int) -> Cell:
        """A cell for a tensor, which goes to `ended` behind its last view. Raises a `DeviceError` if there is no memory."""
        cell = self._take(_length_of(size_bytes))
        self._num_owned += 1
        return cell

    def take(self, size_bytes: int, *, is_urgent: bool) -> Cell | None:
        """A cell; None if too many are in use already, which does not count for what is urgent. Where `is_roomy`, a cell may have
        any length.

        Raises:
            DeviceError: there is no memory for what is urgent.
        """
        length = _length_of(size_bytes)
        if not (is_urgent or self.is_roomy) and self.used_bytes + length > self._most_bytes:
            return None
        try:
            cell = self._take(length)
        except DeviceError:
            if is_urgent:
                raise
            return None
        self.used_bytes += cell.size_bytes
        return cell

    def _take(self, length: int) -> Cell:
        while self.ended:
            self._num_owned -= 1
            self._free(self.ended.popleft())
        if length > _LARGEST_CELL_BYTES:
            return self._take_long(length)
        if spare := self._spare.setdefault(length, []):
            return spare.pop()
        if (uncut := next(self._uncut.get(length, _NONE), None)) is not None:
            return uncut
        self._uncut[length] = self._cut(length)
        return next(self._uncut[length])

    def _take_long(self, length: int) -> Cell:
        """A block of its own; a spare one may be up to twice as long."""
        blocks = [size for size, spare in self._spare.items() if spare and length <= size <= 2 * length]
        if blocks:
            return self._spare[min(blocks)].pop()
        block = self._pool.take(length, "a value", _USER, gives_back=False)
        self._blocks.append(block)
        self._spare.setdefault(block.size_bytes, [])
        return Cell(self, block.address, block.size_bytes, self._place(block.address, block.size_bytes), block)

    def _cut(self, length: int) -> Iterator[Cell]:
        """More cells of a length, each made when it is first needed: a slab has room for a thousand."""
        slab = self._pool.take(_SLAB_BYTES, "short values", _USER, gives_back=False)
        self._blocks.append(slab)
        exported, begin = self._place(slab.address, _SLAB_BYTES)
        for offset in range(0, _SLAB_BYTES, length):
            yield Cell(self, slab.address + offset, length, Place(exported, begin + offset), None)

    def _place(self, address: int, size_bytes: int) -> Place:
        place = self._exports.find(address, size_bytes)
        assert place is not None, "a pool's memory can be exported"
        return place

    def take_back(self, cell: Cell) -> None:
        """See `Cell.release`."""
        self.used_bytes -= cell.size_bytes
        self._free(cell)

    def _free(self, cell: Cell) -> None:
        self._spare[cell.size_bytes].append(cell)

    def close(self) -> None:
        """Gives all memory back; nothing may use it any more. Idempotent."""
        while self._blocks:
            self._blocks.pop().release()
        self._spare.clear()
        self._uncut.clear()


def _length_of(size_bytes: int) -> int:
    """How long a cell for a value is: one of few lengths, so that cells find another use."""
    power = 1 << max(size_bytes - 1, 1).bit_length()
    return max(power, _SMALLEST_CELL_BYTES) if power <= _LARGEST_CELL_BYTES else align(size_bytes, power // 8)
