"""Memory that other ranks reach: a user's tensors where they lie, or cells into which values are copied first (`p2p.cells`)."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate, count
from typing import TYPE_CHECKING, Final

from crossfade.device.driver import HOST, DeviceMemory, TimedDriver
from crossfade.device.events import EventPool
from crossfade.device.host_memory import HostMemories
from crossfade.device.memory import OpenedMemory, Pool
from crossfade.device.signals import Counter
from crossfade.device.staged_layout import StagedLayout
from crossfade.device.streams import Role, Streams
from crossfade.device.tensors import stream_getter
from crossfade.errors import ChannelError, DeviceError
from crossfade.interrupted import brief
from crossfade.p2p.cells import Cell, Cells, Place
from crossfade.p2p.letters import Exported
from crossfade.p2p.pull_streams import Budget, PullStreams

if TYPE_CHECKING:
    import torch

SHORT_BYTES: Final = 64 << 10
"""A value of at most this length passes through a cell in memory of the host, which both ranks' current streams reach."""

_LENT_BYTES_OF_HOST = 256 << 10
"""A value of at least this length is read where it lies, if its memory can be exported; a shorter one is copied first."""

_LENT_BYTES_OF_DEVICE = (1 << 20) + 1
"""The same on a device: a sender whose value was copied need not wait for the receiver's host, nor its stream for a copy."""

_NUM_TELLING = 2
"""So many streams of ours say that values are there which are lent at the same time, in turns with the one that made them."""

_MOST_TOLD_OF = 8
"""So many of the program's streams have such streams beside them."""

_MOST_NUMBERED = 1000
"""How many of the program's streams have numbers; values of others are announced without one."""


class Exports:
    """Memory of this process that others may open. ``numbers`` gives each a number of its own; those of what is gone are added to
    ``forgotten``.
    """

    def __init__(self, memory: DeviceMemory, numbers: count[int], forgotten: list[int], *, is_staged: bool) -> None:
        self.memory = memory
        self._numbers = numbers
        self._forgotten = forgotten
        self._is_staged = is_staged
        self._known: dict[int, tuple[int, Exported]] = {}  # by where it begins, with the allocation's identity

    def find(self, address: int, size_bytes: int) -> Place | None:
        """Where a value lies; None if its memory cannot be exported."""
        allocation = self.memory.allocation_of(address)
        if allocation is None or address + size_bytes > allocation.address + allocation.size_bytes:
            return None
        known = self._known.get(allocation.address)
        if known is None or known[0] != allocation.identity:
            if known is not None:
                self._forgotten.append(known[1].memory)
            try:
                handle = self.memory.export(allocation.address)
            except DeviceError:
                return None
            is_host = self.memory.device == HOST
            exported = Exported(next(self._numbers), allocation.size_bytes, is_host, self._is_staged, handle)
            known = self._known[allocation.address] = (allocation.identity, exported)
        return Place(known[1], address - allocation.address)

    def begin_of(self, memory: int) -> int | None:
        """Where memory of this process begins; None for none of this."""
        return next((begin for begin, (_, exported) in self._known.items() if exported.memory == memory), None)


