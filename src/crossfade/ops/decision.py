"""What was decided for a bucket of shapes, and how: a value that goes to the other ranks and onto the disk as JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from crossfade.ops.candidate import Candidate

__all__ = ["Decision", "Source"]


class Source(StrEnum):
    """How a decision came about."""

    MODEL = "model"
    """Predicted times alone."""
    MEASURED = "measured"


@dataclass(frozen=True, slots=True)
class Decision:
    """Candidates, the best first: a shape of the bucket takes the first one that can do it.

    Attributes:
        order: the candidates, at least one.
        source: how they were ranked.
        times_us: of those that were measured, the slowest rank's median.
        notes: what was left out and why, as this rank knows it. They stay in the process.

    Raises:
        ValueError: there is no candidate, or a time is not finite and positive.
    """

    order: tuple[Candidate, ...]
    source: Source
    times_us: tuple[tuple[Candidate, float], ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.order:
            raise ValueError("a decision without a candidate\nhint: 'plain' can do everything")
        if not all(math.isfinite(time_us) and time_us > 0 for _, time_us in self.times_us):
            raise ValueError(f"measured times are finite and over 0, and these are {self.times_us!r}")

    def time_us(self, candidate: Candidate) -> float | None:
        """What was measured of a candidate."""
        return dict(self.times_us).get(candidate)

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold, and `from_data` reads."""
        return {
            "order": [str(candidate) for candidate in self.order],
            "source": str(self.source),
            "times_us": {str(candidate): time_us for candidate, time_us in self.times_us},
        }

    @classmethod
    def from_data(cls, data: Any) -> Decision:
        """Reads what `to_data` gave.

        Raises:
            ValueError: it is something else.
        """
        try:
            if not isinstance(data["order"], list):
                raise TypeError(f"its order is {data['order']!r}")
            return cls(
                tuple(Candidate.parse(text) for text in data["order"]),
                Source(data["source"]),
                tuple((Candidate.parse(text), float(time_us)) for text, time_us in data["times_us"].items()),
            )
        except (KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"this is no decision: {error!r}") from None
