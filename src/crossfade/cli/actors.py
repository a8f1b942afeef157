"""The actors of the commands. Their processes import this module and, with it, numpy only."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]


class Echo:
    """Gives back what it gets."""

    def echo(self, value: Any) -> Any:
        """The value itself."""
        return value


class Sender:
    """Makes an array of ``num_words`` for each execution; ``number`` tells senders apart."""

    def __init__(self, number: int, num_words: int) -> None:
        self._base = np.arange(num_words, dtype=np.uint32) * np.uint32(2 * number + 1)

    def make(self, execution: int) -> Words:
        """uint32[num_words], another one for each execution."""
        return self._base + np.uint32(execution)


class Receiver(Echo):
    """Works on arrays, ``num_passes`` times each, in integers that wrap: the result is exact, whatever the order of the sum."""

    def __init__(self, num_words: int, num_passes: int) -> None:
        self._scratch = np.empty(num_words, dtype=np.uint32)
        self._num_passes = num_passes

    def work(self, words: Words) -> int:
        """Scrambles the words and sums them up."""
        scratch = self._scratch
        np.copyto(scratch, words)
        for _ in range(self._num_passes):
            np.multiply(scratch, np.uint32(1664525), out=scratch)
            np.add(scratch, words, out=scratch)
        return int(scratch.sum(dtype=np.uint64))
