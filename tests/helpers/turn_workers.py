"""Actors whose pushes take turns whatever their length, so that small tensors show what large ones do."""

from __future__ import annotations

import os
from typing import Any

import torch

from crossfade.channels.turns import TurnRules, Turns
from crossfade.engines import device_turns
from tests.helpers.tensor_workers import TensorWorker

LINK_GBS = 0.04
"""A push of 40 KB is held for a millisecond at most, one of 8 MB for 0.2 s."""


class CountedTurns(Turns):
    """Counts the values of this process: those that were held, each once however often it was tried, and those that went."""

    num_held = num_told = 0

    _last_held = 0

    def must_hold(self, number: int, lane_bytes: Any) -> bool:
        is_held = super().must_hold(number, lane_bytes)
        if is_held and number != self._last_held:
            self._last_held = number  # values are asked for in their order
            CountedTurns.num_held += 1
        return is_held

    def tell(self, number: int) -> None:
        super().tell(number)
        CountedTurns.num_told += 1


class TurnWorker(TensorWorker):
    """As its base; all that it pushes waits for its turn."""

    def __init__(self) -> None:
        vars(device_turns).update(_RULES=TurnRules(1, LINK_GBS), Turns=CountedTurns)
        super().__init__()

    def num_held(self) -> int:
        """How many of its values were held until now."""
        return CountedTurns.num_held

    def num_told(self) -> int:
        """How many of its values went until now."""
        return CountedTurns.num_told

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
