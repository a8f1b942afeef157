"""The few streams of ours that wait for long values which have been announced and have not come.

Where streams wait ahead, a stream of ours that waits for another rank may be held for long, and holds up what is behind it. So each
of these takes pulls of one kind only: of values that one stream of the other rank makes, in the order in which it makes them, into
tensors that one stream of this rank has given, in the order in which it gave them. Then a pull waits for nothing through those
before it that it would not wait for by itself.

There are few, since waits take hardware queues: of the 8 that CUDA gives a process by default, 7 can be held by streams that wait.
With the eighth everything stands still, whatever the priorities (measured on an H100; ``CUDA_DEVICE_MAX_CONNECTIONS`` sets how many
there are).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

_MOST: Final = 2
_LEFT: Final = 6
"""Hardware queues that are left to the program's streams, NCCL's, and others of ours."""


def num_pull_streams(num_queues: int) -> int:
    """How many such streams a process may have for a GPU with so many hardware queues."""
    return max(0, min(_MOST, num_queues - _LEFT))


class _Stream:
    """One of them. ``key``: whose values it takes; ``made``, ``given``: the place of the last one among them."""

    def __init__(self, stream: int) -> None:
        self.stream = stream
        self.key: tuple[int, int, int] | None = None
        self.made = self.given = 0
        self.is_copied: Callable[[], bool] = _yes

    def is_behind(self, made: int, given: int) -> bool:
        """Whether a value is behind all that it has left to copy, in both orders."""
        return self.is_copied() or (made > self.made and given > self.given)


def _yes() -> bool:
    return True


class PullStreams:
    """All of one GPU: at most ``num``; ``make`` makes a stream, by its number."""

    def __init__(self, make: Callable[[int], int], num: int) -> None:
        self._make = make
        self._num = num
        self._streams: list[_Stream] = []

    def take(self, key: tuple[int, int, int], made: int, given: int, is_copied: Callable[[], bool]) -> int | None:
        """The stream for a pull; None if the value has to come another way.

        ``key``: the rank that makes the value, its stream, and this rank's that gave the tensor; ``made``, ``given``: numbers that
        grow in the order of these streams; ``is_copied``: whether the value has been.
        """
        known = next((each for each in self._streams if each.key == key), None)
        found = known or self._idle()
        if found is None or not found.is_behind(made, given):
            return None
        found.key, found.made, found.given, found.is_copied = key, made, given, is_copied
        return found.stream

    def _idle(self) -> _Stream | None:
        found = next((each for each in self._streams if each.is_copied()), None)
        if found is None and len(self._streams) < self._num:
            found = _Stream(self._make(len(self._streams)))
            self._streams.append(found)
        return found
