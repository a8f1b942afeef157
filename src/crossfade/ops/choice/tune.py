"""Measures which candidate does a shape best: the model ranks, a short measurement decides among the best, alike on all ranks.

What is timed is a graph of calls where they are replayed, else calls one by one.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import ChannelError, DeviceError
from crossfade.ops.calls.job import Shape
from crossfade.ops.choice.cache import Decision, Source
from crossfade.ops.choice.candidate import BASELINES, PLAIN, Candidate
from crossfade.ops.choice.choose import TIE, Chooser, Predict, first_line
from crossfade.ops.choice.replays import forget, is_replayed
from crossfade.peers.replays import Recorder

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup

Trial = Callable[[int], Sequence[float]]
"""Does it so many times, each time together with the other ranks; gives this rank's microseconds for each. First it is asked
for 0: then it is done as often as it needs to be warm, and captured where that is what is timed. The ranks agree that all could."""
Measure = Callable[[Shape, Candidate], Trial]
"""Sets a candidate up, with its memory and its kernels. It talks to no other rank, so that one may fail where others do not."""
HOPELESS = 1.3
"""What took so much longer than the best one in the first turn gets no other."""
_FAILED = -1
"""In the place of a time in nanoseconds."""


class Tuner:
    """Tunes the choices of a `Chooser`. All ranks make the same calls, with equal shapes.

    Args:
        measure: how a candidate is timed.
        chooser: what it decides for.
        num_best: how many of those that were predicted best are measured. So is what the model does not know, and all that are
            torch's own, so that no choice is slower than the best of them.
        num_turns: how often the candidates take turns.
        num_repeats: how often each is timed in a turn.
    """

    def __init__(
        self, measure: Measure, chooser: Chooser, *, num_best: int = 4, num_turns: int = 3, num_repeats: int = 5
    ) -> None:
        if min(num_best, num_turns, num_repeats) < 1:
            raise ValueError("num_best, num_turns and num_repeats are at least 1")
        self._measure = measure
        self.chooser = chooser
        self._num_best = num_best
        self._num_turns = num_turns
        self._num_repeats = num_repeats

    @property
    def predict(self) -> Predict:
        """The model's."""
        return self.chooser.predict

    def choose(self, shape: Shape, *, without: str = "") -> Candidate:
        """See `Chooser.choose`."""
        return self.chooser.choose(shape, without=without)

    def decide(self, shape: Shape) -> Decision:
        """See `Chooser.decide`."""
        return self.chooser.decide(shape)

    def tune(self, shape: Shape, *, again: bool = False) -> Decision:
        """Decides a shape's bucket by measuring, unless it was. Collective.

        Args:
            shape: what is measured; the decision holds for all shapes of its bucket.
            again: measure it even if it was.

        Raises:
            DeviceError: not one candidate could be measured.
            ChannelError: another rank has died, or does not answer.
        """
        decision = self.decide(shape)
        if decision.source is Source.MEASURED and not again:
            return decision
        bucket = shape.bucket
        number = self.chooser.begin_measuring()
        times_us, notes = self._time(shape, self._shortlist(shape, number))
        measured = Decision(tuple(_settled(times_us)), Source.MEASURED, tuple(times_us.items()), tuple(notes))
        heard = self.chooser.hear(f"tuned {number}: {bucket}", lambda: measured)
        decision = Decision(heard.order, heard.source, heard.times_us, tuple(notes))
        self.chooser.keep(bucket, decision)
        return decision

    def _shortlist(self, shape: Shape, number: int) -> list[Candidate]:
        """What is measured: the best few, those of which the model knows nothing, and all that are torch's own; by rank 0's word,
        so on all ranks the same.
        """

        def say() -> Decision:
            found = self.chooser.rank(shape)
            chosen = [each for each, _ in found[: self._num_best]]
            due = [each for each, time_us in found if time_us is None or each.name in BASELINES]
            chosen += [each for each in due if each not in chosen]
            return Decision((*chosen, *([] if PLAIN in chosen else [PLAIN])), Source.MODEL)

        return list(self.chooser.hear(f"tuned {number}: {shape}, shortlist", say).order)

    def _time(self, shape: Shape, candidates: Sequence[Candidate]) -> tuple[dict[Candidate, float], list[str]]:
        """Median of each candidate's times, the slowest rank's each time; and what was left out, and why."""
        notes: list[str] = []
        trials = {each: trial for each in candidates if (trial := self._set_up(shape, each, notes)) is not None}
        trials = {each: trial for each, trial in trials.items() if self._agree(each, partial(trial, 0), notes)}
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

    def _agree(self, candidate: Candidate, work: Callable[[], object], notes: list[str]) -> bool:
        """Does something; whether all ranks could."""
        why = ""
        try:
            work()
        except ChannelError:
            raise
        except Exception as error:
            why = first_line(error)
        rows = self.chooser.ranks.gather([_FAILED if why else 0])
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
            why = first_line(error)
        rows = self.chooser.ranks.gather(own)
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


