"""The diagnosis of a traced program: what holds it back, and what each fix would win, by replaying it with the fix."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from crossfade.profile.doctor.build import Traced, build
from crossfade.profile.doctor.causes import CAUSES
from crossfade.profile.doctor.losses import Reason
from crossfade.profile.doctor.program import Program
from crossfade.profile.doctor.replay import Replay, replay
from crossfade.profile.doctor.view import Finding, View
from crossfade.profile.traces.events import RankTrace

__all__ = ["Diagnosis", "Gain", "Report", "diagnose"]

REMARK_BELOW = 0.05  # of the step
ABSTAIN_ABOVE = 0.03  # by so much the unchanged replay may miss the trace
_AT_MOST_COUNTS = 0.5  # an upper bound is believed half
_STEADY = 0.3  # each step must win this part of what the median step wins


@dataclass(frozen=True)
class Gain:
    """What a fix wins, as shares of the step.

    Attributes:
        least: 0 where the trace leaves open whether anything is won.
        likely: the best guess; what diagnoses are ordered by.
        most: an upper bound.
        is_steady: whether it is won in every step, not in one of few.
    """

    least: float
    likely: float
    most: float
    is_steady: bool


@dataclass(frozen=True)
class Diagnosis:
    """A cause, and what its fix wins.

    Attributes:
        finding: the cause, its evidence and its fix.
        gain: what the fix wins.
        is_remark: too little is won, or too little is sure, for a diagnosis.
        confidence: in words, why one may believe it.
        fixed: the program with the fix; its replay gives the timeline after it.
    """

    finding: Finding
    gain: Gain
    is_remark: bool
    confidence: str
    fixed: Program


@dataclass(frozen=True)
class Report:
    """What the doctor says of a run.

    Attributes:
        traced: the program that was replayed.
        view: its losses.
        base: the replay without change.
        error: by which share that replay misses the trace's steps.
        step_us: how long a traced step takes.
        diagnoses: by what they are likely to win; diagnoses before remarks.
        abstains: why nothing is said of gains; empty where something is.
        unknown: what cannot be told from this trace, and what would tell it.
    """

    traced: Traced
    view: View
    base: Replay
    error: float
    step_us: float
    diagnoses: tuple[Diagnosis, ...]
    abstains: str
    unknown: tuple[str, ...]


def diagnose(traces: Sequence[RankTrace]) -> Report:
    """Looks for all causes in the traces of a run, one for each rank (or of some of its ranks).

    Raises:
        TraceError: the traces have too little to replay.
    """
    traced = build(traces)
    view = View(traced)
    base = replay(traced.program)
    error = _error_of(traced, base)
    abstains = ""
    found: list[Diagnosis] = []
    if error > ABSTAIN_ABOVE:
        abstains = f"the replay of the trace misses its steps by {error:.1%}, more than {ABSTAIN_ABOVE:.0%}: something in it is not understood"
    else:
        found = [_weigh(traced, base, finding) for cause in CAUSES for finding in cause(view)]
    in_order = sorted(found, key=lambda diagnosis: (diagnosis.is_remark, -diagnosis.gain.likely))
    step_us = _lengths(traced.step_ends_us)
    return Report(traced, view, base, error, median(step_us), tuple(in_order), abstains, _unknown(view))


def _lengths(step_ends_us: Sequence[float]) -> list[float]:
    if len(step_ends_us) < 2:
        return [max(step_ends_us)]
    return [later - earlier for earlier, later in itertools.pairwise(step_ends_us)]


def _error_of(traced: Traced, base: Replay) -> float:
    seen, replayed = _lengths(traced.step_ends_us), _lengths(base.step_ends_us)
    return max(abs(there / here - 1.0) for here, there in zip(seen, replayed, strict=True) if here > 0)


def _weigh(traced: Traced, base: Replay, finding: Finding) -> Diagnosis:
    fixed = finding.change(traced.program)
    most, is_steady = _gain_of(base, fixed)
    likely = most
    if finding.likely is not None:
        likely, is_steady = _gain_of(base, finding.likely(traced.program))
    elif finding.is_at_most:
        likely = most * _AT_MOST_COUNTS
    gain = Gain(0.0 if finding.is_at_most else most, likely, max(most, likely), is_steady)
    is_remark = likely < REMARK_BELOW or not is_steady
    return Diagnosis(finding, gain, is_remark, _confidence(traced, finding, gain), fixed)


def _gain_of(base: Replay, fixed: Program) -> tuple[float, bool]:
    """Which share of the median step is won, and whether about as much is won in each."""
    before, after = _lengths(base.step_ends_us), _lengths(replay(fixed).step_ends_us)
    total = 1.0 - sum(after) / sum(before)
    shares = [1.0 - there / here for here, there in zip(before, after, strict=True) if here > 0]
    typical = min(median(shares), total) if len(shares) > 2 else total
    return max(typical, 0.0), min(shares) >= _STEADY * typical


def _confidence(traced: Traced, finding: Finding, gain: Gain) -> str:
    words = []
    if finding.is_at_most:
        words.append("an upper bound: the trace does not tell how much of it a fix reaches")
    if not gain.is_steady:
        words.append("not won in every step, so it may be a hiccup")
    if traced.program.num_steps < 3:
        words.append(f"only {traced.program.num_steps} step(s) in the trace")
    if not traced.rates.is_measured and any(traced.activities[n].kind == 1 for n in range(len(traced.activities))):
        words.append("how much communication slows computation down is taken from other machines")
    if traced.program.num_ranks == 1 and any(trace.world_size not in (None, 1) for trace in traced.traces):
        words.append("one rank's trace alone: how long it waits for its peers is not known")
    return "; ".join(words) or "computed from this trace alone, in every step"


def _unknown(view: View) -> tuple[str, ...]:
    found = []
    traced = view.traced
    late = view.lost_us(Reason.LATE)
    if view.share_of(late) > REMARK_BELOW:
        found.append(
            f"for {view.share_of(late):.0%} of the time a GPU does nothing although all that the trace knows of is done: hardware queues"
            " (CUDA_DEVICE_MAX_CONNECTIONS), work that was not traced, or waits that a trace does not have; record with"
            " `crossfade record`, which keeps them"
        )
    if traced.program.num_ranks == 1 and any(trace.world_size not in (None, 1) for trace in traced.traces):
        found.append(
            "give the files of all ranks: one rank's collectives contain the time in which it waits for the others"
        )
    if traced.num_steps_left_out:
        found.append(
            f"the last {traced.program.num_steps} steps were replayed; {traced.num_steps_left_out} before them were only read"
        )
    return tuple(found)
