"""Spans, and the arithmetic of the time that they cover."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from crossfade.intervals import union_us
from crossfade.types import DRIVER

COMPUTE = "compute"
COMMUNICATE = "communicate"
WAIT = "wait"


@dataclass(frozen=True, slots=True)
class Span:
    """One action, while it ran.

    Attributes:
        actor: who ran it.
        stream: on which of the actor's streams: ``main``, ``send``, ``recv``, ``coll``; of its GPUs ``compute``, ``push``, ``up``,
            ``down``, ``nccl``, ``coll``.
        label: the action as the plan writes it, such as ``run n3``; ``what`` says more.
        what: the method's or the channel's name, for people.
        kind: ``compute``, ``communicate`` or ``wait`` (blocked on a value or on a free slot).
        execution: the execution's number, from 0.
        start_us: microseconds since the timeline's zero.
        end_us: microseconds since the timeline's zero.
        size_bytes: how much it moves, or, of a collective, what each party brings: measured spans on streams of GPUs say it, others
            say 0.
    """

    actor: str
    stream: str
    label: str
    what: str
    kind: str
    execution: int
    start_us: float
    end_us: float
    size_bytes: int = 0

    @property
    def duration_us(self) -> float:
        """How long it ran, in microseconds."""
        return self.end_us - self.start_us


class NamedSpans(Protocol):
    """What can be written as a trace or drawn: a timeline."""

    @property
    def name(self) -> str:
        """What the spans are, such as ``predicted``."""

    @property
    def spans(self) -> tuple[Span, ...]:
        """What ran, ordered by start."""

    @property
    def hosts(self) -> Mapping[str, str]:
        """Where each party is; none where that is the same for all."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """How much of some spans' time lies beside each other.

    Times are lengths of unions: two transfers at once count once. ``communicate_us == hidden_us + exposed_us``, and
    ``busy_us == compute_us + exposed_us``.
    """

    compute_us: float
    """Some span computes."""
    communicate_us: float
    """Some span communicates."""
    busy_us: float
    """Some span computes or communicates."""
    wait_us: float
    """Some span is blocked."""

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Overlap:
        """Measures spans, in any order. O(n log n)."""
        kinds: dict[str, list[Span]] = {COMPUTE: [], COMMUNICATE: [], WAIT: []}
        for span in spans:
            kinds.setdefault(span.kind, []).append(span)
        return cls(
            compute_us=covered_us(kinds[COMPUTE]),
            communicate_us=covered_us(kinds[COMMUNICATE]),
            busy_us=covered_us(kinds[COMPUTE] + kinds[COMMUNICATE]),
            wait_us=covered_us(kinds[WAIT]),
        )

    @property
    def exposed_us(self) -> float:
        """Some span communicates and none computes."""
        return max(0.0, self.busy_us - self.compute_us)

    @property
    def hidden_us(self) -> float:
        """Some span communicates while another computes."""
        return max(0.0, self.compute_us + self.communicate_us - self.busy_us)


def covered_us(spans: Iterable[Span]) -> float:
    """The length of the union of the spans, in microseconds. O(n log n)."""
    return union_us((span.start_us, span.end_us) for span in spans)


def lanes_of(spans: Iterable[Span]) -> list[tuple[str, str, list[Span]]]:
    """Spans on as few lanes as hold them without overlap: (actor, lane, spans ordered by start) for each lane.

    The driver's lanes come first, then actors in natural order (Sender2 before Sender10); of each actor ``main`` first. A stream
    that needs more than one lane has ``send``, ``send 2``, ...
    """
    streams: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        streams.setdefault((span.actor, span.stream), []).append(span)
    lanes = []
    for actor, stream in sorted(streams, key=lambda pair: (actor_order(pair[0]), pair[1] != "main", pair[1])):
        for number, lane in enumerate(_without_overlap(streams[actor, stream]), start=1):
            lanes.append((actor, stream if number == 1 else f"{stream} {number}", lane))
    return lanes


def actor_order(actor: str) -> tuple[bool, list[str | int]]:
    """A key that sorts the driver before actors, and actors by the numbers in their names.

    The parts of a name are text and number in turn, text first, so that keys compare.
    """
    parts = re.split(r"([0-9]+)", actor)
    return actor != DRIVER, [int(part) if place % 2 else part for place, part in enumerate(parts)]


def _without_overlap(spans: Sequence[Span]) -> list[list[Span]]:
    lanes: list[list[Span]] = []
    ends: list[tuple[float, int]] = []
    for span in sorted(spans, key=lambda span: (span.start_us, span.end_us)):
        if ends and ends[0][0] <= span.start_us:
            _, lane = heapq.heappop(ends)
        else:
            lane = len(lanes)
            lanes.append([])
        lanes[lane].append(span)
        heapq.heappush(ends, (span.end_us, lane))
    return lanes
