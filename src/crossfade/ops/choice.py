"""From the candidate that a caller gave to the function that does it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from crossfade.ops.candidate import PLAIN, Candidate
from crossfade.ops.job import Way

__all__ = ["way_of"]


def way_of(candidate: Candidate | str | None, ways: Mapping[str, Way]) -> Way:
    """The way, with its parameters; None stands for `PLAIN`.

    Args:
        candidate: a candidate, or its text.
        ways: of one operator, by name.

    Raises:
        ValueError: there is no such candidate, or not for this operator.
    """
    if candidate is None:
        candidate = PLAIN
    elif isinstance(candidate, str):
        candidate = Candidate.parse(candidate)
    way = ways.get(candidate.name)
    if way is None:
        raise ValueError(f"this operator cannot be done by '{candidate}'\nhint: one of {', '.join(ways)}")
    return partial(way, **candidate.arguments)
