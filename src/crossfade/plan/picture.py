"""Timelines as a picture: one SVG, a panel per timeline, all on one time axis.

Colours are told apart with any kind of colour vision (blue, orange, grey), and shapes help: computation fills its
lane, communication most of it, waiting is a thin bar. Spans too narrow to be seen are merged with their neighbours of
the same kind, so that the picture's size is bounded by its width and not by the number of spans.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from crossfade.plan.spans import COMMUNICATE, COMPUTE, WAIT, NamedSpans, Overlap, Span, lanes_of

WIDTH = 1200
MARGIN = 16
LANE_HEIGHT = 22
PANEL_HEAD = 30
PANEL_GAP = 14
AXIS_HEIGHT = 34
HEAD_HEIGHT = 30
FONT_SIZE = 11
LETTER_WIDTH = 6.7
"""The widest that letters of ``FONT_SIZE`` are on average, in the fonts named below."""
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
SUMMARY_WIDTH = 180
MERGED_PX = 0.4
MAX_NAME_LETTERS = 28
MS_FROM_US = 10_000.0
"""Pictures at least this long have their axis in milliseconds."""
SHADES = "shades take turns with executions"


@dataclass(frozen=True, slots=True)
class Look:
    """How one kind of span is drawn: fill and text colour, share of the lane's height, words in the legend.

    Executions take turns with ``fill`` and ``odd_fill``, so that where one ends and the next begins shows without a label.
    """

    fill: str
    odd_fill: str
    ink: str
    height: float
    legend: str


LOOKS = {
    COMPUTE: Look("#0072b2", "#00527f", "#ffffff", 0.86, "computes"),
    COMMUNICATE: Look("#e69f00", "#f2c063", "#000000", 0.66, "communicates"),
    WAIT: Look("#c4c8cc", "#c4c8cc", "#000000", 0.24, "waits for a value or a slot"),
}
OTHER = Look("#cc79a7", "#cc79a7", "#000000", 0.66, "other")

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Axis:
    """Time to pixels: ``start_us`` is at ``left``, ``start_us + length_us`` at ``right``."""

    start_us: float
    length_us: float
    left: float
    right: float

    def x(self, time_us: float) -> float:
        """Where the time is, in pixels from the picture's left edge."""
        return self.left + (time_us - self.start_us) / self.length_us * (self.right - self.left)

    def step_us(self) -> float:
        """The round time, 1, 2 or 5 times a power of ten, that fits 5 to 14 times."""
        rough = max(self.length_us / 14, 1e-12)
        power = 10.0 ** math.floor(math.log10(rough))
        return next(power * digit for digit in (1, 2, 5, 10) if power * digit >= rough * 0.999)

    def ticks_us(self) -> list[float]:
        """Multiples of the step."""
        step = self.step_us()
        first, last = math.ceil(self.start_us / step), math.floor((self.start_us + self.length_us) / step)
        return [number * step for number in range(first, last + 1)]


def draw_timelines(timelines: Sequence[NamedSpans], title: str = "") -> str:
    """The timelines one above the other, in the order given, as a standalone SVG document.

    They are drawn on the clock they have; shift one whose zero is another moment. Each actor has a lane per stream,
    and at the right what part of its communication is hidden behind its computation.
    """
    lanes = [_lanes(timeline.spans) for timeline in timelines]
    axis = _axis(timelines, max((len(_name(a, s)) for panel in lanes for a, s, _ in panel), default=8))
    top = MARGIN + HEAD_HEIGHT
    body: list[str] = []
    for timeline, panel in zip(timelines, lanes, strict=True):
        body += _panel(timeline, panel, axis, top)
        top += PANEL_HEAD + max(1, len(panel)) * LANE_HEIGHT + PANEL_GAP
    grid = _axis_lines(axis, MARGIN + HEAD_HEIGHT + PANEL_HEAD, top)
    return "\n".join([*_head(title, top + AXIS_HEIGHT), *grid, *body, "</svg>", ""])


def _lanes(spans: Sequence[Span]) -> list[tuple[str, str, list[Span]]]:
    """As ``lanes_of``, but waiting takes no lane: it lies behind what its stream does in the background meanwhile."""
    busy = {(span.actor, span.stream) for span in spans if span.kind != WAIT}
    waits: dict[tuple[str, str], list[Span]] = {}
    shown = []
    for span in spans:
        if span.kind == WAIT and (span.actor, span.stream) in busy:
            waits.setdefault((span.actor, span.stream), []).append(span)
        else:
            shown.append(span)
    return [(actor, lane, [*waits.get((actor, lane), ()), *own]) for actor, lane, own in lanes_of(shown)]


