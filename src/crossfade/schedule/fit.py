"""The cost line through measurements, some of which are outliers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

NEGLIGIBLE_US = 1e-3
"""Under the clock's resolution: differences of this size between measurements mean nothing."""


def fit_line(points: Iterable[tuple[float, float]]) -> tuple[float, float]:
    """The cost line ``a + b * x`` that is closest to measurements, outliers or not.

    It minimises the sum of ``abs(a + b * x - y) / y`` (least absolute deviations, relative) over a >= 0 and b >= 0. Relative,
    because sizes range over seven decades: a microsecond is much for 1 byte and nothing for 64 MB. Absolute, because timings have
    long tails. For n points it takes O(n log n).

    Points are (size in bytes, time in us), in any order. Returns (a in us, b in us per byte); b is 0 when all sizes are the same.
    """
    points = list(points)
    if not points:
        raise ValueError("there is nothing to fit a line to\nhint: give at least one (bytes, us) pair")
    for x, y in points:
        if not (math.isfinite(x) and math.isfinite(y) and x >= 0 and y >= 0):
            raise ValueError(f"({x!r}, {y!r}) is no measurement\nhint: sizes and times are finite and not negative")
    b = _argmin(lambda b: _misfit(points, _best_offset(points, b), b), 0.0, _greatest_slope(points))
    return _best_offset(points, b), b


def _greatest_slope(points: Sequence[tuple[float, float]]) -> float:
    """What the best slope cannot exceed, us per byte; 0 when all sizes are the same.

    The best line goes through two of the points, or (where a = 0) through one and the origin. The slope between any two
    points is a mean of slopes between neighbouring sizes, so the greatest of those bounds it.
    """
    least, most = {0.0: 0.0}, {0.0: 0.0}
    for x, y in points:
        least[x] = min(y, least.get(x, y))
        most[x] = max(y, most.get(x, y))
    if len({x for x, _ in points}) == 1:
        return 0.0
    return max(0.0, *((most[x1] - least[x0]) / (x1 - x0) for x0, x1 in pairwise(sorted(least))))


def _weight(y: float) -> float:
    return 1 / max(y, NEGLIGIBLE_US)


def _best_offset(points: Sequence[tuple[float, float]], b: float) -> float:
    """The a >= 0 that minimises the misfit for this b: the weighted median of what the slope leaves over."""
    rests = sorted((y - b * x, _weight(y)) for x, y in points)
    half = sum(weight for _, weight in rests) / 2
    reached = 0.0
    for rest, weight in rests:
        reached += weight
        if reached >= half:
            return max(0.0, rest)
    return max(0.0, rests[-1][0])


def _misfit(points: Sequence[tuple[float, float]], a: float, b: float) -> float:
    return math.fsum(abs(a + b * x - y) * _weight(y) for x, y in points)


def _argmin(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a convex function is least on [low, high], by golden section, to about 13 digits."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    finest = 1e-18 * (high - low)
    while high - low > max(finest, 1e-13 * high):
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
        if not low < left < right < high:
            break
    return min((low, left, right, high), key=function)
