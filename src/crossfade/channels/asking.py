"""``all`` and ``any`` of calls each of which has to be made, whatever the others say."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["all_of", "any_of"]


def all_of(answers: Iterable[bool]) -> bool:
    """Whether all say yes; all are asked."""
    return all(tuple(answers))


def any_of(answers: Iterable[bool]) -> bool:
    """Whether any says yes; all are asked."""
    return any(tuple(answers))
