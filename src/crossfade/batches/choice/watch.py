"""Detects that a host has become slower or faster than it was while ways were measured, so that another way may be the fastest.

The speed of a host changes, and with it that of an interleaved way whose time is that of its launches. (Two H200 in a virtual
machine: launches of two halves took 5.4 ms or 9.5, for seconds or for minutes, and one batch, which waits for the GPU, 6.6 in all
of them. A loop in Python took 11 us or 17 meanwhile, whatever ran before it.)

While such a way is the choice, its own launches tell that a host has become slow. Those of one batch do not tell that it has become
fast: where they are ahead of the GPU they wait for a full queue. So where one batch is the choice, a loop is timed now and then.

Each rank votes at the end of a window of steps, and reads the votes at the end of the next one: none waits for its GPU, nor for a
rank that is less than a window behind.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Mapping, Sequence

from crossfade.batches.choice.calibration import Launches, Moves, Way, is_host_bound
from crossfade.batches.ranks.agreement import Agreement
from crossfade.batches.ranks.votes import Votes

WINDOW_MS = 100.0
LEAST_STEPS = 8
FASTER, LITTLE_FASTER = 0.75, 0.9
"""A host is faster than it was where the loop takes this share of what it took: the one, or, where that would make launches short
enough, up to the other. (Two H200: experts by copy engines were launched in 16.8 ms while they were measured and in 13.9 later,
one batch took 15.4, and the loop had not become a quarter faster. Ways that are so close cost little to measure again.)
"""
HOSTS_DIFFER = 2.0
"""So many times as long the same launches take on a slow host, at most."""
_LOOP_LENGTH, _LOOPS_APART_S, _NUM_LOOPS = 300, 0.01, 4
"""Additions of a loop; how long after the last one the next comes; and how many there are before a step that is measured, of which
some may meet a pause.
"""
_LEAST_WINDOWS, _MOST_DOUBLINGS = 8, 6
"""A choice that was watched for fewer windows did not last. Windows are doubled at most six times."""


def loop_us() -> float:
    """How long this host takes for a small piece of work: some 10 us, more on a slow one."""
    begin_ns, total = time.perf_counter_ns(), 0
    for each in range(_LOOP_LENGTH):
        total += each
    return (time.perf_counter_ns() - begin_ns) / 1e3


class Watch:
    """Watches a choice on one rank. All ranks make their watches in one order, and begin equally many steps.

    A step whose output has gradients counts when its backward has ended, and not at all without one.

    Args:
        votes: of all ranks; one watch after the other may use them.
        step_ms: what a step of the choice took; alike on all ranks.
        num_doublings: windows are twice as long so often; alike on all ranks.
        limit_ms: where an interleaved way is the choice: its launches take longer on a host that has become slow. Alike on all
            ranks.
        slow_us: where one batch is the choice: the host is as slow as it was while the loop takes longer than this. Infinite on a
            rank whose own launches were short enough.
    """

    def __init__(
        self,
        votes: Votes,
        step_ms: float,
        num_doublings: int,
        *,
        limit_ms: float | None = None,
        slow_us: float = math.inf,
    ) -> None:
        self._votes = votes
        self._limit_ms = limit_ms
        self._slow_us = slow_us
        self.window = max(LEAST_STEPS, math.ceil(WINDOW_MS / step_ms)) << num_doublings
        self._num_steps = 0
        self._launches = Launches()
        self._loops_us: list[float] = []
        self._looped_s = -math.inf

    @property
    def counts_launches(self) -> bool:
        """Whether those of its steps are noted: an interleaved way is the choice."""
        return self._limit_ms is not None

    @property
    def num_windows(self) -> int:
        """How many have ended."""
        return self._num_steps // self.window

    def note_launches(self, way: Way, host_ms: float, num_not_replayed: int = 0) -> None:
        """A step's. As of `Calibration`; the way is the choice."""
        self._launches.add(host_ms)

    def has_changed(self) -> bool:
        """Called when a step begins. Whether another way may be the fastest: in the window before the last a rank's host was slow,
        or, where one batch is the choice, no rank's was. The same on all ranks in the same step.
        """
        self._num_steps += 1
        if math.isfinite(self._slow_us) and time.perf_counter() - self._looped_s > _LOOPS_APART_S:
            self._loops_us.append(loop_us())
            self._looped_s = time.perf_counter()
        if self._num_steps % self.window:
            return False
        answer = self._votes.vote(says_yes=self._is_slow())
        if answer is None or self.num_windows == 1:  # that one is about a watch before this one
            return False
        return answer is self.counts_launches

    def _is_slow(self) -> bool:
        """In the window that ends; which is cleared."""
        launches, self._launches = self._launches, Launches()
        loops_us, self._loops_us = self._loops_us, []
        if self._limit_ms is not None:
            return (launches.mean_ms() or 0.0) > self._limit_ms
        return statistics.median(loops_us or [math.inf]) > self._slow_us