def _axis(timelines: Sequence[NamedSpans], num_letters: int) -> Axis:
    spans = [span for timeline in timelines for span in timeline.spans]
    start_us = min((span.start_us for span in spans), default=0.0)
    end_us = max((span.end_us for span in spans), default=0.0)
    left = MARGIN + (min(num_letters, MAX_NAME_LETTERS) + 1) * LETTER_WIDTH
    return Axis(start_us, (end_us - start_us) or 1.0, left, WIDTH - MARGIN - SUMMARY_WIDTH)


def _head(title: str, height: float) -> Iterator[str]:
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}"'
        f' font-family="{FONT}" font-size="{FONT_SIZE}">'
    )
    yield f"<title>{_clean(title or 'timeline')}</title>"
    yield f'<rect width="{WIDTH}" height="{height:g}" fill="#ffffff"/>'
    legend_width = sum(len(look.legend) * LETTER_WIDTH + 36 for look in LOOKS.values()) + len(SHADES) * LETTER_WIDTH
    room = int((WIDTH - 2 * MARGIN - legend_width) / (LETTER_WIDTH * 14 / FONT_SIZE))
    yield _text(MARGIN, MARGIN + 13, _shorten(title, room), "#111111", 'font-size="14" font-weight="bold"')
    x = WIDTH - MARGIN - legend_width
    for kind, look in LOOKS.items():
        yield _bar(x, MARGIN + 9 - LANE_HEIGHT / 2, 18, kind)
        yield _text(x + 23, MARGIN + 13, look.legend, "#333333")
        x += len(look.legend) * LETTER_WIDTH + 36
    yield _text(x, MARGIN + 13, SHADES, "#777777")


def _axis_lines(axis: Axis, top: float, bottom: float) -> Iterator[str]:
    unit, per_us = ("ms", 1e-3) if axis.length_us >= MS_FROM_US else ("µs", 1.0)
    num_decimals = max(0, -math.floor(math.log10(axis.step_us() * per_us * 1.001)))
    for tick_us in axis.ticks_us():
        x = f"{axis.x(tick_us):.2f}"
        yield f'<line x1="{x}" y1="{top:g}" x2="{x}" y2="{bottom:g}" stroke="#e6e8eb"/>'
        number = f"{tick_us * per_us:.{num_decimals}f}"
        yield _text(axis.x(tick_us), bottom + 14, number, "#555555", 'text-anchor="middle"')
    yield f'<line x1="{axis.left:.2f}" y1="{bottom:g}" x2="{axis.right:.2f}" y2="{bottom:g}" stroke="#888888"/>'
    yield _text(axis.right + 24, bottom + 14, unit, "#555555")


def _panel(timeline: NamedSpans, lanes: Sequence[tuple[str, str, list[Span]]], axis: Axis, top: float) -> Iterator[str]:
    start_us = min((span.start_us for span in timeline.spans), default=0.0)
    end_us = max((span.end_us for span in timeline.spans), default=0.0)
    num_executions = len({span.execution for span in timeline.spans})
    plural = "" if num_executions == 1 else "s"
    facts = f"{_duration(end_us - start_us)}, {num_executions} execution{plural}" if lanes else "nothing ran"
    yield _text(MARGIN, top + 20, f"{timeline.name}: {facts}", "#111111", 'font-weight="bold"')
    top += PANEL_HEAD
    by_actor: dict[str, list[Span]] = {}
    for span in timeline.spans:
        by_actor.setdefault(span.actor, []).append(span)
    shown = ""
    for number, (actor, lane, spans) in enumerate(lanes):
        y = top + number * LANE_HEIGHT
        is_first = actor != shown
        shown = actor
        rule, ink = ("#999999", "#111111") if is_first else ("#eeeeee", "#666666")
        yield f'<line x1="{MARGIN}" y1="{y:g}" x2="{WIDTH - MARGIN}" y2="{y:g}" stroke="{rule}" stroke-width="0.5"/>'
        yield _text(MARGIN, y + 15, _shorten(_name(actor, lane), MAX_NAME_LETTERS), ink)
        if is_first:
            yield _summary(Overlap.of(by_actor[actor]), y)
        yield from _bars(spans, axis, y)


