"""Actors whose pushes take turns whatever their length, so that small tensors show what large ones do."""

from __future__ import annotations

import os
from typing import Any

import torch

from crossfade.edges.turns import TurnRules, Turns
from crossfade.engines import device_turns
from tests.helpers.tensor_workers import TensorWorker

LINK_GBS = 0.04
"""A push of 40 KB is held for a millisecond at most, one of 8 MB for 0.2 s."""


class CountedTurns(Turns):
    """Counts the values of this process that were held, each once however often it was tried."""

    num_held = 0
    book = ""
    """A file that gets a byte for each value that goes, if there is one: who looks there wakes nobody, as a call would."""

    _last_held = 0

    def must_hold(self, number: int, lane_bytes: Any) -> bool:
        is_held = super().must_hold(number, lane_bytes)
        if is_held and number != self._last_held:
            self._last_held = number  # values are asked for in their order
            CountedTurns.num_held += 1
        return is_held

    def tell(self, number: int) -> None:
        super().tell(number)
        if CountedTurns.book:
            with open(CountedTurns.book, "ab") as book:
                book.write(b".")


class TurnWorker(TensorWorker):
    """As its base; all that it pushes waits for its turn."""

    def __init__(self) -> None:
        vars(device_turns).update(_RULES=TurnRules(1, LINK_GBS), Turns=CountedTurns)
        super().__init__()

    def num_held(self) -> int:
        """How many of its values were held until now."""
        return CountedTurns.num_held

    def keep_book(self, path: str) -> None:
        """From now on; not at all where the path is empty."""
        CountedTurns.book = path

    def pid(self) -> int:
        return os.getpid()

    def fill(self, number: int, size: int = 5_000, pipe: str = "") -> Any:
        """Many times one number; once somebody has opened and closed the named pipe, if there is one."""
        if pipe:
            with open(pipe) as file:
                file.read()
        return torch.full((size,), number)

    def pass_on(self, value: Any) -> Any:
        return value + 1

    def firsts(self, *values: Any) -> list[int]:
        return [int(value[0]) for value in values]
