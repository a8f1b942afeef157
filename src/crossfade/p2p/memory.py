"""Memory that other ranks reach: a user's tensors where they lie, or cells into which values are copied first."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from itertools import accumulate, count
from typing import NamedTuple

from crossfade.device.driver import HOST, DeviceMemory, TimedDriver
from crossfade.device.events import EventPool
from crossfade.device.host_memory import HostMemories
from crossfade.device.memory import Block, OpenedMemory, Pool
from crossfade.device.signals import Counter
from crossfade.device.staged_layout import StagedLayout
from crossfade.device.streams import Role, Streams
from crossfade.device.tensors import stream_getter
from crossfade.errors import ChannelError, DeviceError
from crossfade.host.memory import align
from crossfade.interrupted import brief
from crossfade.p2p.letters import Exported

_SLAB_BYTES = 4 << 20
_LARGEST_CELL_BYTES = 1 << 20
_SMALLEST_CELL_BYTES = 4 << 10
_USER = "crossfade.p2p"


class Place(NamedTuple):
    """Where a value lies, as other ranks find it."""

    exported: Exported
    offset: int


class Exports:
    """Memory of this process that others may open. ``numbers`` gives each a number of its own."""

    def __init__(self, memory: DeviceMemory, numbers: count[int]) -> None:
        self._memory = memory
        self._numbers = numbers
        self._known: dict[int, tuple[int, Exported]] = {}  # by where it begins, with the allocation's identity
        self.forgotten: list[int] = []  # numbers of memory that is not there any more

    def find(self, address: int, size_bytes: int) -> Place | None:
        """Where a value lies; None if its memory cannot be exported."""
        allocation = self._memory.allocation_of(address)
        if allocation is None or address + size_bytes > allocation.address + allocation.size_bytes:
            return None
        known = self._known.get(allocation.address)
        if known is None or known[0] != allocation.identity:
            if known is not None:
                self.forgotten.append(known[1].memory)
            try:
                handle = self._memory.export(allocation.address)
            except DeviceError:
                return None
            exported = Exported(next(self._numbers), allocation.size_bytes, self._memory.device == HOST, handle)
            known = self._known[allocation.address] = (allocation.identity, exported)
        return Place(known[1], address - allocation.address)

    def begin_of(self, memory: int) -> int:
        """Where memory of this process begins."""
        return next(begin for begin, (_, exported) in self._known.items() if exported.memory == memory)


class OpenedMemories:
    """One rank's memory of one kind, opened when it is first needed. ``own``: if that rank is this one."""

    def __init__(self, memory: DeviceMemory, label: str, own: Exports | None = None) -> None:
        self._memory = memory
        self._label = label
        self._own = own
        self._told: dict[int, Exported] = {}
        self._opened: dict[int, OpenedMemory] = {}

    def on_exported(self, exported: Exported) -> None:
        self._told[exported.memory] = exported

    def on_forgotten(self, memory: int) -> None:
        self._told.pop(memory, None)
        opened = self._opened.pop(memory, None)
        if opened is not None:
            opened.close()

    def address(self, memory: int, offset: int, size_bytes: int) -> int:
        """Where a range of it lies in this process. Raises a `DeviceError` if it cannot be opened."""
        exported = self._told[memory]
        if not 0 <= offset <= offset + size_bytes <= exported.size_bytes:
            raise ChannelError(f"{self._label}: a window that is not in its memory: this is a bug in crossfade")
        if self._own is not None:
            return self._own.begin_of(memory) + offset
        opened = self._opened.get(memory)
        if opened is None:
            opened = OpenedMemory(self._memory, exported.handle, exported.size_bytes, self._label)
            self._opened[memory] = opened
        return opened.address + offset

    def close(self) -> None:
        """Closes all; this process's copies must have finished. Idempotent."""
        self._told.clear()
        while self._opened:
            self._opened.popitem()[1].close()


class Cell:
    """A piece of exportable memory, for one value. It ends by `release`, once."""

    def __init__(self, address: int, size_bytes: int, give_back: Callable[[Cell], None]) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._give_back = give_back

    def release(self) -> None:
        """Gives it back; all copies out of it must have finished."""
        self._give_back(self)


class OwnedCell:
    """What the tensors in a cell hold: the cell ends with the last of them, in any thread."""

    def __init__(self, cell: Cell, ended: deque[Cell]) -> None:
        self._cell = cell
        self._ended = ended

    @brief
    def __del__(self) -> None:
        self._ended.append(self._cell)


