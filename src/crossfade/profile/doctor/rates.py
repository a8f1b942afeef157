"""How much communication and computation slow each other down, as a trace tells, and how long each work would take alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from crossfade.intervals import merged
from crossfade.profile.doctor.program import NOBODY, Rates
from crossfade.profile.doctor.replay import speed_of_collective, speed_of_kernel
from crossfade.profile.traces.events import ActivityKind

# Where a trace does not have both: seen on two H200, NCCL with 24 blocks beside matrix products and elementwise kernels.
_OTHER_COMPUTE = 0.8
_OTHER_COMMUNICATION = 0.85
_SLOWEST = 0.3
_ENOUGH = 3  # of each, alone and beside


@dataclass(slots=True)
class Observed:
    """A work as it was seen. Times are on one clock for all ranks.

    Attributes:
        kind: what it is.
        rank: whose GPU.
        key: its name and number of blocks.
        start_us: when it started.
        end_us: when it ended.
        demand: see `Work`.
        meeting: see `Work`.
    """

    kind: ActivityKind
    rank: int
    key: tuple[str, int]
    start_us: float
    end_us: float
    demand: float
    meeting: int


def demand_of(kind: ActivityKind, num_blocks: int, num_sms: int) -> float:
    """How much of the multiprocessors a kernel can fill: 1 where the trace does not say."""
    if kind is not ActivityKind.COMPUTE:
        return 0.0
    return min(num_blocks / num_sms, 1.0) if num_blocks and num_sms else 1.0


def rates_of(works: Sequence[Observed], num_ranks: int) -> Rates:
    """Kernels that were seen both alone and beside a collective, and collectives likewise, tell how much they are slowed down."""
    alone: dict[tuple[str, int], list[float]] = {}
    beside: dict[tuple[str, int], list[float]] = {}
    shares = _shares_beside(works, num_ranks)
    for work, share in zip(works, shares, strict=True):
        if work.kind is not ActivityKind.COPY and (share < 0.05 or share > 0.95):
            (alone if share < 0.05 else beside).setdefault(work.key, []).append(work.end_us - work.start_us)
    found: dict[tuple[str, int], float] = {}
    weights: dict[tuple[str, int], float] = {}
    for key in alone.keys() & beside.keys():
        if len(alone[key]) >= _ENOUGH and len(beside[key]) >= _ENOUGH and median(beside[key]) > 5.0:
            found[key] = min(max(median(alone[key]) / median(beside[key]), _SLOWEST), 1.0)
            weights[key] = sum(beside[key])
    kinds = {work.key: work.kind for work in works}
    compute = {key: rate for key, rate in found.items() if kinds[key] is ActivityKind.COMPUTE}
    total = sum(weights[key] for key in compute)
    mean = sum(compute[key] * weights[key] for key in compute) / total if total else _OTHER_COMPUTE
    return Rates(compute, mean, _OTHER_COMMUNICATION, bool(compute))


def _shares_beside(works: Sequence[Observed], num_ranks: int) -> list[float]:
    """For each work, in which part of its time it ran beside the other kind on its GPU."""
    shares = [0.0] * len(works)
    for rank in range(num_ranks):
        own = [number for number, work in enumerate(works) if work.rank == rank]
        for kind, other in (
            (ActivityKind.COMPUTE, ActivityKind.COMMUNICATION),
            (ActivityKind.COMMUNICATION, ActivityKind.COMPUTE),
        ):
            busy = merged(
                (works[number].start_us, works[number].end_us) for number in own if works[number].kind is other
            )
            place = 0
            for number in sorted((n for n in own if works[n].kind is kind), key=lambda n: works[n].start_us):
                start, end = works[number].start_us, works[number].end_us
                while place < len(busy) and busy[place][1] <= start:
                    place += 1
                covered, at = 0.0, place
                while at < len(busy) and busy[at][0] < end:
                    covered += min(busy[at][1], end) - max(busy[at][0], start)
                    at += 1
                shares[number] = covered / (end - start) if end > start else 0.0
    return shares


def amounts(works: Sequence[Observed], rates: Sequence[float], num_ranks: int) -> list[float]:
    """How long each work would take alone, in microseconds: the time that it took, at the speeds that a replay gives it.

    Of a collective of several ranks only the time counts in which all of them had started and none had ended; all its parts
    have the same amount.
    """
    moving = _moving_times(works)
    done = [work.end_us - work.start_us if work.kind is ActivityKind.COPY else 0.0 for work in works]
    for rank in range(num_ranks):
        _Sweep(works, rates, moving, done).run([number for number, work in enumerate(works) if work.rank == rank])
    least: dict[int, float] = {}
    for work, amount in zip(works, done, strict=True):
        if work.meeting != NOBODY:
            least[work.meeting] = min(amount, least.get(work.meeting, amount))
    return [amount if work.meeting == NOBODY else least[work.meeting] for work, amount in zip(works, done, strict=True)]


class _Sweep:
    """One GPU's works in the order in which they started and ended, each making progress in between."""

    def __init__(
        self,
        works: Sequence[Observed],
        rates: Sequence[float],
        moving: Mapping[int, tuple[float, float]],
        done: list[float],
    ) -> None:
        self._works = works
        self._rates = rates
        self._moving_times = moving
        self._done = done
        self._kernels: set[int] = set()
        self._resident: set[int] = set()
        self._moving: set[int] = set()

    def run(self, numbers: Sequence[int]) -> None:
        """Gives each of these works the amount that it did."""
        changes: list[tuple[float, bool, int, set[int]]] = []
        for number in numbers:
            work = self._works[number]
            if work.kind is ActivityKind.COMPUTE:
                changes += self._stay(number, self._kernels, (work.start_us, work.end_us))
            elif work.kind is ActivityKind.COMMUNICATION:
                changes += self._stay(number, self._resident, (work.start_us, work.end_us))
                changes += self._stay(
                    number, self._moving, self._moving_times.get(work.meeting, (work.start_us, work.end_us))
                )
        changes.sort(key=lambda change: change[:3])
        now = 0.0
        for time, is_begin, number, where in changes:
            if time > now:
                self._progress(time - now)
                now = time
            (where.add if is_begin else where.discard)(number)

    @staticmethod
    def _stay(number: int, where: set[int], times: tuple[float, float]) -> list[tuple[float, bool, int, set[int]]]:
        return [(times[0], True, number, where), (times[1], False, number, where)]

    def _progress(self, length_us: float) -> None:
        demand = sum(self._works[number].demand for number in self._kernels)
        for number in self._kernels:
            own = self._works[number].demand
            speed = speed_of_kernel(self._rates[number], own, demand, is_beside=bool(self._resident))
            self._done[number] += length_us * speed
        for number in self._moving:
            speed = speed_of_collective(self._rates[number], len(self._moving), is_beside=bool(self._kernels))
            self._done[number] += length_us * speed


def _moving_times(works: Sequence[Observed]) -> dict[int, tuple[float, float]]:
    """From the start of each meeting's last part to the mean of its parts' ends.

    All ranks have it end at once, but their clocks scatter by some 10 us: the first end would make each collective too short.
    """
    starts: dict[int, float] = {}
    ends: dict[int, list[float]] = {}
    for work in works:
        if work.meeting != NOBODY:
            starts[work.meeting] = max(starts.get(work.meeting, work.start_us), work.start_us)
            ends.setdefault(work.meeting, []).append(work.end_us)
    return {meeting: (start, max(fmean(ends[meeting]), start + 1.0)) for meeting, start in starts.items()}
