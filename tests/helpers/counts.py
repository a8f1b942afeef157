"""How often something is tried: in ``make test``, and in ``make soak``, which runs the same tests by another profile."""

from __future__ import annotations

from hypothesis import settings

_IS_SOAK = settings().max_examples > 1_000


def num(few: int, many: int) -> int:
    return many if _IS_SOAK else few