NUM_WARM_UPS = 3
NUM_IN_GRAPH = 4
"""Calls of a replay that is timed."""
_NUM_HEATS = 4
"""Replays, or calls, in front of those that are timed."""
_HEAT_SIZE, _NUM_PRODUCTS = 4096, 50
"""Products of bfloat16 in front of those, 10 ms on an H200: short calls alone would leave a GPU cooler than long ones."""
_RECORDER, _HEAT = "crossfade.ops.tune's recorder", "crossfade.ops.tune's heat"


def trial_of(group: PeerGroup, run: Callable[[], object]) -> Trial:
    """Times something that all ranks of a group do together, on the group's lane 0.

    They begin each repetition together. On a GPU all of them are enqueued one behind the other, so the host's launches count only
    where the device has to wait for them; on a lane that can be replayed they do not count, for there a call that comes again is
    replayed (`crossfade.ops.choice.replays`), or captured by its caller. What is captured is not done yet, so a capture that fails
    on one rank keeps no other one waiting.
    """
    is_warm, timed, num_calls = False, run, 1

    def trial(num_repeats: int) -> Sequence[float]:
        nonlocal is_warm, timed, num_calls
        if not is_warm:
            for _ in range(NUM_WARM_UPS):
                run()
            if is_replayed(group):
                timed, num_calls = _captured(group, run), NUM_IN_GRAPH
            is_warm = True
        if group.device_type == "cpu":
            return _on_host(group, run, num_repeats)
        return [each / num_calls for each in _on_gpu(group, timed, num_repeats)]

    return trial


def _captured(group: PeerGroup, run: Callable[[], object]) -> Callable[[], object]:
    """What replays several calls. What was captured of the calls before (`crossfade.ops.choice.replays`) is not needed again."""
    forget(group)
    recorder: Recorder | None = group.belongings.get(_RECORDER)
    if recorder is None:
        recorder = group.belongings[_RECORDER] = Recorder(group)

    def several() -> None:
        for _ in range(NUM_IN_GRAPH):
            run()

    replay: Callable[[], object] = recorder.capture(several).replay
    return replay


def _on_host(group: PeerGroup, run: Callable[[], object], num_repeats: int) -> list[float]:
    times_us = []
    for _ in range(num_repeats):
        group.barrier()
        begin_ns = time.perf_counter_ns()
        run()
        times_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
    return times_us


def _heat(group: PeerGroup) -> None:
    """Products of this rank's own, so no other rank has to do as many."""
    torch = torch_or_raise()
    square = group.belongings.get(_HEAT)
    if square is None:
        square = group.belongings[_HEAT] = torch.randn(
            _HEAT_SIZE, _HEAT_SIZE, dtype=torch.bfloat16, device=group.device
        )
    for _ in range(_NUM_PRODUCTS):
        torch.mm(square, square)


def _on_gpu(group: PeerGroup, run: Callable[[], object], num_repeats: int) -> list[float]:
    cuda = torch_or_raise().cuda
    # Behind the host's pause the first ones find a cool GPU. With nothing to time there are none: another rank may have failed to
    # capture it, and would never do its part.
    if num_repeats:
        _heat(group)
        for _ in range(_NUM_HEATS):
            run()
    pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(num_repeats)]
    for begin, end in pairs:
        group.barrier()
        begin.record()
        run()
        end.record()
    cuda.synchronize(group.memory.driver.device)
    group.check()
    return [1e3 * begin.elapsed_time(end) for begin, end in pairs]
