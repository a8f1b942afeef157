"""When collectives ran, and how much of that was hidden. Pure, but for the clock at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from crossfade.intervals import merged


@dataclass(frozen=True, slots=True)
class CollectiveSpan:
    """One collective of one part, from its start until the part could go on.

    Attributes:
        part: the batch, from 0.
        name: of the method or operator.
        size_bytes: of the tensor that this rank gave.
        begin_us: when what it reads was there, from the start of the run.
        end_us: when its output was there for the part.
    """

    part: int
    name: str
    size_bytes: int
    begin_us: float
    end_us: float


def exposed_us(spans: Sequence[CollectiveSpan], num_parts: int, end_us: float) -> float:
    """How long every part waited for a collective, or had ended: nothing computed then.

    A part that has ended counts as waiting from its last span to ``end_us`` only where another one waits.
    """
    edges = list[tuple[float, int]]()
    for part in range(num_parts):
        for begin, end in merged((span.begin_us, span.end_us) for span in spans if span.part == part):
            edges += [(begin, 1), (end, -1)]
    edges.sort()
    exposed, waiting, since = 0.0, 0, 0.0
    for at, change in edges:
        if waiting == num_parts:
            exposed += min(at, end_us) - since
        waiting += change
        since = at
    return exposed


Mark = Any
"""A time on the current stream (an event), or on the CPU's clock (nanoseconds)."""


def mark(*, on_gpu: bool) -> Mark:
    """Now: on a GPU, when the current stream comes to this place."""
    if not on_gpu:
        return time.perf_counter_ns()
    import torch

    cuda: Any = torch.cuda
    event = cuda.Event(enable_timing=True)
    event.record()
    return event


def us_between(begin: Mark, end: Mark) -> float:
    """Microseconds. Waits for the GPU."""
    if isinstance(begin, int):
        return float(end - begin) / 1e3
    end.synchronize()
    return float(begin.elapsed_time(end)) * 1e3
