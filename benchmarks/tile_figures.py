"""What follows from a measured row of ``benchmarks.tile_ops``: medians, ratios, the bound, how good the choice and the model
were.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Ratio, Series, ratio
from benchmarks.tile_rows import (
    AG,
    BASELINE_WAYS,
    CHUNKED,
    COPIES,
    CROSSFADE,
    CUBLAS,
    FUSED,
    NCCL,
    PARTS,
    SERIAL,
    SHARED,
    SIGNALED,
    Row,
)

CAPTURED, EAGER = "captured", "eager"
TILE_M, TILE_N = 128, 256
NUM_SMS = 132
"""Where the device does not say."""


@dataclass(frozen=True)
class Bound:
    """What no way takes less than: ``max(T_gemm + t_comm(last piece), t_gemm(first piece) + T_comm)``; of an all-gather, whose own
    rows are there at once, ``max(T_gemm, T_comm + t_gemm(last piece))``.

    Attributes:
        time_us: of it.
        num_rows: of a piece: one wave of tiles of 128 x 256, or a rank's block if that is less.
        by: the collective that was faster.
    """

    time_us: float
    num_rows: int
    by: str


@dataclass(frozen=True)
class Measured:
    """A row of the file.

    Attributes:
        row: its shape.
        sides: by name: blocks by mode, and errors.
        choice: of the tuner and the model.
        num_sms: of the device.
    """

    row: Row
    sides: Mapping[str, Mapping[str, Any]]
    choice: Mapping[str, Any]
    num_sms: int

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> Measured:
        """Reads a line of the file."""
        return cls(Row(**line["row"]), line["sides"], line["choice"], line["num_sms"] or NUM_SMS)

    # times

    def mode_of(self, name: str) -> str:
        """The mode whose figures count: captured, if that could be done."""
        return CAPTURED if self.sides.get(name, {}).get(CAPTURED) else EAGER

    def series(self, name: str, mode: str | None = None) -> Series:
        """The blocks of one side, without those of a wrong result."""
        side, found = self.sides.get(name, {}), Series()
        if side and "right" not in side["errors"]:
            for block in side.get(mode or self.mode_of(name), []):
                found.add(block)
        return found

    def us(self, name: str, mode: str | None = None) -> float | None:
        """The median of all batches."""
        summary = self.series(name, mode).summary()
        return None if summary is None else summary.median

    @property
    def baselines(self) -> list[str]:
        """Ways of torch and NCCL that worked."""
        candidates = [name for name in self.candidates if name.partition("(")[0] in BASELINE_WAYS]
        names = [SERIAL, FUSED, *self.chunked, *candidates]
        return [name for name in names if self.us(name) is not None]

    @property
    def chunked(self) -> list[str]:
        """Torch's product and collective in pieces, by their number."""
        return [name for name in self.sides if name.startswith(CHUNKED)]

    @property
    def candidates(self) -> list[str]:
        """All candidates that were measured, without those that write a shared output."""
        rest = {*PARTS, SERIAL, FUSED, SIGNALED, CROSSFADE}
        return [name for name in self.sides if name not in {*rest, *self.chunked} and not name.endswith(SHARED)]

    def fastest(self, names: Iterable[str]) -> str | None:
        """The name with the lowest median."""
        times = {name: time_us for name in names if (time_us := self.us(name)) is not None}
        return min(times, key=lambda name: times[name], default=None)

    # what follows

    def over(self, under: str | None, name: str = CROSSFADE) -> Ratio | None:
        """How many times faster ``name`` is than another one, block by block."""
        return None if under is None else ratio(self.series(under), self.series(name))

    @property
    def bound(self) -> Bound | None:
        """See `Bound`; with cuBLAS's product and the faster collective."""
        product_us, by = self.us(CUBLAS), self.fastest((NCCL, COPIES))
        if product_us is None or by is None:
            return None
        moved_us, row = self.us(by) or 0.0, self.row
        num_rows = max(self.num_sms // -(-row.n // TILE_N), 1) * TILE_M
        num_rows = min(num_rows, -(-row.m // row.num_ranks))
        share = num_rows / row.m
        if row.operator == AG:
            return Bound(max(product_us, moved_us + product_us * share), num_rows, by)
        return Bound(max(product_us + moved_us * share, product_us * share + moved_us), num_rows, by)

    def share_of_bound(self, name: str = CROSSFADE) -> float | None:
        """The bound over the time that was measured."""
        bound, time_us = self.bound, self.us(name)
        return None if bound is None or time_us is None else bound.time_us / time_us

    @property
    def fell_back(self) -> bool:
        """Whether the tuner took one of torch's ways."""
        return str(self.choice["chosen"]).partition("(")[0] in BASELINE_WAYS

    def model_error(self, name: str, mode: str) -> float | None:
        """The model's time over the measured one, less 1."""
        predicted, time_us = self.choice["predicted_us"].get(name, {}).get(mode), self.us(name, mode)
        return None if predicted is None or time_us is None else predicted / time_us - 1

    def untuned_speed(self, mode: str) -> float | None:
        """The tuned choice's time over that of the model's."""
        tuned, untuned = (self.us(str(self.choice[key]), mode) for key in ("chosen", "untuned"))
        return None if tuned is None or untuned is None else tuned / untuned

    @property
    def wrong(self) -> list[str]:
        """Sides whose outputs were wrong, and why."""
        return [f"{name}: {side['errors']['right']}" for name, side in self.sides.items() if "right" in side["errors"]]


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of those that there are."""
    found = [value for value in values if value is not None]
    return math.exp(sum(map(math.log, found)) / len(found)) if found else None


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that there are."""
    found = [value for value in values if value is not None]
    return statistics.median(found) if found else None
