"""Timelines in Chrome's trace format: JSON that Perfetto and chrome://tracing open.

A process per timeline and actor, a thread per stream, and a complete event (``"ph": "X"``) per span. Times are in
microseconds, rounded to whole nanoseconds since viewers count in those.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from crossfade.plan.spans import WAIT, NamedSpans, Span, lanes_of

ChromeTrace = dict[str, Any]
"""``traceEvents`` and ``displayTimeUnit``, ready for ``json.dumps``."""


def chrome_trace(timelines: Sequence[NamedSpans]) -> ChromeTrace:
    """The timelines as one trace; with more than one, processes are named after timeline and actor."""
    events: list[dict[str, Any]] = []
    processes: dict[tuple[int, str], int] = {}
    for number, timeline in enumerate(timelines):
        thread = 0
        for actor, lane, spans in lanes_of(timeline.spans):
            if (number, actor) not in processes:
                thread = 0
                processes[number, actor] = len(processes) + 1
                name = f"{actor} on {timeline.hosts[actor]}" if actor in timeline.hosts else actor
                name = name if len(timelines) == 1 else f"{timeline.name}: {name}"
                events += _names("process", name, processes[number, actor], 0, processes[number, actor])
            thread += 1
            events += _names("thread", lane, processes[number, actor], thread, thread)
            events += _events(spans, processes[number, actor], thread)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def chrome_json(timelines: Sequence[NamedSpans]) -> str:
    """``chrome_trace`` as text, an event per line."""
    trace = chrome_trace(timelines)
    lines = ",\n".join(json.dumps(event) for event in trace["traceEvents"])
    return f'{{"displayTimeUnit": {json.dumps(trace["displayTimeUnit"])}, "traceEvents": [\n{lines}\n]}}\n'


def _names(of: str, name: str, process: int, thread: int, rank: int) -> Iterator[dict[str, Any]]:
    """The metadata events that name a process or a thread, and give its place."""
    place = {"ph": "M", "pid": process, "tid": thread}
    yield {**place, "name": f"{of}_name", "args": {"name": name}}
    yield {**place, "name": f"{of}_sort_index", "args": {"sort_index": rank}}


def _events(spans: Sequence[Span], process: int, thread: int) -> Iterator[dict[str, Any]]:
    for span in spans:
        start_us, end_us = round(span.start_us, 3), round(span.end_us, 3)
        size = {"bytes": span.size_bytes} if span.size_bytes else {}
        yield {
            "ph": "X",
            "name": f"wait: {span.what}" if span.kind == WAIT else f"{span.label} {span.what}".rstrip(),
            "cat": span.kind,
            "pid": process,
            "tid": thread,
            "ts": start_us,
            "dur": round(end_us - start_us, 3),
            "args": {"action": span.label, "execution": span.execution, "what": span.what, "kind": span.kind, **size},
        }
