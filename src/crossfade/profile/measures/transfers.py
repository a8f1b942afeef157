"""How long one transfer takes, or several that begin at the same time, for each size."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from crossfade.profile.carriers import parts_of
from crossfade.profile.context import Context, Told
from crossfade.profile.steps import Step
from crossfade.profile.timing import Load, measure_parts

__all__ = ["transfers"]


def transfers(context: Context, step: Step) -> Generator[Any, Told, list[list[float]]]:
    """(Bytes, microseconds until the last of the transfers is done) for each size."""
    parts = yield from parts_of(context, step)
    rows = []
    for size_bytes in step.sizes:
        times_us = yield from measure_parts(context, [Load(part, 1, size_bytes) for part in parts])
        rows.append([size_bytes, max(times_us)])
    return rows
