"""The processes of crew tests: real ones, whose GPUs have a clock and nothing else, and whose measures misbehave."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Generator, Sequence
from typing import Any

from crossfade.profile import worker
from crossfade.profile.context import Context, Measure, Told
from crossfade.profile.measures import MEASURES
from crossfade.profile.steps import Step
from tests.helpers.clocked import Clocked
from tests.helpers.clocked_crew import ClockedBench

Run = Generator[Any, Told, Any]


def meets(context: Context, step: Step) -> Run:
    """Three times; gives what everybody said, and what the shared gate then is."""
    seen = []
    for number in range(3):
        told = yield [context.rank, number]
        gate = int.from_bytes(os.pread(context.shared[0].fd, 4, 0), sys.byteorder)
        seen.append([sorted(told.items()), gate, context.num_meetings])
    return seen


def raises(context: Context, step: Step) -> Run:
    yield None
    if context.rank == 1:
        raise ValueError("the second one is bad")
    yield None


def dies(context: Context, step: Step) -> Run:
    yield None
    if context.rank == 1:
        print("about to go", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    yield None


def hangs(context: Context, step: Step) -> Run:
    yield None
    if context.rank == 1:
        threading.Event().wait()
    yield None


def pids(context: Context, step: Step) -> Run:
    told = yield os.getpid()
    return list(told.values())


OWN: dict[str, Measure] = {"meets": meets, "raises": raises, "dies": dies, "hangs": hangs, "pids": pids}


def main(fds: Sequence[int], rank: int, num_ranks: int) -> None:
    worker.main(fds, rank, num_ranks, lambda device: ClockedBench(Clocked(), device), {**MEASURES, **OWN})
