"""Actors whose pushes take turns whatever their length, so that small tensors show what large ones do."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from crossfade.channels.turns import TurnRules, Turns
from crossfade.engines import device_turns
from tests.helpers.tensor_workers import TensorWorker

LINK_GBS = 0.04
"""A push of 40 KB is held for a millisecond at most, one of 8 MB for 0.2 s."""


class CountedTurns(Turns):
    """Notes which values were held."""

    held: set[tuple[int, int]]

    def must_hold(self, number: int, lane_bytes: Any) -> bool:
        is_held = super().must_hold(number, lane_bytes)
        if is_held:
            self.held.add((id(self), number))
        return is_held


class TurnWorker(TensorWorker):
    """As its base; all that it pushes waits for its turn."""

    def __init__(self) -> None:
        CountedTurns.held = set()
        vars(device_turns).update(_RULES=TurnRules(1, LINK_GBS), Turns=CountedTurns)
        super().__init__()

    def num_held(self) -> int:
        """How many of its values were held until now."""
        return len(CountedTurns.held)

    def pid(self) -> int:
        return os.getpid()

    def fill(self, number: int, size: int = 5_000, pause_s: float = 0.0) -> Any:
        time.sleep(pause_s)
        return torch.full((size,), number)

    def pass_on(self, value: Any) -> Any:
        return value + 1

    def firsts(self, *values: Any) -> list[int]:
        return [int(value[0]) for value in values]
