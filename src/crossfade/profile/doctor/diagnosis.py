"""The diagnosis of a traced program: what holds it back, and what each fix would win, by replaying it with the fix."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from statistics import median

from crossfade.profile.doctor.build import Traced, build
from crossfade.profile.doctor.causes import CAUSES
from crossfade.profile.doctor.losses import Reason
from crossfade.profile.doctor.observed import observed
from crossfade.profile.doctor.program import Program
from crossfade.profile.doctor.replay import Replay, WaitsForItself, replay, step_lengths
from crossfade.profile.doctor.untraced import EVENT_US, MOST_EVENT_US, Untraced, untraced
from crossfade.profile.doctor.view import Cause, Finding, View
from crossfade.profile.traces.collectives import is_ordered
from crossfade.profile.traces.events import RankTrace

REMARK_BELOW = 0.05  # of the step
ABSTAIN_ABOVE = 0.03  # by so much the unchanged replay may miss the trace
_AT_MOST_COUNTS = 0.5  # an upper bound is believed half
_STEADY = 0.3  # a step must win this part of what the median step wins
_WORTH_SAYING = 0.01  # of the step; less is no remark either
_FEW_STEPS = 3
_ODD_ONE_OF = 4  # of so many steps one need not win anything: a hiccup hides what it would
_COMPARABLE = 1 / 3  # what wins that part of what a residual cause wins at most comes before it
_RESIDUAL = (Cause.LAUNCH, Cause.CONTENTION)  # weighed on top of the best other fix


@dataclass(frozen=True)
class Gain:
    """What a fix wins, as shares of the step.

    Attributes:
        least: 0 where the trace leaves open whether anything is won.
        likely: the best guess; what diagnoses are ordered by.
        most: an upper bound.
        is_steady: whether it is won in every step, or in three of four; not in one of few.
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
    """

    finding: Finding
    gain: Gain
    is_remark: bool
    confidence: str


@dataclass(frozen=True)
class Report:
    """What the doctor says of a run.

    Attributes:
        traced: the program that was replayed.
        view: its losses.
        base: the replay without change.
        error: by which share that replay misses the trace's steps.
        step_us: how long a traced step takes.
        untraced: the program without the profiler, which is what gains are shares of.
        diagnoses: by what they are likely to win; diagnoses before remarks.
        abstains: why nothing is said of gains; empty where something is.
        observed: what a record tells of the machine, and bears on the gains.
        unknown: what cannot be told from this trace, and what would tell it.
    """

    traced: Traced
    view: View
    base: Replay
    error: float
    step_us: float
    untraced: Untraced
    diagnoses: tuple[Diagnosis, ...]
    abstains: str
    observed: tuple[str, ...]
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
    host = untraced(traced)
    abstains = ""
    found: list[Diagnosis] = []
    if error > ABSTAIN_ABOVE:
        abstains = (
            f"the replay of the trace misses its steps by {error:.1%}, more than {ABSTAIN_ABOVE:.0%}: something in it is not"
            " understood, so nothing is said of what a fix would win"
        )
    else:
        found = _Scales(traced, host).weigh([finding for cause in CAUSES for finding in cause(view)])
    step_us = median(step_lengths(traced.step_ends_us))
    return Report(
        traced,
        view,
        base,
        error,
        step_us,
        host,
        tuple(sorted(found, key=_place)),
        abstains,
        observed(traces),
        _unknown(view, host, found),
    )


def _place(diagnosis: Diagnosis) -> tuple[bool, float]:
    """Diagnoses before remarks, by gain; residual causes behind another one that wins a good part of the same time."""
    is_residual = diagnosis.finding.cause in _RESIDUAL
    return diagnosis.is_remark, -diagnosis.gain.likely * (_COMPARABLE if is_residual else 1.0)


def _error_of(traced: Traced, base: Replay) -> float:
    seen, replayed = step_lengths(traced.step_ends_us), step_lengths(base.step_ends_us)
    return max((abs(there / here - 1.0) for here, there in zip(seen, replayed, strict=False) if here > 0), default=0.0)


class _Scales:
    """Weighs findings by replaying the program with each one's change, as it would run without the profiler."""

    def __init__(self, traced: Traced, host: Untraced) -> None:
        self._traced = traced
        self._host = host
        self._program, self._ends = host.program, host.step_ends_us

    def _start_from(self, program: Program) -> None:
        self._program = program
        self._ends = replay(program).step_ends_us

    def weigh(self, findings: Sequence[Finding]) -> list[Diagnosis]:
        """What each finding's fix wins. Faster launches and less contention are weighed on top of the best other fix.

        A host that waits for the GPU in each layer is never ahead of it: launches in CUDA graphs seem to win what leaving
        the waits out does. Likewise collectives that need not be slow nothing down once they are left out.
        """
        others = self._weigh_all(finding for finding in findings if finding.cause not in _RESIDUAL)
        best = max((one for one in others if not one.is_remark), key=lambda one: one.gain.likely, default=None)
        residual = [finding for finding in findings if finding.cause in _RESIDUAL]
        found = [*_without_sums(others), *(self._weigh_residual(residual, best) if residual else ())]
        return [one for one in found if one.gain.most >= _WORTH_SAYING]

    def _weigh_residual(self, findings: Sequence[Finding], best: Diagnosis | None) -> Iterator[Diagnosis]:
        """What fixes win of a program that has the best other fix, and a host as light as one is known to be."""
        found = []
        for program in (self._host.program, self._host.lighter):
            self._start_from(program if best is None else best.finding.change(program))
            found.append([self._weigh(finding) for finding in findings])
        for usual, light in zip(*found, strict=True):
            gain = replace(usual.gain, likely=min(usual.gain.likely, light.gain.likely))
            words = [usual.confidence]
            if usual.finding.cause is Cause.LAUNCH and not self._host.measured_us:
                words.append(
                    f"the profiler is taken to need {EVENT_US} to {MOST_EVENT_US} us for each operator and call"
                )
            if best is not None:
                words.append("won on top of the best other fix")
            yield replace(usual, gain=gain, is_remark=usual.is_remark or light.is_remark, confidence="; ".join(words))

    def _weigh_all(self, findings: Iterable[Finding]) -> list[Diagnosis]:
        """Leaves out a change that cannot be made, such as another order of launches where the host waits in between."""
        found = []
        for finding in findings:
            with suppress(WaitsForItself):
                found.append(self._weigh(finding))
        return found

    def _weigh(self, finding: Finding) -> Diagnosis:
        most, is_steady = self._gain_of(finding.change(self._program))
        likely = most
        if finding.likely is not None:
            likely, is_steady = self._gain_of(finding.likely(self._program))
        elif finding.is_at_most and finding.cause is not Cause.LAUNCH:
            likely = most * _AT_MOST_COUNTS
        gain = Gain(0.0 if finding.is_at_most else most, likely, max(most, likely), is_steady)
        is_remark = likely < REMARK_BELOW or not is_steady
        return Diagnosis(finding, gain, is_remark, _confidence(self._traced, finding, gain))

    def _gain_of(self, fixed: Program) -> tuple[float, bool]:
        """Which share of the median step is won, and whether a good part of it is won in each, or in all but one of four."""
        ends = replay(fixed).step_ends_us
        before, after = step_lengths(self._ends), step_lengths(ends)
        shares = [1.0 - there / here for here, there in zip(before, after, strict=False) if here > 0]
        if not shares:
            return 0.0, False  # steps that cannot be told apart
        typical = median(shares)
        if len(shares) < _FEW_STEPS:  # work that moves from one step into another counts for neither
            typical = min(typical, 1.0 - ends[-1] / self._ends[-1])
        return max(typical, 0.0), sorted(shares)[len(shares) // _ODD_ONE_OF] >= _STEADY * typical


def _without_sums(diagnoses: Sequence[Diagnosis]) -> list[Diagnosis]:
    """Leaves out the finding of all places at once where one of its places wins nearly as much."""
    kept: list[Diagnosis] = []
    for one in diagnoses:
        of_places = [
            other.gain.likely for other in diagnoses if other.finding.cause is one.finding.cause and other is not one
        ]
        is_sum = " places" in one.finding.title
        if not (is_sum and one.gain.likely <= 1.15 * max(of_places, default=0.0)):
            kept.append(one)
    return kept


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
    if _lacks_ranks(traced):
        words.append("not the traces of all ranks: how long these wait for the others is not known")
    return "; ".join(words) or "computed from this trace alone, in every step"


def _lacks_ranks(traced: Traced) -> bool:
    return any((trace.world_size or 1) > traced.program.num_ranks for trace in traced.traces)


def _unknown(view: View, host: Untraced, diagnoses: Sequence[Diagnosis]) -> tuple[str, ...]:
    found = []
    traced = view.traced
    launches = max((one.gain.most for one in diagnoses if one.finding.cause is Cause.LAUNCH), default=0.0)
    if not host.measured_us and launches >= REMARK_BELOW:
        found.append(
            "how much of the launching is the profiler's own: `crossfade record --skip 10` and crossfade.record(untraced_steps=5)"
            " measure steps without it"
        )
    elif host.measured_us and abs(host.step_us / host.measured_us - 1.0) > ABSTAIN_ABOVE:
        found.append(
            f"why a step without the profiler takes {host.measured_us / 1e3:.3f} ms: less the profiler's time traced ones take"
            f" {host.step_us / 1e3:.3f} ms, so gains may be off by as much"
        )
    late = view.lost_us(Reason.LATE)
    if view.share_of(late) > REMARK_BELOW:
        has_record = all(trace.record is not None for trace in traced.traces)
        found.append(
            f"for {view.share_of(late):.0%} of the time a GPU does nothing although all that the trace knows of is done: "
            + (
                "work that was not traced, such as another process's"
                if has_record
                else "hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), work that was not traced, or waits that a trace does not have;"
                " record with `crossfade record`, which keeps them"
            )
        )
    has_tensors = all(trace.record is not None and trace.record.tensors for trace in traced.traces)
    if not has_tensors and view.share_of(view.lost_us(Reason.TRANSFER)) > REMARK_BELOW:
        found.append(
            "what makes the input of collectives and when their results are needed: `crossfade record --with-tensors` keeps it"
        )
    if _lacks_ranks(traced):
        found.append(
            "give the files of all ranks: collectives contain the time in which these ranks wait for the others"
        )
    if any(map(is_ordered, traced.activities)) and not traced.moves_from_us and traced.program.num_ranks > 1:
        found.append("how long ranks wait for each other: their collectives differ from the first one on")
    if traced.num_steps_left_out:
        found.append(
            f"the last {traced.program.num_steps} steps were replayed; {traced.num_steps_left_out} before them were only read"
        )
    return tuple(found)
