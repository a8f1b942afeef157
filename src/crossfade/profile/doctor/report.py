"""A diagnosis as JSON, and as what the HTML page shows. (The terminal's report is made of the same figures, in ``cli``.)"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from crossfade.profile.doctor.diagnosis import Diagnosis, Gain, Report
from crossfade.profile.doctor.metrics import collective_metrics, rank_metrics
from crossfade.profile.doctor.program import Program
from crossfade.profile.doctor.replay import Replay, replay
from crossfade.profile.doctor.view import share
from crossfade.profile.traces.events import ActivityKind

_FORMAT = 1
_MOST_SPANS = 100_000
_MOST_FIXED = 3  # diagnoses whose timeline after the fix is part of the page


def gain_text(gain: Gain) -> str:
    """What a fix wins, as people read it."""
    if gain.least >= gain.most:
        return f"{share(gain.most)} of the step"
    if gain.likely >= gain.most:
        return f"at most {share(gain.most)} of the step"
    return f"{share(gain.least)} to {share(gain.most)} of the step, {share(gain.likely)} most likely"


def headline(report: Report) -> str:
    """The whole report in a sentence or two."""
    if report.abstains:
        return f"No diagnosis: {report.abstains}."
    real = [diagnosis for diagnosis in report.diagnoses if not diagnosis.is_remark]
    if real:
        return (
            f"{real[0].finding.title[:1].upper()}{real[0].finding.title[1:]}. The fix wins {gain_text(real[0].gain)}."
        )
    exposed = max((row.exposed_us / row.total_us for row in rank_metrics(report.traced) if row.total_us), default=0.0)
    if exposed > 0.05:
        return (
            f"Nothing found whose fix would win 5 % of the step. Communication is exposed for {share(exposed)} of the time,"
            " and computation waits for its results: there is nothing else to compute meanwhile."
        )
    return "Nothing found whose fix would win 5 % of the step."


def report_json(report: Report) -> dict[str, Any]:
    """All that the doctor found, for machines. Times are in microseconds, gains are shares of the step."""
    traced = report.traced
    return {
        "format": _FORMAT,
        "headline": headline(report),
        "ranks": [trace.rank for trace in traced.traces],
        "gpu": traced.traces[0].gpu,
        "num_steps": traced.program.num_steps,
        "step_us": report.step_us,
        "untraced_step_us": report.untraced.step_us,
        "is_untraced_measured": report.untraced.measured_us > 0.0,
        "replay_error": report.error,
        "abstains": report.abstains,
        "diagnoses": [_diagnosis_json(diagnosis) for diagnosis in report.diagnoses],
        "metrics": [asdict(row) for row in rank_metrics(traced)],
        "collectives": [asdict(row) for row in collective_metrics(traced)],
        "observed": list(report.observed),
        "unknown": list(report.unknown),
        "notes": _notes(report),
    }


def _notes(report: Report) -> list[str]:
    return [note for trace in report.traced.traces for note in trace.notes]


def _diagnosis_json(diagnosis: Diagnosis) -> dict[str, Any]:
    finding = diagnosis.finding
    return {
        "cause": str(finding.cause),
        "is_remark": diagnosis.is_remark,
        "gain": asdict(diagnosis.gain),
        "title": finding.title,
        "evidence": finding.evidence,
        "where": finding.where,
        "fix": finding.fix,
        "code": finding.code,
        "confidence": diagnosis.confidence,
        "marks": [
            {
                "rank": mark.rank,
                "stream": mark.lane[1] if mark.lane else None,
                "start_us": mark.start_us,
                "end_us": mark.end_us,
            }
            for mark in finding.marks
        ],
    }


def report_page(report: Report) -> dict[str, Any]:
    """What `crossfade.profile.doctor.page.page` shows; see there for its shape."""
    lanes = _Lanes(report)
    return {
        "title": f"crossfade doctor: {len(report.traced.traces)} rank(s) of {report.traced.traces[0].gpu or 'a GPU'}",
        "summary": headline(report),
        "notes": [*report.observed, *report.unknown, *_notes(report)],
        "metrics": _metrics_rows(report),
        "lanes": lanes.labels,
        "names": lanes.names,
        "now": lanes.spans(report.traced.seen),
        "diagnoses": [
            {
                "title": diagnosis.finding.title,
                "is_remark": diagnosis.is_remark,
                "gain": gain_text(diagnosis.gain),
                "confidence": diagnosis.confidence,
                "evidence": diagnosis.finding.evidence,
                "where": diagnosis.finding.where,
                "fix": diagnosis.finding.fix,
                "code": diagnosis.finding.code,
                "marks": [
                    [lanes.place(mark.rank, mark.lane), mark.start_us, mark.end_us, mark.label]
                    for mark in diagnosis.finding.marks
                ],
                "fixed": lanes.after(diagnosis.finding.change(report.traced.program)) if number < _MOST_FIXED else None,
            }
            for number, diagnosis in enumerate(report.diagnoses)
        ],
    }


def _metrics_rows(report: Report) -> list[list[str]]:
    rows = [["step", f"{report.step_us / 1e3:.3f} ms"], ["steps replayed", str(report.traced.program.num_steps)]]
    rows.append(["replay misses the trace by", f"{report.error:.2%}"])
    for row in rank_metrics(report.traced):
        total = row.total_us or 1.0
        rows.append(
            [
                row.label,
                (
                    f"computes {share(row.compute_us / total)}, communicates {share(row.communicate_us / total)} (exposed"
                    f" {share(row.exposed_us / total)}), idle {share(row.idle_us / total)}"
                ),
            ]
        )
    return rows


class _Lanes:
    """Streams and hosts as rows of a picture, and programs as spans on them."""

    def __init__(self, report: Report) -> None:
        self._traced = report.traced
        works = report.traced.program.works
        streams = sorted({(work.rank, report.traced.activities[n].lane) for n, work in enumerate(works)})
        rows: list[tuple[int, tuple[int, int] | None]] = []
        for rank in range(report.traced.program.num_ranks):
            rows.append((rank, None))
            rows += [(there, lane) for there, lane in streams if there == rank]
        self._places = {row: place for place, row in enumerate(rows)}
        self.labels = [
            f"{report.traced.traces[rank].label} · {'host' if lane is None else f'stream {lane[1]}'}"
            for rank, lane in rows
        ]
        self._numbers: dict[str, int] = {}
        self.names: list[str] = []

    def place(self, rank: int, lane: tuple[int, int] | None) -> int:
        """The row of a stream or, without one, of a rank's host."""
        return self._places[rank, lane]

    def after(self, program: Program) -> dict[str, Any] | None:
        """A changed program, replayed; None if it has other works than the traced one."""
        if len(program.works) != len(self._traced.program.works):
            return None
        return self.spans(replay(program))

    def spans(self, run: Replay) -> dict[str, Any]:
        """The traced program's works and calls as spans, at the times that a run of it has."""
        program = self._traced.program
        spans = []
        for n, work in enumerate(program.works):
            activity = self._traced.activities[n]
            kind = {ActivityKind.COMPUTE: 0, ActivityKind.COMMUNICATION: 1, ActivityKind.COPY: 2}[work.kind]
            spans.append(self._span(work.rank, activity.lane, run.starts_us[n], run.ends_us[n], activity.name, kind))
        for n, call in enumerate(program.calls):
            kind = 3 if call.waits else 4
            name = self._traced.calls[n].name
            spans.append(self._span(call.rank, None, run.call_starts_us[n], run.call_ends_us[n], name, kind))
        spans = sorted(spans, key=lambda span: -span[2])[:_MOST_SPANS]
        return {"end_us": round(run.end_us, 2), "spans": sorted(spans)}

    def _span(
        self, rank: int, lane: tuple[int, int] | None, start_us: float, end_us: float, name: str, kind: int
    ) -> tuple[int, float, float, int, int]:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name[:160])
        return self._places[rank, lane], round(start_us, 2), round(max(end_us - start_us, 0.0), 2), number, kind
