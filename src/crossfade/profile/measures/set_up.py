"""No measures, but what the processes do together before and after them."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from crossfade.profile.context import Context, Told
from crossfade.profile.steps import Step

__all__ = ["close", "join"]


def join(context: Context, step: Step) -> Generator[Any, Told, None]:
    """Opens NCCL among all ranks; ``work`` is the path by which they find each other."""
    context.bench.join(step.work, context.rank, context.num_ranks)
    yield None


def close(context: Context, step: Step) -> Generator[Any, Told, None]:
    """Gives everything back."""
    yield from context.close()
