"""The few streams of ours that wait for long values which have been announced and have not come.

Where streams wait ahead, a stream of ours that waits for another rank may be held for long, and holds up what is behind it. So each
of these takes pulls of one kind only: of values that one stream of the other rank makes, in the order in which it makes them, into
tensors that one stream of this rank has given, in the order in which it gave them. Then a pull waits for nothing through those
before it that it would not wait for by itself.

There are few, since waits take hardware queues: of the 8 that CUDA gives a process by default, 7 can be held by streams that wait.
With the eighth everything stands still, whatever the priorities (measured on an H100; ``CUDA_DEVICE_MAX_CONNECTIONS`` sets how many
there are). So the communicators of a process share a budget.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

_MOST: Final = 2
_LEFT: Final = 6
"""Hardware queues that are left to the program's streams, NCCL's, and others of ours."""


class Budget:
    """How many pull streams a process may have for a GPU, all its communicators together: 2, or less of few hardware queues."""

    def __init__(self, num_queues: int) -> None:
        self._num_left = max(0, min(_MOST, num_queues - _LEFT))
        self._lock = threading.Lock()

    def take(self) -> bool:
        """Takes the room of one stream; False if none is left."""
        with self._lock:
            is_left = self._num_left > 0
            self._num_left -= is_left
            return is_left

    def give_back(self, num: int) -> None:
        """Returns the room of so many streams to the budget."""
        with self._lock:
            self._num_left += num


class _Stream:
    """A pull stream. ``key``: whose values it takes; ``number``, ``receive_number``: the place of the last of them."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.key: tuple[int, int, int] | None = None
        self.number = self.receive_number = 0
        self.is_copied: Callable[[], bool] = _yes

    def is_behind(self, number: int, receive_number: int) -> bool:
        """Whether a value is behind all that the stream has left to copy, in both orders."""
        return self.is_copied() or (number > self.number and receive_number > self.receive_number)


def _yes() -> bool:
    return True


class PullStreams:
    """Those of one communicator on one GPU, as far as the budget goes; ``make`` makes a stream, by its number."""

    def __init__(self, make: Callable[[int], int], budget: Budget) -> None:
        self._make = make
        self._budget = budget
        self._streams: list[_Stream] = []

    def take(
        self, key: tuple[int, int, int], number: int, receive_number: int, is_copied: Callable[[], bool]
    ) -> int | None:
        """Returns the stream on which to enqueue a pull, or None if none of these may take it.

        ``key``: the rank that makes the value, its stream, and this rank's that gave the tensor; ``number``, ``receive_number``: of
        the announcement and of the receive, which grow in the order of these streams; ``is_copied``: whether the value has been.
        """
        known = next((each for each in self._streams if each.key == key), None)
        found = known or self._idle()
        if found is None or not found.is_behind(number, receive_number):
            return None
        found.key, found.number, found.receive_number, found.is_copied = key, number, receive_number, is_copied
        return found.stream

    def _idle(self) -> _Stream | None:
        found = next((each for each in self._streams if each.is_copied()), None)
        if found is None and self._budget.take():
            found = _Stream(self._make(len(self._streams)))
            self._streams.append(found)
        return found

    def close(self) -> None:
        """Forgets the streams, which their owner destroys. Idempotent."""
        self._budget.give_back(len(self._streams))
        self._streams.clear()
