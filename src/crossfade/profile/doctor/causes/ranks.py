"""A peer is late: collectives wait for the rank that computes longest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from statistics import median

from crossfade.profile.doctor.changes import balanced
from crossfade.profile.doctor.losses import Reason
from crossfade.profile.doctor.program import NOBODY
from crossfade.profile.doctor.view import Cause, Finding, View, share
from crossfade.profile.traces.events import ActivityKind

_SLOWER = 1.04  # a GPU whose kernels all take that many times as long is slower itself
_SAME_WORK = 0.9  # if so many of a rank's kernels are launched in the same sizes on the others: else it has other work


def late_peer(view: View) -> Iterator[Finding]:
    """Ranks wait in collectives for one that starts them later. Needs the traces of several ranks."""
    lost = view.lost_us(Reason.PEER)
    if view.program.num_ranks < 2 or not view.is_worth_a_look(lost):
        return
    last: Counter[int] = Counter()
    starts: dict[int, list[tuple[float, int]]] = {}
    for number in view.collectives():
        work = view.program.works[number]
        if work.meeting != NOBODY:
            starts.setdefault(work.meeting, []).append((view.traced.starts_us[number], work.rank))
    for found in starts.values():
        last[max(found)[1]] += 1
    late, num = last.most_common(1)[0]
    slower = _slower(view, late)
    is_slow = slower >= _SLOWER
    waiting = [loss for loss in view.losses if loss.reason is Reason.PEER]
    label = view.traced.traces[late].label
    yield Finding(
        Cause.SLOW_GPU if is_slow else Cause.LATE_PEER,
        f"{label} is the last to start {share(num / len(starts))} of the collectives, and the others wait for it",
        f"GPUs wait for a late peer for up to {share(view.share_of(lost))} of the time; "
        + (
            f"the same kernels take {slower:.2f} x as long on {label} as on the others"
            if is_slow
            else (
                f"the same kernels take {slower:.2f} x as long as on the others: it has other work, or its host is slower"
                if slower
                else "its kernels have other sizes than those of the others: it has other work"
            )
        ),
        label,
        "look at that GPU's clocks, temperature and power limit: no change of the program wins this back"
        if is_slow
        else "give all ranks equally much work: batches of equal length in tokens, experts and layers spread evenly, no logging,"
        " checkpoints or data loading on one rank alone",
        "",
        view.work_marks({loss.work for loss in waiting}, "waits for a peer"),
        balanced,
    )


def _slower(view: View, rank: int) -> float:
    """How many times as long the same kernels take on a rank as on the others, on the median; 0 if its kernels are not the same.

    A kernel whose blocks stay (most matrix products on newer GPUs) has one size for all work, so its time alone tells nothing.
    """
    own: dict[tuple[str, int], list[float]] = {}
    others: dict[tuple[str, int], list[float]] = {}
    for number, work in enumerate(view.program.works):
        if work.kind is ActivityKind.COMPUTE:
            activity = view.traced.activities[number]
            times = own if work.rank == rank else others
            times.setdefault((activity.name, activity.num_blocks), []).append(work.amount_us)
    ratios = [median(own[key]) / median(others[key]) for key in own.keys() & others.keys() if median(others[key]) > 5.0]
    if sum(len(own[key]) for key in own.keys() & others.keys()) < _SAME_WORK * sum(map(len, own.values())):
        return 0.0
    return median(ratios) if ratios else 1.0
