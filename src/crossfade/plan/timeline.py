"""Timelines: what ran when. The predicted and the measured one have this same type.

For one actor, time is *exposed* when it communicates and does not compute, and *hidden* when it does both: the metrics
are lengths of unions of spans, so they are exact however spans overlap.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from statistics import median

from crossfade.files import replace_file
from crossfade.plan.chrome import ChromeTrace, chrome_json, chrome_trace
from crossfade.plan.picture import draw_timelines
from crossfade.plan.spans import Overlap, Span, actor_order

__all__ = ["Span", "Timeline"]

NOTHING = Overlap(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Timeline:
    """Spans of all actors, on one clock.

    Attributes:
        name: ``predicted`` or ``measured``.
        spans: what ran, ordered by start.
        notes: of a prediction: what it had no measurements of, and what stands for them.
        hosts: where each party is, the driver included; none for one host.
    """

    name: str
    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()
    hosts: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def of(
        cls, name: str, spans: Iterable[Span], notes: Iterable[str] = (), hosts: Mapping[str, str] | None = None
    ) -> Timeline:
        """Orders the spans by start."""
        in_order = sorted(spans, key=attrgetter("start_us", "actor", "stream", "end_us"))
        return cls(name, tuple(in_order), tuple(notes), hosts or {})

    @property
    def actors(self) -> tuple[str, ...]:
        """Who has spans: the driver first, then actors by name."""
        return tuple(self._overlaps)

    @cached_property
    def makespan_us(self) -> float:
        """From the first start to the last end; 0 for an empty timeline."""
        return max((span.end_us for span in self.spans), default=0.0) - min(
            (span.start_us for span in self.spans), default=0.0
        )

    def compute_us(self, actor: str) -> float:
        """For how long the actor computes."""
        return self._overlaps.get(actor, NOTHING).compute_us

    def communicate_us(self, actor: str) -> float:
        """For how long the actor communicates, on whatever stream: hidden and exposed."""
        return self._overlaps.get(actor, NOTHING).communicate_us

    def busy_us(self, actor: str) -> float:
        """For how long the actor computes, or communicates, or both."""
        return self._overlaps.get(actor, NOTHING).busy_us

    def exposed_us(self, actor: str) -> float:
        """For how long the actor communicates and does not compute."""
        return self._overlaps.get(actor, NOTHING).exposed_us

    def hidden_us(self, actor: str) -> float:
        """For how long the actor communicates while it computes."""
        return self._overlaps.get(actor, NOTHING).hidden_us

    def wait_us(self, actor: str) -> float:
        """For how long the actor is blocked on a value or on a free slot, whatever its other streams do meanwhile."""
        return self._overlaps.get(actor, NOTHING).wait_us

    def of_execution(self, execution: int) -> Timeline:
        """The spans of one execution, on the same clock."""
        return replace(self, spans=tuple(span for span in self.spans if span.execution == execution))

    def shifted(self, by_us: float) -> Timeline:
        """The same spans, later by that many microseconds."""
        spans = (replace(span, start_us=span.start_us + by_us, end_us=span.end_us + by_us) for span in self.spans)
        return replace(self, spans=tuple(spans))

    def steady_us(self) -> float:
        """The time per execution once things are rolling: the median between the ends of successive executions.

        With fewer than two executions it is the makespan.
        """
        ends_us: dict[int, float] = {}
        for span in self.spans:
            ends_us[span.execution] = max(span.end_us, ends_us.get(span.execution, span.end_us))
        in_order = [ends_us[execution] for execution in sorted(ends_us)]
        steps_us = [later - earlier for earlier, later in pairwise(in_order)]
        return median(steps_us) if steps_us else self.makespan_us

    def to_chrome(self) -> ChromeTrace:
        """The timeline in Chrome's trace format, for ``json.dump``: a process per actor, a thread per stream."""
        return chrome_trace([self])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the timeline to a file: ``.json`` for a trace that opens in Perfetto, ``.svg`` for a picture.

        A file that is there is replaced in one step: nobody sees half of the new one.

        Raises:
            ValueError: another suffix.
            OSError: the folder does not exist or cannot be written.
        """
        path = Path(path)
        name = path.name.lower()
        if name.endswith(".json"):
            replace_file(path, chrome_json([self]))
        elif name.endswith(".svg"):
            replace_file(path, draw_timelines([self]))
        else:
            raise ValueError(
                f"a timeline cannot be saved as {path.name!r}: unknown suffix {path.suffix.lower()!r}\n"
                "hint: .json is a trace for https://ui.perfetto.dev, .svg a picture"
            )

    @cached_property
    def _overlaps(self) -> Mapping[str, Overlap]:
        spans: dict[str, list[Span]] = {}
        for span in self.spans:
            spans.setdefault(span.actor, []).append(span)
        return {actor: Overlap.of(spans[actor]) for actor in sorted(spans, key=actor_order)}