class Backoff:
    """How often windows are doubled, since to measure again costs steps: of an interleaved choice, and of one batch.

    Those of a choice are doubled when it was measured again and is the choice again. Those of one batch also when an interleaved
    way was the choice for a short time only: on a host whose speed changes so soon, one batch loses least.
    """

    def __init__(self) -> None:
        self._doublings = {False: 0, True: 0}  # by whether one batch is the choice

    def note(self, *, was_single: bool, is_single: bool, num_windows: int) -> None:
        """Ways were measured again: what was the choice, for how many windows, and what is."""
        if was_single == is_single:
            self._doublings[was_single] += 1
        elif not was_single:
            self._doublings[False] = 0
            self._doublings[True] = 0 if num_windows >= _LEAST_WINDOWS else self._doublings[True] + 1

    def num_doublings(self, *, is_single: bool) -> int:
        """Of the next watch's windows."""
        return min(self._doublings[is_single], _MOST_DOUBLINGS)


class Watcher:
    """Makes the watch of each choice of one kind of call, on one rank.

    Attributes:
        ways: what is measured again: eager ones, since a captured one has few launches.
        num_again: how often ways were measured again.

    Args:
        agreement: with the other ranks.
        ways: that are measured first.
    """

    def __init__(self, agreement: Agreement, ways: Sequence[Way]) -> None:
        self.ways = [way for way in ways if not way.is_captured]
        self.num_again = 0
        self._agreement = agreement
        self._votes: Votes | None = None
        self._backoff = Backoff()
        self._watch: Watch | None = None  # of the choice
        self._before: Watch | None = None
        self._loops_us: dict[Way, list[float]] = {}

    @property
    def is_on(self) -> bool:
        """Whether the choice is watched."""
        return self._watch is not None

    @property
    def counter(self) -> Watch | None:
        """What adds up the launches of the choice's steps; None where they do not count."""
        return self._watch if self._watch is not None and self._watch.counts_launches else None

    @property
    def is_over(self) -> bool:
        """Whether nothing is watched any more, since a rank has waited too long for the others."""
        return self._votes is not None and self._votes.is_over

    def note_measured(self, way: Way) -> None:
        """A step of a calibration begins."""
        if way.moves is not Moves.ONE and not way.is_captured:
            self._loops_us.setdefault(way, []).extend(loop_us() for _ in range(_NUM_LOOPS))

    def has_changed(self) -> bool:
        """As `Watch.has_changed`. False where the process group is destroyed, since nothing can be measured then."""
        if self._watch is None or not self._agreement.has_group:
            return False
        has_changed = self._watch.has_changed()
        if has_changed or self.is_over:
            self._before, self._watch = self._watch, None
        if has_changed:
            self.num_again += 1
            self._loops_us.clear()
        return has_changed

    def maximum(self, values: Sequence[float]) -> list[float] | None:
        """What ways that were measured again took the slowest rank. None where a rank has waited too long for the others.

        It is no collective of the group: other collectives may come between the calls on one rank, and not on another.
        """
        assert self._votes is not None, "it has changed"
        return self._votes.maximum(values)

    def begin(
        self,
        chosen: Way,
        times_ms: Mapping[Way, float],
        launches_ms: Mapping[Way, float],
        own_launches_ms: Mapping[Way, float],
        least_gain: float,
    ) -> None:
        """A way is chosen: it is watched from now on, if on a slower or a faster host another one may be the fastest.

        Times and launches are the slowest rank's, and ``own_launches_ms`` this one's. ``least_gain``: by how much a way had to win.
        """
        plain = Way(Moves.ONE)
        if self._before is not None:
            self._backoff.note(
                was_single=not self._before.counts_launches,
                is_single=chosen == plain,
                num_windows=self._before.num_windows,
            )
        bound = [way for way in times_ms if is_host_bound(way, times_ms[way], launches_ms[way])]
        others = [way for way in times_ms if way not in bound]
        if chosen in bound and others:
            limit_ms = min(times_ms[way] for way in others)
            self._watch = self._new_watch(times_ms[chosen], is_single=False, limit_ms=limit_ms)
        elif chosen == plain and not any(way.is_captured for way in times_ms):
            limit_ms = times_ms[plain] / (1 + least_gain)  # with launches as short as that it would have been chosen
            rivals = [way for way in bound if limit_ms < launches_ms[way] <= HOSTS_DIFFER * limit_ms]
            if rivals:
                rival = min(rivals, key=lambda way: launches_ms[way])
                was_slow = own_launches_ms[rival] > limit_ms
                share = min(max(FASTER, limit_ms / launches_ms[rival]), LITTLE_FASTER)
                slow_us = share * _upper_quartile(self._loops_us[rival]) if was_slow else math.inf
                self._watch = self._new_watch(times_ms[plain], is_single=True, slow_us=slow_us)

    def _new_watch(self, step_ms: float, *, is_single: bool, **slow: float) -> Watch:
        if self._votes is None:
            self._votes = self._agreement.votes()
        num_doublings = self._backoff.num_doublings(is_single=is_single)
        return Watch(self._votes, step_ms, num_doublings, **slow)


def _upper_quartile(values: Sequence[float]) -> float:
    """What is as long as the slowest quarter: a host may have been fast in between."""
    return sorted(values)[len(values) * 3 // 4]
