"""What can be measured, one idea a file. Each measure is a generator that every rank of its step runs (see ``context.py``)."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from typing import Any

from crossfade.profile.context import Context, Measure, Told
from crossfade.profile.measures.beside import beside
from crossfade.profile.measures.launch import launch
from crossfade.profile.measures.signals import signals
from crossfade.profile.measures.transfers import transfers
from crossfade.profile.steps import Step

__all__ = ["MEASURES"]


def join(context: Context, step: Step) -> Generator[Any, Told, None]:
    """Measures nothing: opens NCCL among all ranks; ``work`` is the path by which they find each other."""
    context.bench.join(step.work, context.rank, context.num_ranks)
    yield None


MEASURES: Mapping[str, Measure] = {
    "launch": launch,
    "signals": signals,
    "transfers": transfers,
    "beside": beside,
    "join": join,
    "close": lambda context, step: context.close(),
}
"""By the name that steps have for them."""
