"""The process of one GPU, from its own side: runs the measures that it is told to, and meets the others through who started it.

=========================================  =============================================
it gets                                    it answers
=========================================  =============================================
``step``, ``num_meetings``                 ``say`` (a meeting), ``done`` or ``failed``
``told``: what all said at a meeting       the next of these
the end of the line                        nothing: it ends
=========================================  =============================================
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from crossfade.host.memory import Memory
from crossfade.host.processes import die_on_hangup
from crossfade.profile.bench import Bench
from crossfade.profile.context import Context, Measure
from crossfade.profile.lines import Line
from crossfade.profile.measures import MEASURES
from crossfade.profile.steps import Step

MakeBench = Callable[[int], Bench]
"""Of the device's index in this process."""


def main(
    fds: Sequence[int],
    rank: int,
    num_ranks: int,
    make_bench: MakeBench | None = None,
    measures: Mapping[str, Measure] = MEASURES,
) -> None:
    """Runs in the new process until the line ends.

    ``fds``: the line, the lifeline, and the shared memory (see `crossfade.profile.context.make_shared`). ``rank`` is the device's
    number too. ``make_bench`` is None for a GPU.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches who started this, and that ends it
    line_fd, lifeline, *shared = fds
    die_on_hangup(lifeline)
    line = Line(line_fd)
    try:
        context = Context((make_bench or gpu_bench)(rank), rank, num_ranks, [Memory(fd) for fd in shared])
    except Exception as error:
        line.send(failed=_headline(error))
        return
    line.send(done=None)
    serve(line, context, measures)


def gpu_bench(device: int) -> Bench:
    """That of a GPU."""
    from crossfade.profile.gpu import GpuBench

    return GpuBench(device)


def serve(line: Line, context: Context, measures: Mapping[str, Measure]) -> None:
    """Runs steps until the line ends, or one fails: what a failed one has left on the device is not worth saving."""
    while (message := line.receive()) is not None:
        context.num_meetings = message["num_meetings"]
        step = msgspec.convert(message["step"], Step)
        try:
            result = _run(line, context, measures[step.measure], step)
        except Exception as error:
            line.send(failed=_headline(error))
            return
        line.send(done=result)


def _headline(error: Exception) -> str:
    return "".join(traceback.format_exception_only(error)).partition("\n")[0]


def _run(line: Line, context: Context, measure: Measure, step: Step) -> Any:
    """Goes through the measure's meetings."""
    running = measure(context, step)
    try:
        said = next(running)
        while True:
            line.send(say=said)
            message = line.receive()
            if message is None:
                raise EOFError("the calibration has ended")
            context.num_meetings += 1
            said = running.send({int(rank): value for rank, value in message["told"].items()})
    except StopIteration as stop:
        return stop.value
