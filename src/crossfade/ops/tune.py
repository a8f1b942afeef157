"""Which candidate does a shape: the model ranks, a short measurement decides among the best, and rank 0 decides for all.

One decision is made for each bucket of shapes, and told once. Which of its candidates a certain shape takes follows from the shape
alone, so no rank has to ask again. An untuned bucket has the model's decision; `Tuner.tune` measures, and only that.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from threading import Lock

from crossfade.errors import ChannelError, DeviceError
from crossfade.ops.cache import Cache
from crossfade.ops.candidate import BASELINES, PLAIN, Candidate
from crossfade.ops.decision import Decision, Source
from crossfade.ops.prediction import Prediction
from crossfade.ops.ranks import Ranks
from crossfade.ops.shape import Shape

__all__ = ["Candidates", "Measure", "Predict", "Trial", "Tuner"]

Trial = Callable[[int], Sequence[float]]
"""Does it so many times, each time together with the other ranks; gives this rank's microseconds for each. First it is asked
for 0: then it is done as often as it needs to be warm, and captured where that is what is timed. The ranks agree that all could."""
Measure = Callable[[Shape, Candidate], Trial]
"""Sets a candidate up, with its memory and its kernels. It talks to no other rank, so that one may fail where others do not."""
Predict = Callable[[Shape, Candidate], Prediction | None]
Candidates = Callable[[Shape], Sequence[Candidate]]
"""All that can do a shape, the same ones on all ranks, and plain among them."""

TIE = 1.02
"""What is less than 2 % faster is not faster: measurements differ by as much. Of such ways the one that was predicted best is
taken, and of such predictions plain."""
HOPELESS = 1.3
"""What took so much longer than the best one in the first turn gets no other."""
MOST_SHAPES = 4096
"""Shapes whose candidate is remembered."""
_FAILED = -1
"""In the place of a time in nanoseconds."""


class Tuner:
    """Decides for the ranks of a group. All ranks make the same calls, with equal shapes.

    Args:
        measure: how a candidate is timed.
        predict: how long it should take; None for what no model knows, which is never chosen unmeasured, nor is what it guesses.
        candidates: of a shape.
        ranks: who decides together.
        cache: what was decided before, and where it is kept; used by rank 0 alone. None to keep nothing.
        num_best: how many of those that were predicted best are measured. So is the best one of each other name, what the model
            does not know, and all that are torch's own ways, so that no choice is slower than the best of them.
        num_turns: how often the candidates take turns.
        num_repeats: how often each is timed in a turn.

    Attributes:
        predict: as it was given.
    """

    def __init__(
        self,
        measure: Measure,
        predict: Predict,
        candidates: Candidates,
        ranks: Ranks,
        cache: Cache | None = None,
        *,
        num_best: int = 4,
        num_turns: int = 3,
        num_repeats: int = 5,
    ) -> None:
        if min(num_best, num_turns, num_repeats) < 1:
            raise ValueError("num_best, num_turns and num_repeats are at least 1")
        self._measure = measure
        self.predict = predict
        self._candidates = candidates
        self._ranks = ranks
        self._cache = cache
        self._num_best = num_best
        self._num_turns = num_turns
        self._num_repeats = num_repeats
        self._decisions: dict[Shape, Decision] = {}
        self._chosen: dict[tuple[Shape, str], Candidate] = {}
        self._num_tuned = 0
        self._deciding = Lock()

    def choose(self, shape: Shape, *, without: str = "") -> Candidate:
        """The candidate for a shape, at once: what was measured for its bucket, now or before, else the model's choice.

        Measures nothing, so it may be called inside a capture. The first call for a bucket waits for rank 0's word.

        Args:
            shape: what is to be done.
            without: the name of candidates that cannot do this call, whatever its shape; the same on all ranks.

        Raises:
            ChannelTimeout: rank 0 has not asked about this bucket.
        """
        chosen = self._chosen.get((shape, without))
        if chosen is None:
            able = {each for each in self._candidates(shape) if each.name != without}
            chosen = next((each for each in self.decide(shape).order if each in able), PLAIN)
            if len(self._chosen) >= MOST_SHAPES:
                self._chosen.clear()
            self._chosen[shape, without] = chosen
        return chosen

    def decide(self, shape: Shape) -> Decision:
        """The decision for a shape's bucket, as `choose` uses it."""
        bucket = shape.bucket
        if bucket not in self._decisions:
            # Rank 0 says it once, whichever of its threads come here; the others only hear it, and may wait for it.
            with self._deciding if self._ranks.rank == 0 else nullcontext():
                if bucket not in self._decisions:
                    self._decisions[bucket] = self._hear(
                        str(bucket), lambda: self._kept(bucket) or self._modelled(bucket)
                    )
        return self._decisions[bucket]

    def tune(self, shape: Shape, *, is_capturing: bool = False, again: bool = False) -> Decision:
        """Decides a shape's bucket by measuring, unless it was. Collective.

        Args:
            shape: what is measured; the decision holds for all shapes of its bucket.
            is_capturing: the current stream is being captured, so nothing can be measured: gives what `decide` gives.
            again: measure it even if it was.

        Raises:
            DeviceError: not one candidate could be measured.
            ChannelError: another rank has died, or does not answer.
        """
        decision = self.decide(shape)
        if is_capturing or (decision.source is Source.MEASURED and not again):
            return decision
        bucket = shape.bucket
        self._num_tuned += 1
        times_us, notes = self._time(shape, self._shortlist(shape))
        measured = Decision(tuple(_settled(times_us)), Source.MEASURED, tuple(times_us.items()), tuple(notes))
        heard = self._hear(f"tuned {self._num_tuned}: {bucket}", lambda: measured)
        self._decisions[bucket] = Decision(heard.order, heard.source, heard.times_us, tuple(notes))
        self._chosen = {each: chosen for each, chosen in self._chosen.items() if each[0].bucket != bucket}
        if self._cache is not None and self._ranks.rank == 0:
            self._cache.keep(bucket, heard)
        return self._decisions[bucket]

    def _hear(self, key: str, say: Callable[[], Decision]) -> Decision:
        """Rank 0's decision about something, in whatever order the ranks ask.

        Raises:
            DeviceError: on the others, when rank 0 could not decide: there the error itself is raised.
        """
        failure: list[Exception] = []

        def text() -> str:
            try:
                return json.dumps(say().to_data())
            except Exception as error:
                failure.append(error)
                return json.dumps({"failure": _line(error)})

        heard = json.loads(self._ranks.tell(key, text))
        if failure:
            raise failure[0]
        if "failure" in heard:
            raise DeviceError(f"rank 0 could not decide about '{key}': {heard['failure']}")
        return Decision.from_data(heard)

    def _kept(self, bucket: Shape) -> Decision | None:
        return None if self._cache is None else self._cache.load(bucket)

    def _modelled(self, bucket: Shape) -> Decision:
        known = {each: us for each, us in self._predicted(bucket) if us is not None}
        order = _ranked(known)
        return Decision((*order, *([] if PLAIN in order else [PLAIN])), Source.MODEL)

    def _predicted(self, shape: Shape) -> list[tuple[Candidate, float | None]]:
        """All candidates with their predicted times, the fastest first, those without one at the end."""
        times_us: dict[Candidate, float] = {}
        unknown: list[Candidate] = []
        for each in self._candidates(shape):
            predicted = self.predict(shape, each)
            if predicted is None or not math.isfinite(predicted.total_us):
                unknown.append(each)
            else:
                times_us[each] = predicted.total_us
        return [*((each, times_us[each]) for each in _ranked(times_us)), *((each, None) for each in unknown)]

    def _shortlist(self, shape: Shape) -> list[Candidate]:
        """What is measured: the best few, the best of each name, those of which the model knows nothing, and all that are torch's
        own; by rank 0's word, so on all ranks the same.
        """

        def say() -> Decision:
            found = self._predicted(shape)
            chosen = [each for each, _ in found[: self._num_best]]
            for each, time_us in found:
                is_due = time_us is None or each.name in BASELINES or each.name not in {known.name for known in chosen}
                if is_due and each not in chosen:
                    chosen.append(each)
            return Decision((*chosen, *([] if PLAIN in chosen else [PLAIN])), Source.MODEL)

        return list(self._hear(f"tuned {self._num_tuned}: {shape}, shortlist", say).order)

    def _time(self, shape: Shape, candidates: Sequence[Candidate]) -> tuple[dict[Candidate, float], list[str]]:
        """Median of each candidate's times, the slowest rank's each time; and what was left out, and why."""
        notes: list[str] = []
        trials = {each: trial for each in candidates if (trial := self._set_up(shape, each, notes)) is not None}
        trials = {each: trial for each, trial in trials.items() if self._warm_up(each, trial, notes)}
        times_us: dict[Candidate, list[float]] = {each: [] for each in trials}
        for turn in range(self._num_turns):
            order = list(trials)  # turned round each time: what came before leaves a GPU warmer or cooler
            for each in order[::-1] if turn % 2 else order:
                slowest_us = self._run(each, trials[each], notes)
                if slowest_us is None:
                    del times_us[each], trials[each]
                else:
                    times_us[each] += slowest_us
            if turn == 0 and times_us:
                limit_us = HOPELESS * min(median(found) for found in times_us.values())
                trials = {
                    each: trial for each, trial in trials.items() if each == PLAIN or median(times_us[each]) <= limit_us
                }
        if not times_us:
            raise DeviceError(f"no way to do {shape} could be measured:\n" + "\n".join(notes))
        return {each: median(found) for each, found in times_us.items()}, notes

    def _set_up(self, shape: Shape, candidate: Candidate, notes: list[str]) -> Trial | None:
        """What times a candidate, if all ranks could set it up."""
        trial: list[Trial] = []
        can = self._agree(candidate, lambda: trial.append(self._measure(shape, candidate)), notes)
        return trial[0] if can else None

    def _warm_up(self, candidate: Candidate, trial: Trial, notes: list[str]) -> bool:
        """Makes a candidate ready to be timed; whether all ranks could."""
        return self._agree(candidate, lambda: trial(0), notes)

    def _agree(self, candidate: Candidate, work: Callable[[], object], notes: list[str]) -> bool:
        """Does something; whether all ranks could."""
        why = ""
        try:
            work()
        except ChannelError:
            raise
        except Exception as error:
            why = _line(error)
        rows = self._ranks.gather([_FAILED if why else 0])
        return self._is_all_right(candidate, rows, why, notes)

    def _run(self, candidate: Candidate, trial: Trial, notes: list[str]) -> list[float] | None:
        """The slowest rank's time of each repetition; None if a rank failed."""
        own, why = [_FAILED] * self._num_repeats, ""
        try:
            times_us = trial(self._num_repeats)
            if len(times_us) != self._num_repeats or not all(math.isfinite(each) and each >= 0 for each in times_us):
                raise ValueError(f"{self._num_repeats} times were asked for, and {times_us!r} given")
            own = [max(1, round(each * 1e3)) for each in times_us]
        except ChannelError:
            raise
        except Exception as error:
            why = _line(error)
        rows = self._ranks.gather(own)
        if not self._is_all_right(candidate, rows, why, notes):
            return None
        return [max(column) / 1e3 for column in zip(*rows, strict=True)]

    def _is_all_right(self, candidate: Candidate, rows: list[list[int]], why: str, notes: list[str]) -> bool:
        failed = [rank for rank, row in enumerate(rows) if _FAILED in row]
        if failed:
            who = f"rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}"
            notes.append(f"{candidate} is left out: it failed on {who}{': ' * bool(why)}{why}")
        return not failed


def _settled(times_us: dict[Candidate, float]) -> list[Candidate]:
    """From the fastest on; but of those that are as good as the fastest, the one that was predicted best is the first: times are in
    that order.
    """
    order = sorted(times_us, key=lambda each: times_us[each])
    first = next(each for each in times_us if times_us[each] <= TIE * times_us[order[0]])
    order.remove(first)
    return [first, *order]


def _ranked(times_us: dict[Candidate, float]) -> list[Candidate]:
    """From the fastest on; but plain is the first of those that are as good as the fastest."""
    order = sorted(times_us, key=lambda each: times_us[each])
    if PLAIN in times_us and times_us[PLAIN] <= TIE * times_us[order[0]]:
        order.remove(PLAIN)
        order.insert(0, PLAIN)
    return order


def _line(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__