class OpenedMemories:
    """One rank's memory of one kind, opened when it is first needed. ``ways``: of this process, the memory that is opened straight
    and what is staged. ``is_own``: that rank is this one.
    """

    def __init__(self, ways: Sequence[Shared], label: str, *, is_own: bool) -> None:
        self._ways = ways
        self._label = label
        self._is_own = is_own
        self._told: dict[int, Exported] = {}
        self._opened: dict[int, OpenedMemory] = {}
        self._begins: dict[int, tuple[int, int]] = {}  # where memory that is in use begins here, and its length

    def on_exported(self, exported: Exported) -> None:
        self._told[exported.memory] = exported

    def on_forgotten(self, memory: int) -> None:
        self._told.pop(memory, None)
        self._begins.pop(memory, None)
        opened = self._opened.pop(memory, None)
        if opened is not None:
            opened.close()

    def address(self, memory: int, offset: int, size_bytes: int) -> int:
        """Where a range of it lies in this process. Raises a `DeviceError` if it cannot be opened."""
        begin, length = self._begins.get(memory) or self._open(memory)
        if not 0 <= offset <= offset + size_bytes <= length:
            raise ChannelError(f"{self._label}: a window that is not in its memory: this is a bug in crossfade")
        return begin + offset

    def _open(self, memory: int) -> tuple[int, int]:
        exported = self._told[memory]
        if self._is_own:
            begins = [shared.exports.begin_of(memory) for shared in self._ways]
            begin = next(found for found in begins if found is not None)
        else:
            opened = OpenedMemory(
                self._ways[exported.is_staged].memory, exported.handle, exported.size_bytes, self._label
            )
            self._opened[memory] = opened
            begin = opened.address
        self._begins[memory] = begin, exported.size_bytes
        return self._begins[memory]

    def close(self) -> None:
        """Closes all; this process's copies must have finished. Idempotent."""
        self._told.clear()
        self._begins.clear()
        while self._opened:
            self._opened.popitem()[1].close()


class OwnedCell:
    """What the tensors in a cell hold: the cell ends with the last of them, in any thread."""

    def __init__(self, cell: Cell, ended: deque[Cell]) -> None:
        self._cell = cell
        self._ended = ended

    @brief
    def __del__(self) -> None:
        self._ended.append(self._cell)


class Shared:
    """Memory of one side that another rank reaches: the device's own, or, staged, pinned memory of the host that both have.

    A staged value passes in pieces, each with a step of its own: it goes up from the one GPU while it comes down to the other.
    """

    def __init__(
        self, driver: TimedDriver, numbers: count[int], forgotten: list[int], buffer_bytes: int, *, is_staged: bool
    ) -> None:
        memory = HostMemories(driver.device, driver.ledger, driver) if is_staged else driver
        self.memory: DeviceMemory = memory
        self.is_staged = is_staged
        self.exports = Exports(memory, numbers, forgotten, is_staged=is_staged)
        self.pool = Pool(memory)
        self.cells = Cells(self.pool, self.exports, buffer_bytes)
        self.landing = Cells(self.pool, self.exports, buffer_bytes)  # for receives
        self.layout = StagedLayout()

    def pieces(self, size_bytes: int) -> list[tuple[int, int]]:
        """How a value is cut, the same on both sides: where each piece begins, and its length."""
        if not self.is_staged or size_bytes <= SHORT_BYTES:
            return [(0, size_bytes)]
        lengths = self.layout.lengths(size_bytes)
        return list(zip(accumulate(lengths, initial=0), lengths, strict=False))

    def close(self) -> None:
        """Gives everything back; nothing may be under way. Memory in which tensors live stays until the process ends."""
        self.landing.close()
        if self.cells.are_lived_in:
            self.pool.trim()
        else:
            self.cells.close()
            self.pool.close()


