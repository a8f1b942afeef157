"""Stretches of time, each a start and an end in microseconds: their union, and what of one lies in another. O(n log n)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of spans, as spans that neither touch nor overlap, in order."""
    union: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        elif end > start:
            union.append((start, end))
    return union


def without(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """What of the merged ``spans`` no one of the merged ``others`` covers."""
    left: list[tuple[float, float]] = []
    place = 0
    for start, end in spans:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < end:
            if others[at][0] > start:
                left.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < end:
            left.append((start, end))
    return left


def length_us(spans: Iterable[tuple[float, float]]) -> float:
    """How long merged spans are together."""
    return sum((end - start for start, end in spans), 0.0)


def union_us(spans: Iterable[tuple[float, float]]) -> float:
    """For how long at least one of them runs."""
    return length_us(merged(spans))


def common_us(spans: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float:
    """For how long merged spans of both kinds run at once."""
    return length_us(spans) - length_us(without(spans, others))