class Cells:
    """Cells for values of all lengths: short ones share a block, a long one has its own."""

    def __init__(self, pool: Pool, most_bytes: int) -> None:
        self.used_bytes = 0
        self._pool = pool
        self._most_bytes = most_bytes
        self._spare: dict[int, list[int]] = {}  # addresses of short cells, by length
        self._slabs: list[Block] = []
        self._blocks: dict[int, Block] = {}  # of long cells, by address
        self._num_owned = 0
        self._ended: deque[Cell] = deque()  # owned ones whose tensors have died

    @property
    def are_lived_in(self) -> bool:
        """Whether there are tensors of `own`."""
        return self._num_owned > len(self._ended)

    def own(self, size_bytes: int) -> tuple[int, OwnedCell]:
        """A cell for a tensor: its address, and what the tensor has to hold. Raises a `DeviceError` if there is no memory."""
        cell = self._take(_length_of(size_bytes))
        self._num_owned += 1
        return cell.address, OwnedCell(cell, self._ended)

    def take(self, size_bytes: int, *, is_urgent: bool) -> Cell | None:
        """A cell; None if too many are in use already, which does not count for what is urgent.

        Raises:
            DeviceError: there is no memory for what is urgent.
        """
        length = _length_of(size_bytes)
        if not is_urgent and self.used_bytes and self.used_bytes + length > self._most_bytes:
            return None
        try:
            cell = self._take(length)
        except DeviceError:
            if is_urgent:
                raise
            return None
        self.used_bytes += length
        return cell

    def _take(self, length: int) -> Cell:
        while self._ended:
            self._num_owned -= 1
            self._free(self._ended.popleft())
        address = self._short(length) if length <= _LARGEST_CELL_BYTES else self._long(length)
        return Cell(address, length, self._take_back)

    def _short(self, length: int) -> int:
        spare = self._spare.setdefault(length, [])
        if not spare:
            slab = self._pool.take(_SLAB_BYTES, "short values", _USER, gives_back=False)
            self._slabs.append(slab)
            spare.extend(range(slab.address, slab.address + _SLAB_BYTES, length))
        return spare.pop()

    def _long(self, length: int) -> int:
        block = self._pool.take(length, "a value", _USER, gives_back=False)
        self._blocks[block.address] = block
        return block.address

    def _take_back(self, cell: Cell) -> None:
        self.used_bytes -= cell.size_bytes
        self._free(cell)

    def _free(self, cell: Cell) -> None:
        block = self._blocks.pop(cell.address, None)
        if block is None:
            self._spare[cell.size_bytes].append(cell.address)
        else:
            block.drop(_USER)

    def close(self) -> None:
        """Gives all memory back; nothing may use it any more. Idempotent."""
        for block in (*self._slabs, *self._blocks.values()):
            block.drop(_USER)
        self._slabs.clear()
        self._blocks.clear()
        self._spare.clear()


def _length_of(size_bytes: int) -> int:
    """How long a cell for a value is: one of few lengths, so that cells find another use."""
    power = 1 << max(size_bytes - 1, 1).bit_length()
    return max(power, _SMALLEST_CELL_BYTES) if power <= _LARGEST_CELL_BYTES else align(size_bytes, power // 8)


class Shared:
    """Memory of one side that another rank reaches: the device's own, or, staged, pinned memory of the host that both have.

    A staged value passes in pieces, each with a step of its own: it goes up from the one GPU while it comes down to the other.
    """

    def __init__(self, driver: TimedDriver, numbers: count[int], buffer_bytes: int, *, is_staged: bool) -> None:
        memory = HostMemories(driver.device, driver.ledger, driver) if is_staged else driver
        self.memory: DeviceMemory = memory
        self.is_staged = is_staged
        self.exports = Exports(memory, numbers)
        self.pool = Pool(memory)
        self.cells = Cells(self.pool, buffer_bytes)
        self._layout = StagedLayout()

    def pieces(self, size_bytes: int) -> list[tuple[int, int]]:
        """How a value is cut: where each piece begins, and its length."""
        if not self.is_staged:
            return [(0, size_bytes)]
        lengths = self._layout.lengths(size_bytes)
        return list(zip(accumulate(lengths, initial=0), lengths, strict=False))

    def close(self) -> None:
        """Gives everything back; nothing may be under way. Memory in which tensors live stays until the process ends."""
        if not self.cells.are_lived_in:
            self.cells.close()
            self.pool.close()


class Side:
    """The host's memory, or this rank's GPU, as transfers use it."""

    def __init__(self, driver: TimedDriver, numbers: count[int], buffer_bytes: int) -> None:
        self.driver = driver
        self.is_host = driver.device == HOST
        self.current_stream = stream_getter(driver.device)
        self.events = EventPool(driver)
        self.direct, self.staged = (
            Shared(driver, numbers, buffer_bytes, is_staged=is_staged) for is_staged in (False, True)
        )
        self.streams = Streams(driver)
        self.push_stream = self.streams.get(Role.PUSH)
        self.pull_stream = self.streams.get(Role.DOWN)
        self.awaiting = [self.push_stream, self.pull_stream]  # streams that may wait for other ranks

    def set_step(self, counter: Counter, step: int, stream: int, *, is_alone: bool) -> None:
        """Says behind a stream that a step is done: beside it where a value has several pieces, so that the next need not wait.

        All pieces of a value are told of in the same place, or a late word of an earlier one would take back a later one's.
        """
        if not is_alone:
            copied = self.events.at(stream)
            stream = self.streams.get(Role.PUSH, "sets")
            copied.hold(stream)
        counter.set(stream, step)

    def await_step(self, counter: Counter, step: int, stream: int, *, is_first: bool) -> None:
        """Holds a stream until a step is done: beside it, while the stream copies the piece before, where there is one."""
        if counter.has(step):
            return
        if is_first:
            counter.wait(stream, step)
            return
        beside = self.streams.get(Role.DOWN, "waits")
        if beside not in self.awaiting:
            self.awaiting.append(beside)
        counter.wait(beside, step)
        self.events.at(beside).hold(stream)

    def forgotten(self) -> Iterator[int]:
        """Numbers of memory that is not there any more; each once."""
        for shared in (self.direct, self.staged):
            while shared.exports.forgotten:
                yield shared.exports.forgotten.pop()

    def is_idle(self) -> bool:
        """Whether all copies of this side's streams have been made."""
        return all(map(self.driver.is_idle, self.streams.all()))

    def close(self) -> None:
        """Gives everything back; nothing may be under way."""
        self.direct.close()
        self.staged.close()
        self.streams.close()
        self.events.close()