class Side:
    """The host's memory, or this rank's GPU, as transfers use it. Values of up to ``landed_bytes`` pass through cells, so that
    neither the sender's stream nor its copy waits for the receiver's stream.
    """

    def __init__(
        self,
        driver: TimedDriver,
        numbers: count[int],
        buffer_bytes: int,
        *,
        landed_bytes: int = 0,
        pull_budget: Budget | None = None,
        is_ahead: bool = False,
    ) -> None:
        self.driver = driver
        self.is_host = driver.device == HOST
        self.current_stream = stream_getter(driver.device)
        self.events = EventPool(driver)
        self.forgotten: list[int] = []  # numbers of memory that is not there any more
        self.direct, self.staged = (
            Shared(driver, numbers, self.forgotten, buffer_bytes, is_staged=is_staged) for is_staged in (False, True)
        )
        self.short = self.direct if self.is_host else self.staged  # where short values pass
        self.landed_bytes = landed_bytes
        # Whether all ranks copy what others lend in the order in which they say so: on one stream, as where no stream waits ahead.
        self.takes_in_order = not (self.is_host or is_ahead)
        self.lent_bytes = max(_LENT_BYTES_OF_HOST if self.is_host else _LENT_BYTES_OF_DEVICE, landed_bytes + 1)
        self.streams = Streams(driver)
        self.push_stream = self.streams.get(Role.PUSH)
        self.pull_stream = self.streams.get(Role.DOWN)
        self._beside: dict[tuple[Role, int, int], int] = {}  # by what for, the program's, and who uses it
        self.awaiting = [self.push_stream, self.pull_stream]  # streams that may wait for other ranks
        self.pull_streams = PullStreams(self._make_pull_stream, pull_budget or Budget(0))
        self._stream_numbers: dict[int, int] = {}  # of the program's streams
        self._num_told = 0  # values of which `stream_for_signal` was asked

    def stream_beside(self, role: Role, stream: int, user: object = None) -> int:
        """The stream of ours for pushes or pulls behind a stream of the program's. Where that may wait ahead, there is one for
        each, and one more for each ``user`` whose copies are not enqueued in the program's order.
        """
        if not self.landed_bytes:
            return self.push_stream if role is Role.PUSH else self.pull_stream
        key = role, stream, id(user)
        if key not in self._beside:
            made = self._beside[key] = self.streams.get(role, f"beside {len(self._beside)}")
            self.awaiting.append(made)
        return self._beside[key]

    def _make_pull_stream(self, number: int) -> int:
        made = self.streams.get(Role.DOWN, f"pulls {number}")
        self.awaiting.append(made)
        return made

    def stream_number(self, stream: int) -> int:
        """A number for a stream of the program's, from 1; 0 where there are too many."""
        number = self._stream_numbers.setdefault(stream, len(self._stream_numbers) + 1)
        return number if number <= _MOST_NUMBERED else 0

    def join(self) -> int:
        """The current stream, which is going to wait for other ranks."""
        stream = self.current_stream()
        if stream not in self.awaiting:
            self.awaiting.append(stream)
        return stream

    def stream_for_signal(self, stream: int) -> int:
        """Where to say that one more of the values that are lent at the same time is there, which a stream has made. A signal takes
        a stream 3 us, so who asks for the last value first would wait for those of all. Each stream has others for that of its
        own, or one would wait for what another one does.
        """
        self._num_told += 1
        place = self._num_told % (1 + _NUM_TELLING)
        if not (place and 0 < self.stream_number(stream) <= _MOST_TOLD_OF):
            return stream
        beside = self.streams.get(Role.PUSH, f"tells {place} of {stream}")
        self.events.at(stream).hold(beside)
        return beside

    def set_step(self, counter: Counter, step: int, stream: int) -> None:
        """Says behind a stream that a piece of a value is done. The word is set on a stream beside it, so that the next piece need
        not wait; where streams wait ahead, on the stream itself: the stream beside it serves all transfers, and would delay others.

        All pieces of a value are told of in the same place, or a late word of an earlier one would take back a later one's.
        """
        if not self.landed_bytes:
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

    def close(self) -> None:
        """Gives everything back; nothing may be under way."""
        self.direct.close()
        self.staged.close()
        self.pull_streams.close()
        self.streams.close()
        self.events.close()


def side_of(sides: Mapping[bool, Side], tensor: torch.Tensor, call: str) -> Side:
    """The side of a tensor. Raises a `ValueError` if there is none."""
    is_host = tensor.is_cpu
    side = sides.get(is_host)
    if side is None or (not is_host and tensor.get_device() != side.driver.device):
        own = "the CPU" if len(sides) == 1 else f"the CPU and cuda:{sides[False].driver.device}"
        raise ValueError(
            f"{call} was given a tensor on {tensor.device}, and the communicator was opened for {own}\n"
            "hint: P2P(device=...) opens it for another GPU"
        )
    return side
