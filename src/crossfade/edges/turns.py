"""Turns: several writers push large values into one reader, one after the other, in the order in which it uses them.

Copies that reach one device at once share its link, and the value that is needed first would come as late as the last. So a lane
may have *predecessors*: lanes of another writer to the same device of the same reader, whose value of each execution is used
before. (`crossfade.plan.turns` says which.) Every channel of a plan carries one value an execution, so the n-th value of one
channel belongs to the n-th of the other.

A lane that is another's predecessor says how far it is (`Progress`), by one word on the board and one counter of the device::

    bits 63 ... 32  how many values its channel has published, or is about to, modulo 2^32
    bits 31 ... 0   bit k: the value that came k before the last is a large one

The counter is set, behind the copy of each large value, to that value's number. It belongs to the lane and never begins anew, as
the counters of slots do when a lane gets longer ones: who waits may be far behind. The word is stored after that setting is
enqueued, so what a word says may be waited for (PL-5); and in one store, so nobody sees halves of two.

Who comes after looks at the word before it pushes its own large value n:

- It says that n is enqueued: the push stream waits for the counter, if that value is large and has not come yet.
- It does not: the push is held. The predecessor's writer rings when that changes. After the time that the push takes by itself it
  goes without waiting, so that nobody loses more by a predecessor that does not come than it could have gained.

A wait is only ever for what was enqueued before, so no order of turns can make a circle of waits, within a plan or across several.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from crossfade.device.signals import Counter
from crossfade.host.doorbell import Bell
from crossfade.host.semaphore import FENCE_AFTER_POST, full_fence

PROGRESS_BYTES = 64
"""Room for a lane's word, and for the byte with which those after it ask to be rung; a cache line of its own."""

_WORD_BYTES = 8
_MASK, _HALF = 0xFFFF_FFFF, 0x8000_0000
_NUM_REMEMBERED = 32


@dataclass(frozen=True, slots=True)
class TurnRules:
    """The rules by which a push has to wait, and for how long."""

    large_bytes: int  # shorter values neither wait nor are waited for
    link_gbs: float  # a push of so many bytes is held for no longer than they take at this rate, in 10^9 bytes a second

    def longest_hold_s(self, size_bytes: int) -> float:
        """How long a push may be held."""
        return size_bytes / (self.link_gbs * 1e9)


class Progress:
    """How far a lane's writer is: as it says, and as those after it see. It lies at ``offset`` of the board, a multiple of 8, so
    that the word is stored in one piece; ``counter`` is that of the lane's pushes, as this process's device sees it.
    """

    def __init__(self, board: mmap.mmap, offset: int, counter: Counter) -> None:
        self.counter = counter
        whole = memoryview(board)
        self._word = whole[offset : offset + _WORD_BYTES].cast("Q")
        self._wanted = whole[offset + _WORD_BYTES : offset + _WORD_BYTES + 1]
        self._fence = full_fence()
        self._large = 0

    # By the writer

    def tell(self, number: int, *, is_large: bool) -> None:
        """Says that a value is enqueued; each value in order, before it is published."""
        self._large = (self._large << 1 | is_large) & _MASK
        if FENCE_AFTER_POST:
            self._fence()
        self._word[0] = (number & _MASK) << 32 | self._large

    def take_wanted(self) -> bool:
        """Whether a writer asked to be rung since the last call; after a fence that follows `tell`."""
        if not self._wanted[0]:
            return False
        self._wanted[0] = 0
        self._fence()  # a writer that asks again from now on is seen next time, or seen asleep
        return True

    # By those after it

    def is_behind(self, number: int) -> bool:
        """Whether this value is not enqueued yet. If so, the writer rings when it says that something is."""
        if not self._is_behind(number):
            return False
        self._wanted[0] = 1
        self._fence()
        return self._is_behind(number)

    def _is_behind(self, number: int) -> bool:
        return ((self._word[0] >> 32) - number) & _MASK >= _HALF

    def is_coming(self, number: int) -> bool:
        """Whether this value is a large one that is enqueued and not there yet, as far as a cheap look tells."""
        word = self._word[0]
        age = ((word >> 32) - number) & _MASK
        return age < _NUM_REMEMBERED and bool(word >> age & 1) and not self.counter.has(number)


class Turns:
    """The turns of one channel, as its writer keeps them. One thread uses it."""

    def __init__(
        self,
        rules: TurnRules,
        num_sources: int,  # devices of the writer, over which the channel's lanes are spread in turn
        own: Mapping[int, Progress],  # by lane, where it says how far it is; those that are predecessors
        before: Mapping[int, Sequence[Progress]],  # by lane, its predecessors; those that have any
        after: Sequence[Bell],  # of the writers that come after, to be rung
        wake_in: Callable[[float], None],  # asks for another try to push, at the latest after so many seconds
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rules = rules
        self._num_sources = num_sources
        self._own = own
        self._before = before
        self._after = after
        self._wake_in = wake_in
        self._now_s = now_s
        self._fence = full_fence()
        self._held = (0, 0.0)  # the value that is held, or was last, and until when
        self._large: set[int] = set()  # lanes that carry a large part of the value that is being written

    def must_hold(self, number: int, lane_bytes: Mapping[int, int]) -> bool:
        """Whether value ``number`` (from 1) may not be pushed yet; if so, the loop that holds it is woken to try again.
        ``lane_bytes``: by device of the writer, what each of its lanes would carry.
        """
        longest = 0
        lines: list[Progress] = []
        for lane, before in self._before.items():
            size_bytes = lane_bytes.get(lane % self._num_sources, 0)
            if size_bytes >= self._rules.large_bytes:
                longest = max(longest, size_bytes)
                lines += before
        if not any([each.is_behind(number) for each in lines]):
            return False
        now_s = self._now_s()
        if self._held[0] != number:
            self._held = number, now_s + self._rules.longest_hold_s(longest)
        left_s = self._held[1] - now_s
        if left_s <= 0:
            return False
        self._wake_in(left_s)
        return True

    def in_turn(self, lanes: Iterable[int], number: int, size_bytes: int) -> list[int]:
        """The lanes that carry a value, those that have to wait behind those that have not: they share a stream."""
        return sorted(lanes, key=lambda lane: bool(self._coming(lane, number, size_bytes)))

    def wait(self, lane: int, number: int, size_bytes: int, stream: int) -> None:
        """Enqueues, before a lane's copy: wait for its turn."""
        for counter in self._coming(lane, number, size_bytes):
            counter.wait(stream, number)

    def _coming(self, lane: int, number: int, size_bytes: int) -> list[Counter]:
        if size_bytes < self._rules.large_bytes:
            return []
        return [each.counter for each in self._before.get(lane, ()) if each.is_coming(number)]

    def mark(self, lane: int, number: int, size_bytes: int, stream: int) -> None:
        """Enqueues, behind a lane's copy: say that it is there."""
        own = self._own.get(lane)
        if own is not None and size_bytes >= self._rules.large_bytes:
            own.counter.set(stream, number)
            self._large.add(lane)

    def tell(self, number: int) -> None:
        """The value is enqueued, with or without tensors, and is going to be published."""
        for lane, own in self._own.items():
            own.tell(number, is_large=lane in self._large)
        self._large.clear()

    def ring(self) -> None:
        """It is published: wakes the writers that hold a push."""
        if FENCE_AFTER_POST:
            self._fence()
        if any([own.take_wanted() for own in self._own.values()]):
            for bell in self._after:
                bell.ring_if_asleep()