def _summary(overlap: Overlap, y: float) -> str:
    """At the right of an actor's first lane: how much of its communication is hidden."""
    text = "no communication"
    if overlap.communicate_us > 0 and not overlap.compute_us:
        text = f"communicates {_duration(overlap.communicate_us)}"
    elif overlap.communicate_us > 0:
        text = f"hidden {overlap.hidden_us / overlap.communicate_us:.0%} of {_duration(overlap.communicate_us)}"
    return _text(WIDTH - MARGIN, y + 15, text, "#555555", 'text-anchor="end"')


def _bars(spans: Sequence[Span], axis: Axis, y: float) -> Iterator[str]:
    for span, num_merged, has_name in _merged(spans, axis):
        left, right = axis.x(span.start_us), axis.x(span.end_us)
        more = f" and {num_merged - 1} more" if num_merged > 1 else ""
        tip = f"{span.kind}: {span.label} {span.what}{more}, execution {span.execution}"
        tip += f", {span.start_us:.3f} to {span.end_us:.3f} µs ({span.duration_us:.3f} µs)"
        yield _bar(left, y, max(right - left, MERGED_PX), span.kind, tip, is_odd=span.execution % 2 == 1)
        label = _label(span, right - left) if has_name and span.kind != WAIT else ""
        if label:
            ink = LOOKS.get(span.kind, OTHER).ink
            yield _text((left + right) / 2, y + 15, label, ink, 'text-anchor="middle" pointer-events="none"')


def _merged(spans: Sequence[Span], axis: Axis) -> list[tuple[Span, int, bool]]:
    """Spans as they are drawn, what waits behind all else, with how many each stands for: invisibly narrow ones join one another,
    or a wider one of their kind before them.

    The last item says whether the first of them, whose name it has, is visible by itself.
    """
    narrow_us = MERGED_PX / (axis.right - axis.left) * axis.length_us
    held: dict[str, tuple[Span, int, bool]] = {}  # of each kind, since kinds take turns in most programs
    drawn = []
    for span in spans:
        before = held.get(span.kind)
        if before is not None:
            joined, count, has_name = before
            if span.start_us - joined.end_us <= narrow_us and span.duration_us <= narrow_us:
                joined = replace(joined, end_us=max(joined.end_us, span.end_us))
                held[span.kind] = joined, count + 1, has_name
                continue
            drawn.append(before)
        held[span.kind] = span, 1, span.duration_us > narrow_us
    return sorted([*drawn, *held.values()], key=lambda each: (each[0].kind != WAIT, each[0].start_us))


def _label(span: Span, width: float) -> str:
    """The longest of the span's names that fits, with the execution's number; or nothing."""
    number = f"#{span.execution}"
    action = span.label.partition(" @")[0]
    whole = action if action.endswith(span.what) else f"{action} {span.what}"
    names = (whole, span.what, span.what.rpartition(".")[2], action)
    for label in (*(f"{name} {number}" for name in names), number):
        if (len(label) + 1) * LETTER_WIDTH <= width:
            return label
    return ""


def _bar(x: float, y: float, width: float, kind: str, tip: str = "", *, is_odd: bool = False) -> str:
    look = LOOKS.get(kind, OTHER)
    height = LANE_HEIGHT * look.height
    place = f'x="{x:.2f}" y="{y + (LANE_HEIGHT - height) / 2:.2f}" width="{width:.2f}" height="{height:.2f}"'
    inside = f"><title>{_clean(tip)}</title></rect>" if tip else "/>"
    edge = ' stroke="#ffffff" stroke-width="0.4"' if width > 3 else ""
    return f'<rect class="{_clean(kind)}" {place} fill="{look.odd_fill if is_odd else look.fill}"{edge}{inside}'


def _text(x: float, y: float, text: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}" fill="{colour}" {more}>{_clean(text)}</text>'


def _name(actor: str, lane: str) -> str:
    return actor if lane == "main" else f"{actor} {lane}"


def _duration(time_us: float) -> str:
    return f"{time_us / 1e3:.3g} ms" if time_us >= 1000 else f"{time_us:.3g} µs"


def _shorten(text: str, num_letters: int) -> str:
    return text if len(text) <= num_letters else text[: max(0, num_letters - 1)] + "…"


def _clean(text: str) -> str:
    """Text for XML: escaped, and without what XML cannot hold."""
    return html.escape(NOT_IN_XML.sub("\ufffd", text))
