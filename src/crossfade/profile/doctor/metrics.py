"""How much communication is hidden: for each rank, and for each collective of each group."""

from __future__ import annotations

from dataclasses import dataclass

from crossfade.intervals import common_us, length_us, merged, union_us, without
from crossfade.profile.doctor.build import Traced
from crossfade.profile.doctor.program import NOBODY
from crossfade.profile.traces.events import ActivityKind


@dataclass(frozen=True)
class RankMetrics:
    """One rank's time in the replayed steps, in microseconds. ``communicate_us == hidden_us + exposed_us``.

    Attributes:
        label: which rank.
        total_us: from the steps' begin to the rank's last work.
        compute_us: some kernel computes.
        communicate_us: some collective is on the GPU.
        hidden_us: both.
        exposed_us: a collective is there, and nothing computes.
        peer_us: of ``communicate_us``, collectives only wait for other ranks. 0 where only one rank was traced.
        copy_us: a copy runs, and neither computation nor a collective.
        idle_us: nothing runs.
        slowed_us: how much longer kernels take for what runs beside them.
    """

    label: str
    total_us: float
    compute_us: float
    communicate_us: float
    hidden_us: float
    exposed_us: float
    peer_us: float
    copy_us: float
    idle_us: float
    slowed_us: float


@dataclass(frozen=True)
class CollectiveMetrics:
    """One kind of collective of one group, over all ranks, in microseconds and a rank's mean.

    Attributes:
        name: such as ``allreduce``; a kernel's name where the trace says no more.
        group: the process group's name; may be empty.
        num: how often a rank took part.
        communicate_us: how long it was on the GPU.
        exposed_us: how long of that nothing computed.
        peer_us: how long of that it waited for other ranks.
    """

    name: str
    group: str
    num: float
    communicate_us: float
    exposed_us: float
    peer_us: float


def rank_metrics(traced: Traced) -> list[RankMetrics]:
    """A row for each rank."""
    rows = []
    for rank, trace in enumerate(traced.traces):
        compute = _busy(traced, rank, ActivityKind.COMPUTE)
        communicate = _busy(traced, rank, ActivityKind.COMMUNICATION)
        copies = _busy(traced, rank, ActivityKind.COPY)
        total = max((end for _, end in (*compute[-1:], *communicate[-1:], *copies[-1:])), default=0.0)
        busy = merged([*compute, *communicate])
        hidden = common_us(communicate, compute)
        slowed = sum(
            max(traced.ends_us[n] - traced.starts_us[n] - traced.program.works[n].amount_us, 0.0)
            for n in traced.program.works_of(rank, ActivityKind.COMPUTE)
        )
        rows.append(
            RankMetrics(
                trace.label,
                total,
                length_us(compute),
                length_us(communicate),
                hidden,
                length_us(communicate) - hidden,
                union_us(_waiting(traced, rank)),
                length_us(without(copies, busy)),
                total - union_us([*busy, *copies]),
                slowed,
            )
        )
    return rows


def collective_metrics(traced: Traced) -> list[CollectiveMetrics]:
    """A row for each collective of each group, the most exposed first."""
    spans: dict[tuple[str, str], dict[int, list[tuple[float, float]]]] = {}
    waiting: dict[tuple[str, str], float] = {}
    moves = traced.moves_from_us
    for number, work in enumerate(traced.program.works):
        if work.kind is ActivityKind.COMMUNICATION:
            activity = traced.activities[number]
            key = activity.message.collective or activity.name.split("(")[0], activity.message.group
            times = traced.starts_us[number], traced.ends_us[number]
            spans.setdefault(key, {}).setdefault(work.rank, []).append(times)
            waiting[key] = waiting.get(key, 0.0) + max(moves.get(work.meeting, times[0]) - times[0], 0.0)
    compute = [_busy(traced, rank, ActivityKind.COMPUTE) for rank in range(traced.program.num_ranks)]
    rows = []
    for key, by_rank in spans.items():
        num = sum(map(len, by_rank.values())) / len(by_rank)
        total = sum(union_us(found) for found in by_rank.values()) / len(by_rank)
        exposed = sum(length_us(without(merged(found), compute[rank])) for rank, found in by_rank.items()) / len(
            by_rank
        )
        rows.append(CollectiveMetrics(*key, num, total, exposed, waiting[key] / len(by_rank)))
    return sorted(rows, key=lambda row: -row.exposed_us)


def _busy(traced: Traced, rank: int, kind: ActivityKind) -> list[tuple[float, float]]:
    return merged((traced.starts_us[n], traced.ends_us[n]) for n in traced.program.works_of(rank, kind))


def _waiting(traced: Traced, rank: int) -> list[tuple[float, float]]:
    moves = traced.moves_from_us
    return [
        (traced.starts_us[number], min(moves[work.meeting], traced.ends_us[number]))
        for number, work in enumerate(traced.program.works)
        if work.rank == rank and work.meeting != NOBODY
    ]
