"""What a handle says about its calls: which way was chosen, what each took, what was hidden, what was not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from crossfade.batches.choice.calibration import HOST_BOUND, LEAST_GAIN, Moves, Way
from crossfade.batches.coroutines.spans import CollectiveSpan, exposed_us
from crossfade.device.clocks import GpuLoad
from crossfade.intervals import union_us

MOSTLY = 0.9
"""From this share on communication counts as hidden."""


@dataclass(frozen=True)
class Counts:
    """What the batches of one run issued.

    Attributes:
        collectives: of each batch.
        stops: of each batch, places where it let the others run.
        atomic: why it did not at others, with how often.
    """

    collectives: tuple[int, ...] = ()
    stops: tuple[int, ...] = ()
    atomic: Mapping[str, int] = field(default_factory=Counter)


@dataclass(frozen=True)
class BatchesReport:
    """One kind of call (shapes, types, training or not) of a handle. ``str`` gives a page for people.

    Attributes:
        way: how it is run: ``"one batch"``, ``"process groups"`` or ``"copy engines"``, perhaps ``", captured"``.
        reason: why in this way.
        is_settled: whether the calibration is over; it may begin again (docs/batches.md, "How a way is chosen").
        num_batches: parts of a batch.
        measured_ms: what a step takes by each way that was measured, of the slowest rank.
        host_ms: how long the CPU took for the launches of each way, of the slowest rank; with its waits where the GPU's queue was
            full. Empty until the ways have been measured.
        counts: collectives of the last interleaved run whose collectives were counted.
        communication_ms, hidden_ms, exposed_ms: of one recorded run: while any collective was on its way; while a batch computed
            beside it; while all batches waited. None where none was recorded.
        not_hidden: why the rest was not.
        timeline: the recorded collectives.
        notes: what else a user should know.
        load: the GPU's clock and power while ways were measured; None where they could not be read (the package nvidia-ml-py).
    """

    way: str
    reason: str
    is_settled: bool
    num_batches: int
    measured_ms: Mapping[str, float]
    host_ms: Mapping[str, float]
    counts: Counts = field(default_factory=Counts)
    communication_ms: float | None = None
    hidden_ms: float | None = None
    exposed_ms: float | None = None
    not_hidden: str = ""
    timeline: tuple[CollectiveSpan, ...] = ()
    notes: tuple[str, ...] = ()
    load: GpuLoad | None = None

    @property
    def gain(self) -> float:
        """Times as fast as one batch; 1 where that is what runs, or nothing was measured."""
        single = [taken for name, taken in self.measured_ms.items() if name.startswith(Moves.ONE)]
        return min(single) / self.measured_ms[self.way] if single and self.way in self.measured_ms else 1.0

    def __str__(self) -> str:
        lines = [f"way: {self.way}" + ("" if self.is_settled else " (calibrating)"), f"because: {self.reason}"]
        for name, taken in sorted(self.measured_ms.items(), key=lambda item: item[1]):
            host = f" (launches {self.host_ms[name]:.2f} ms)" if name in self.host_ms else ""
            lines.append(f"  {name:<24} {taken:9.2f} ms{host}")
        if self.load is not None:
            lines.append(f"the GPU meanwhile: {self.load}" + ", its power limit" * self.load.is_at_power_limit)
        if self.counts.collectives:
            lines.append(
                f"collectives of each batch: {', '.join(map(str, self.counts.collectives))}; "
                f"stops: {', '.join(map(str, self.counts.stops))}"
            )
        lines += [f"  {number} without a stop: {why}" for why, number in self.counts.atomic.items()]
        if self.communication_ms is not None and self.hidden_ms is not None and self.exposed_ms is not None:
            lines.append(
                f"communication: {self.communication_ms:.2f} ms, {self.hidden_ms:.2f} hidden, {self.exposed_ms:.2f} exposed"
            )
        lines += [f"not hidden: {self.not_hidden}"] if self.not_hidden else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def hidden_of(spans: Sequence[CollectiveSpan], num_parts: int, total_us: float) -> tuple[float, float, float]:
    """Communication, its hidden and its exposed part, in milliseconds."""
    all_us = union_us((span.begin_us, span.end_us) for span in spans)
    open_us = exposed_us(spans, num_parts, total_us)
    return all_us / 1e3, (all_us - open_us) / 1e3, open_us / 1e3


def why_no_gain(
    times_ms: Mapping[Way, float],
    launches_ms: Mapping[Way, float],
    counts: Counts,
    load: GpuLoad | None = None,
    least_gain: float = LEAST_GAIN,
) -> str:
    """Why no other way wins over one batch by ``least_gain``. ``load``: the GPU's meanwhile, if it is known."""
    others = {way: taken for way, taken in times_ms.items() if way.moves is not Moves.ONE}
    if not others:
        return "there is no other way here"
    if counts.collectives and not sum(counts.collectives):
        return "nothing to hide: the module issues no collective"
    best = min(others, key=lambda way: others[way])
    single = min(taken for way, taken in times_ms.items() if way.moves is Moves.ONE)
    said = f"no way wins by {least_gain:.0%}: {best} takes {others[best] / single:.3f} of one batch's time"
    if counts.stops and not sum(counts.stops):
        return f"{said}; no collective could be left waiting ({', '.join(counts.atomic)})"
    launches = launches_ms.get(best, 0.0)
    bound = ""
    if launches >= HOST_BOUND * others[best]:  # they also take long where they wait for the GPU's full queue
        bound = f"; its launches take {launches / others[best]:.0%} of that"
        bound += "" if best.is_captured else ": capture, where it is possible, removes them"
    if load is not None and load.is_at_power_limit:
        return f"{said}; the GPU is at its power limit ({load}): what is hidden lowers its clock{bound}"
    if bound:
        return said + bound
    is_open = load is None or not load.is_at_highest_clock
    power = ", or the GPU is at its power limit" if launches and is_open else ""
    return f"{said}; parts are too small to compute as fast as the whole, or contend with communication{power}"


def why_not_hidden(counts: Counts, hidden_ms: float, exposed_ms: float) -> str:
    """Why the exposed part of communication is exposed; nothing if hardly any is."""
    total_ms = hidden_ms + exposed_ms
    if not total_ms or hidden_ms >= MOSTLY * total_ms:
        return ""
    if counts.atomic:
        number = sum(counts.atomic.values())
        return f"{number} collectives were waited for at once ({', '.join(counts.atomic)})"
    return (
        "the batches' collectives take longer than what the other batch computes beside them, or begin and end the run"
    )
