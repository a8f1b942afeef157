"""The program as it runs without the profiler, which takes the host some time for each operator and call that it keeps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from crossfade.profile.doctor.build import Traced
from crossfade.profile.doctor.changes import without_profiler
from crossfade.profile.doctor.program import Program
from crossfade.profile.doctor.replay import replay, step_lengths

EVENT_US = 2.5  # for each event, where nothing was measured: 1.6 to 4.6 follow from programs beside H100
MOST_EVENT_US = 4.5
_OWN = 0.5  # of a host's time at least, where nothing was measured: 0.63 to 1.0 was seen
_MOST_MEASURED_US = 16.0  # Python is called at each event of `crossfade.record`, and at each function with stacks
_LEAST_OWN = 0.2
_NEAR = 0.01  # so exactly is the measured step met
_NUM_HALVINGS = 7


@dataclass(frozen=True)
class Untraced:
    """A program without the profiler.

    Attributes:
        program: as it runs then, as far as is known.
        lighter: the same, with the most that a profiler is known to take; the same program where steps were measured.
        event_us: what the profiler is taken to need for each event.
        measured_us: how long a step took that was not traced; 0 where none was measured.
        step_ends_us: when each of its steps ends.
    """

    program: Program
    lighter: Program
    event_us: float
    measured_us: float
    step_ends_us: Sequence[float]

    @property
    def step_us(self) -> float:
        """How long its median step is."""
        return median(step_lengths(self.step_ends_us))


def untraced(traced: Traced) -> Untraced:
    """Takes away what the profiler needs for each event: so much that steps are as long as those that were not traced."""
    program = traced.program
    measured = [trace.record.untraced_us for trace in traced.traces if trace.record is not None]
    measured_us = min(
        filter(None, measured), default=0.0
    )  # a rank that begins early waits for the others in its collectives
    if not measured_us:
        likely, lighter = (without_profiler(program, event_us, _OWN) for event_us in (EVENT_US, MOST_EVENT_US))
        return Untraced(likely, lighter, EVENT_US, 0.0, replay(likely).step_ends_us)
    event_us = _event_us(lambda one: _step_us(without_profiler(program, one, _LEAST_OWN)), measured_us)
    found = without_profiler(program, event_us, _LEAST_OWN)
    return Untraced(found, found, event_us, measured_us, replay(found).step_ends_us)


def _step_us(program: Program) -> float:
    return median(step_lengths(replay(program).step_ends_us))


def _event_us(step_us: Callable[[float], float], measured_us: float) -> float:
    """What each event takes for a step to be as long as measured; no further from `EVENT_US` than that needs.

    Where the GPU bounds the step, any figure does, and where no figure does, the nearest is taken.
    """
    usual_us = step_us(EVENT_US)
    if abs(usual_us - measured_us) <= _NEAR * measured_us:
        return EVENT_US
    is_dearer = usual_us > measured_us
    near, far = EVENT_US, _MOST_MEASURED_US if is_dearer else 0.0
    limit_us = step_us(far)
    goal_us = max(measured_us, limit_us * (1 + _NEAR)) if is_dearer else min(measured_us, limit_us * (1 - _NEAR))
    if is_dearer == (usual_us <= goal_us):
        return near
    for _ in range(_NUM_HALVINGS):
        middle = (near + far) / 2
        is_met = step_us(middle) <= goal_us if is_dearer else step_us(middle) >= goal_us
        near, far = (near, middle) if is_met else (middle, far)
    return far
