"""The doctor's program as a `Timeline`, the type of predictions and of graphs' own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from crossfade.plan.spans import COMMUNICATE, COMPUTE, WAIT, Span
from crossfade.plan.timeline import Timeline
from crossfade.profile.doctor.build import Traced
from crossfade.profile.doctor.diagnosis import Report
from crossfade.profile.doctor.program import Program
from crossfade.profile.doctor.replay import Replay, replay
from crossfade.profile.traces.events import ActivityKind

_KINDS = {
    ActivityKind.COMPUTE: COMPUTE,
    ActivityKind.COMMUNICATION: COMMUNICATE,
    ActivityKind.COPY: COMMUNICATE,
}


def replayed(traced: Traced, changed: Program, name: str) -> Timeline | None:
    """The steps as the replay of a changed program has them; None if it has other works than the traced one. An actor is a rank, an
    execution a step; copies of the host's memory communicate.
    """
    if len(changed.works) != len(traced.program.works):
        return None
    return Timeline.of(name, spans_of(traced, replay(changed)))


def one_step(report: Report) -> list[Timeline]:
    """What runs from the end of one step to that of the next, in the middle of the trace; and the same with the first fix. Both are
    replayed without the profiler's time, of which gains are shares.

    Each begins at 0, and is one execution, although the host may be steps ahead meanwhile.
    """
    programs = {"without the profiler": report.untraced.program}
    for diagnosis in report.diagnoses[:1]:
        if not diagnosis.is_remark:
            programs["with the fix"] = diagnosis.finding.change(report.untraced.program)
    shown = [replayed(report.traced, program, name) for name, program in programs.items()]
    return [_between_steps(timeline) for timeline in shown if timeline is not None]


def _between_steps(timeline: Timeline) -> Timeline:
    ends: dict[int, float] = {}
    for span in timeline.spans:
        if span.kind != WAIT:
            ends[span.execution] = max(ends.get(span.execution, 0.0), span.end_us)
    steps = sorted(ends)  # those in which a GPU did something
    place = len(steps) // 2
    step = steps[place]
    begin, end = ends[steps[place - 1]] if place else 0.0, ends[step]
    inside = [
        replace(span, execution=step, start_us=max(span.start_us, begin) - begin, end_us=min(span.end_us, end) - begin)
        for span in timeline.spans
        if span.start_us < end and span.end_us > begin
    ]
    return Timeline.of(timeline.name, inside)


def spans_of(traced: Traced, run: Replay) -> Iterator[Span]:
    """Works on their streams, and the host's calls that wait for the GPU, at the times that a run of the program has.

    Work of a stream runs in order: where a trace has the next one begin a little before the end of the one before, it is cut.
    """
    free_us: dict[int, float] = {}
    for number, work in enumerate(traced.program.works):
        activity = traced.activities[number]
        label = traced.traces[work.rank].label
        start_us = max(run.starts_us[number], free_us.get(work.lane, 0.0))
        times = start_us, max(run.ends_us[number], start_us)
        free_us[work.lane] = times[1]
        lane, kind = f"stream {activity.stream}", _KINDS[work.kind]
        yield Span(label, lane, activity.short_name, "", kind, work.step, *times, activity.num_bytes)
    for number, call in enumerate(traced.program.calls):
        if call.waits:
            name, label = traced.calls[number].name, traced.traces[call.rank].label
            times = run.call_starts_us[number], run.call_ends_us[number]
            yield Span(label, "host", name, "", WAIT, call.step, *times)
