"""Several batches at once, each on a stream of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial

from crossfade.profile.doctor.losses import Reason
from crossfade.profile.doctor.turns import in_turns
from crossfade.profile.doctor.view import Cause, Finding, View, share
from crossfade.profile.traces.collectives import group_of, is_ordered
from crossfade.profile.traces.events import ActivityKind

_MOST_RUNS = 6  # of a step's launches: more often, and batches are launched in turns already
_CODE = """with steps as run:  # steps = crossfade.interleaved()
    run(loss_of, first)
    run(loss_of, second)
    run.backward()"""
_LEAST_SHARE = 0.2  # of a step's computation, for a stream that carries a batch


def launch_order(view: View) -> Iterator[Finding]:
    """Batches on several streams, one launched after the other: the second stream is empty meanwhile, and where they share a
    communicator, its collectives come after all of the first one's.
    """
    lanes = batches_in_sequence(view)
    if not lanes or not view.is_worth_a_look(view.lost_us(Reason.TRANSFER, Reason.LAUNCH, Reason.PEER)):
        return
    num_runs, num_launches = _runs(view, lanes)
    lost = view.lost_us(Reason.TRANSFER, Reason.PEER)
    yield Finding(
        Cause.LAUNCH_ORDER,
        "batches on different streams are launched one after the other",
        f"the host launches {num_launches:.0f} times a step for {len(lanes)} streams, and changes between them"
        f" only {num_runs:.0f} times;"
        f" a collective of one batch has nothing of the other beside it for {share(view.share_of(lost))} of the time",
        "where the batches are issued",
        "issue the batches in turns, each collective of one between the computation of the other, as crossfade.interleaved does",
        _CODE,
        view.loss_marks(
            [loss for loss in view.losses if loss.reason is Reason.TRANSFER], "nothing of the other batch is launched"
        ),
        partial(in_turns, lanes=lanes, communicators=_communicators(view)),
    )


def batches_in_sequence(view: View) -> set[int]:
    """The lanes of batches that are launched one after the other; empty where there are none."""
    lanes = _batches(view)
    if len(lanes) < 2:
        return set()
    num_runs, num_launches = _runs(view, lanes)
    return lanes if num_runs <= _MOST_RUNS and num_launches >= 4 * len(lanes) else set()


def _communicators(view: View) -> list[list[int]]:
    """The collectives of each communicator of each rank, in the order of their launches."""
    found: dict[tuple[int, tuple[str, str]], list[int]] = {}
    for number in view.collectives():
        activity, rank = view.traced.activities[number], view.program.works[number].rank
        if is_ordered(activity):
            found.setdefault((rank, group_of(activity)), []).append(number)
    return [sorted(numbers, key=lambda n: view.program.works[n].call) for numbers in found.values()]


def _batches(view: View) -> set[int]:
    """The lanes that compute a good part of their rank's work."""
    totals: Counter[int] = Counter()
    of_rank: Counter[int] = Counter()
    ranks: dict[int, int] = {}
    for work in view.program.works:
        if work.kind is ActivityKind.COMPUTE:
            totals[work.lane] += work.amount_us  # type: ignore[assignment]
            of_rank[work.rank] += work.amount_us  # type: ignore[assignment]
            ranks[work.lane] = work.rank
    lanes = {lane for lane, total in totals.items() if total > _LEAST_SHARE * of_rank[ranks[lane]]}
    several = Counter(ranks[lane] for lane in lanes)
    return {lane for lane in lanes if several[ranks[lane]] > 1}


def _runs(view: View, lanes: set[int]) -> tuple[float, float]:
    """How often the host changes between lanes in a step, and how often it launches, on the mean of ranks and steps."""
    num_changes = num_launches = 0
    last: dict[int, int] = {}
    for works in view.launched:
        for number in works[:1]:
            work = view.program.works[number]
            if work.lane in lanes:
                num_launches += 1
                num_changes += last.get(work.rank, work.lane) != work.lane
                last[work.rank] = work.lane
    num = view.program.num_steps * view.program.num_ranks
    return num_changes / num, num_launches / num
