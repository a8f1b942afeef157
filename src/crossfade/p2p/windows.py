"""Windows of one rank towards another one: their counters, and what is kept until both sides have done with a window."""

from __future__ import annotations

from collections import deque
from typing import Final

from crossfade.device.driver import Driver
from crossfade.device.signals import Counter, HostBoard
from crossfade.host.memory import Memory
from crossfade.p2p.board import NUM_WINDOWS
from crossfade.p2p.cells import Cell, Cells
from crossfade.p2p.memory import OpenedMemories, Shared
from crossfade.p2p.transfer import OpenWindow, Receive, Send

_NUM_KEPT: Final = 16


class Counters:
    """The counters of one rank's windows towards another one, as this process's device sees them."""

    def __init__(self, driver: Driver, memory: Memory, offset: int, label: str) -> None:
        self._board = HostBoard(driver, memory, 2 * NUM_WINDOWS, label, offset)
        self._label = label
        self._made: dict[int, Counter] = {}

    def ready(self, word: int) -> Counter:
        """Says that the window's memory may be read, or written."""
        return self._made.get(word) or self._make(word, f"ready[{word}] of {self._label}")

    def done(self, word: int) -> Counter:
        """Says that it has been."""
        return self._made.get(word + NUM_WINDOWS) or self._make(word + NUM_WINDOWS, f"done[{word}] of {self._label}")

    def _make(self, index: int, label: str) -> Counter:
        return self._made.setdefault(index, self._board.counter(index, label))

    def all(self) -> list[Counter]:
        """Those that a stream here may wait for. Any thread may ask."""
        return list(self._made.values())

    def close(self) -> None:
        """Nothing may wait for a counter any more. Idempotent."""
        self._made.clear()
        self._board.close()


class Windows:
    """This rank's windows towards one other rank."""

    def __init__(self, counters: Counters) -> None:
        self.counters = counters
        self._free = list(range(NUM_WINDOWS))
        self._uses = [0] * NUM_WINDOWS
        self._open: deque[OpenWindow] = deque()
        self.num_lent = 0  # of the open ones, those of values that were announced where they lie

    def has_free(self, *, is_urgent: bool = False) -> bool:
        """Whether one can be opened. Some are kept for what is urgent: values whose receives have begun, which close soon, whatever
        waits in all the others.
        """
        num_kept = 0 if is_urgent else _NUM_KEPT
        if len(self._free) <= num_kept:
            self.collect(is_thorough=True)
        return len(self._free) > num_kept

    @property
    def are_few_free(self) -> bool:
        """Whether they may run out before the other rank's host looks again."""
        return 2 * len(self._free) < NUM_WINDOWS

    def open(
        self, num_steps: int = 1, number: int = 0, send: Send | None = None, cell: Cell | None = None
    ) -> OpenWindow:
        """Opens one, where `has_free` said yes. ``ready`` comes to its value in so many steps."""
        word = self._free.pop()
        uses = self._uses[word] = self._uses[word] + num_steps
        window = OpenWindow(word, uses, number, send, cell)
        self._open.append(window)
        self.num_lent += window.is_of_lent
        return window

    def announced(self, number: int) -> OpenWindow | None:
        """The open window of an announcement."""
        return next((window for window in self._open if window.number == number), None)

    def collect(self, *, is_thorough: bool = False) -> None:
        """Closes the oldest windows, as far as both sides have done with them; all such, where it is thorough."""
        opened = self._open
        while opened and self._is_over(opened[0]):
            self._close(opened.popleft())
        if is_thorough:
            left, self._open = self._open, deque()
            for window in left:
                if self._is_over(window):
                    self._close(window)
                else:
                    self._open.append(window)

    def _is_over(self, window: OpenWindow) -> bool:
        """A word begins anew only when its counters have come: of two streams the later one might be quicker."""
        counters, word = self.counters, window.word
        if not counters.ready(word).has(window.uses):
            return False
        return window.is_void or (counters.done(word).has(window.uses) and _is_copied_out(window.receive))

    def _close(self, window: OpenWindow) -> None:
        self._free.append(window.word)
        self.num_lent -= window.is_of_lent
        if window.cell is not None:
            window.cell.release()

    def give_up(self) -> None:
        """The other rank is gone, and this side's streams have done with it: closes all."""
        while self._open:
            self._close(self._open.popleft())


def _is_copied_out(receive: Receive | None) -> bool:
    """Whether a receive has copied its value out of its cell. If it failed, the other rank may still write there."""
    return receive is None or (receive.is_enqueued and receive.error is None and receive.is_copied())


class Ends:
    """Both ranks' windows, this one's memory that the other one reaches, and that one's, of one kind."""

    def __init__(
        self, shared: Shared, short: Shared, own: Counters, theirs: Counters, memories: OpenedMemories
    ) -> None:
        self.shared = shared
        self.short = short  # for short values
        self.windows = Windows(own)
        self.theirs = theirs
        self.memories = memories

    def take_cell(self, cells: Cells, size_bytes: int, *, is_urgent: bool) -> Cell | None:
        """See `Cells.take`; cells of values that both sides have done with are given back first where there is none."""
        cell = cells.take(size_bytes, is_urgent=False)
        if cell is None:
            self.windows.collect(is_thorough=True)
            cell = cells.take(size_bytes, is_urgent=is_urgent)
        return cell

    def signals(self) -> list[Counter]:
        """What the other rank sets and streams here may wait for. Any thread may ask."""
        return [*self.windows.counters.all(), *self.theirs.all()]

    def close(self) -> None:
        self.windows.give_up()
        self.memories.close()
        self.windows.counters.close()
        self.theirs.close()
