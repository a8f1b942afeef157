"""Collectives that are not beside computation although they could be, or that are and slow it down."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

from crossfade.profile.doctor.causes.batches import batches_in_sequence
from crossfade.profile.doctor.causes.queues import held_by_a_queue
from crossfade.profile.doctor.changes import (
    beside_their_callers,
    sent_as_one,
    without_contention,
    without_lateness,
    without_order,
)
from crossfade.profile.doctor.losses import Reason
from crossfade.profile.doctor.program import NOBODY
from crossfade.profile.doctor.view import Cause, Finding, View, share
from crossfade.profile.traces.events import ActivityKind, Call

_LATE_US = 8.0
_SMALL_BYTES = 1 << 20
_SHORT_US = 100.0
_FEWEST = 4  # small messages that are worth sending as one
_ELEMENT_BYTES = {
    "double": 8,
    "long": 8,
    "int64": 8,
    "float": 4,
    "int": 4,
    "half": 2,
    "bfloat16": 2,
    "char": 1,
    "byte": 1,
}


def message_bytes(view: View, work: int) -> int:
    """How much a collective moves for each rank; 0 where the trace does not say."""
    message = view.traced.activities[work].message
    return max(message.num_in, message.num_out) * _ELEMENT_BYTES.get(message.dtype.lower(), 2)


def blocking(view: View) -> Iterator[Finding]:
    """Collectives on the stream that computes, or waited for as soon as they are launched.

    Of batches that are launched one after the other nothing is said: another batch's computation could be beside them.
    """
    if batches_in_sequence(view):
        return
    small = {number for run in _runs_of_small(view) for number in run}
    found = [number for number in view.collectives() if number not in small and _is_blocking(view, number)]
    lost = view.exposed_us(found)
    if not found or not view.is_worth_a_look(lost):
        return
    is_known = all(number in view.needed_by or number in view.made_by for number in found)
    latest = {number: view.needed_by.get(number, _first_of_next_step(view, number)) for number in found}
    gradients = [number for number in found if is_of_backward(view, number)]
    after_next = _after_next_collective(view, gradients)
    when = "The trace does not say when their results are needed: if at once, nothing is won; if at the end of the step, the most"
    if is_known:
        readers = [view.traced.activities[view.needed_by[n]].short_name for n in found if n in view.needed_by]
        when = f"Their results are first needed by {Counter(readers).most_common(1)[0][0] if readers else 'nothing in the trace'}"
    elif len(gradients) == len(found):
        when = "They are launched by the backward pass, and gradients are needed at its end only"
    num = view.a_step(len(found))
    yield Finding(
        Cause.BLOCKING,
        "collectives block the stream that computes",
        f"{num:.3g} collectives a step ({view.name_of(found[0])}, ...) run with nothing beside them for"
        f" {share(view.share_of(lost))} of the"
        f" time: they are on the computing stream, or are waited for as soon as they are launched. {when}",
        view.work_sites(found),
        "launch with async_op=True, and wait just before the result is used; where it is needed at once,"
        " interleave two halves of the"
        " batch, or fuse the collective with the product before it (crossfade.ops)",
        "work = dist.all_reduce(x, async_op=True)\n...                 # computation that does not need x\nwork.wait()",
        view.work_marks(found, "blocks"),
        partial(beside_their_callers, works=found, until=latest.__getitem__),
        is_at_most=not is_known,
        likely=None if is_known else partial(beside_their_callers, works=gradients, until=after_next.__getitem__),
    )


def is_of_backward(view: View, number: int) -> bool:
    """Whether the backward pass launches a collective, so that it sums gradients."""
    work = view.program.works[number]
    if work.call == NOBODY:
        return False
    return _is_in_backward(view, work.rank, view.traced.calls[work.call])


def _is_in_backward(view: View, rank: int, call: Call) -> bool:
    around = view.traced.traces[rank].operators.around(call.thread, call.start_us)
    return any("autograd::engine" in scope.name for scope in around)


def _is_blocking(view: View, number: int) -> bool:
    work, activity = view.program.works[number], view.traced.activities[number]
    waits = view.traced.waits[work.rank]
    own = waits.is_on_own_stream.get(activity)
    if own is None or work.call == NOBODY:
        return False
    if not own:
        return True
    waited = waits.waited_at.get(activity)
    if waited is None or waited.thread != view.traced.calls[work.call].thread:
        return False  # another thread waits where the backward pass ends
    if is_of_backward(view, number) and not _is_in_backward(view, work.rank, waited):
        return False  # so does the autograd engine's own, for DDP
    later = work.call + 1
    while later < len(view.program.calls) and view.traced.calls[later] is not waited:
        if view.program.calls[later].rank != work.rank:
            return False
        if any(view.program.works[n].kind is ActivityKind.COMPUTE for n in view.launched[later]):
            return False
        later += 1
    return True


def _first_of_next_step(view: View, number: int) -> int:
    work = view.program.works[number]
    for later in range(number + 1, len(view.program.works)):
        other = view.program.works[later]
        if other.rank != work.rank:
            break
        if other.step > work.step and other.kind is ActivityKind.COMPUTE:
            return later
    return NOBODY


def _after_next_collective(view: View, numbers: Sequence[int]) -> dict[int, int]:
    """For each, the first computation of its rank after the collective after it."""
    until: dict[int, int] = {}
    for rank in range(view.program.num_ranks):
        collectives = view.program.works_of(rank, ActivityKind.COMMUNICATION)
        computes = view.program.works_of(rank, ActivityKind.COMPUTE)
        starts = [view.traced.starts_us[n] for n in computes]
        following = dict(itertools.pairwise(collectives))
        for number in numbers:
            if view.program.works[number].rank == rank:
                end = view.traced.ends_us[following.get(number, number)]
                place = bisect_left(starts, end)
                until[number] = computes[place] if place < len(computes) else NOBODY
    return until


def communicator_order(view: View) -> Iterator[Finding]:
    """Collectives that wait for another one of their communicator, of another size or kind.

    On the stream of their caller they wait for all that is before them there, whatever its communicator: `blocking` says that.
    """
    found = []
    for number in view.collectives():
        before = view.program.before_on_lane[number]
        if view.traced.held_by[number] != "lane" or before == NOBODY or not is_on_own_stream(view, number):
            continue
        is_other = view.name_of(number) != view.name_of(before)
        if view.program.works[before].kind is ActivityKind.COMMUNICATION and is_other:
            others_done = max(
                (view.traced.ends_us[wait.work] for wait in view.program.works[number].after), default=0.0
            )
            if view.traced.starts_us[number] - others_done > 20.0:
                found.append(number)
    lost = view.lost_us(Reason.TRANSFER)
    if not found or not view.is_worth_a_look(lost):
        return
    before = view.program.before_on_lane[found[0]]
    yield Finding(
        Cause.COMMUNICATOR,
        f"{view.name_of(found[0])} waits behind {view.name_of(before)}: one communicator does one thing after the other",
        f"{view.a_step(len(found)):.3g} collectives a step are ready, and"
        " start only when another"
        f" one of their communicator has ended; computation waits for communication for {share(view.share_of(lost))} of the time",
        view.work_sites(found),
        "give the one that is needed sooner a group of its own, or launch it first",
        "urgent = dist.new_group()\ndist.all_reduce(x, group=urgent, async_op=True)",
        view.work_marks([*found, *(view.program.before_on_lane[n] for n in found)], "one after the other"),
        partial(without_order, works=found),
    )


def is_on_own_stream(view: View, number: int) -> bool:
    """Whether a collective runs on its communicator's stream; where the trace does not say, it does."""
    waits = view.traced.waits[view.program.works[number].rank]
    return waits.is_on_own_stream.get(view.traced.activities[number], True)


def sms_full(view: View) -> Iterator[Finding]:
    """Collectives that could start, and find no multiprocessor free."""
    queued = set(held_by_a_queue(view))
    found = []
    for number in view.collectives():
        if number not in queued and view.traced.late_us[number] > _LATE_US and _is_full(view, number):
            found.append(number)
    late = sum(view.traced.late_us[number] for number in found) / view.program.num_ranks
    if not view.is_worth_a_look(late):
        return

    yield Finding(
        Cause.SMS_FULL,
        "collectives wait for free multiprocessors behind kernels that fill the GPU",
        f"{view.a_step(len(found)):.3g} collectives a step start late, by"
        f" {share(view.share_of(late))}"
        " of the time in all, while a kernel with at least as many blocks as the GPU has multiprocessors runs",
        view.work_sites(found),
        "give communication a stream of high priority, launch it before the large kernel, or use copy engines, which need no"
        " multiprocessor (crossfade.peers)",
        "options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)\ngroup = dist.new_group(pg_options=options)",
        view.work_marks(found, "starts late"),
        partial(without_lateness, works=found),
        is_at_most=True,
    )


def _is_full(view: View, number: int) -> bool:
    """Whether a kernel that fills the GPU runs while a collective could have started."""
    if view.traced.held_by[number] == "":
        return False
    begin = view.traced.starts_us[number] - view.traced.late_us[number]
    for other in range(number - 1, max(number - 200, -1), -1):
        work = view.program.works[other]
        if work.rank != view.program.works[number].rank:
            break
        if work.demand >= 1.0 and view.traced.starts_us[other] <= begin + _LATE_US < view.traced.ends_us[other]:
            return True
    return False


def small_messages(view: View) -> Iterator[Finding]:
    """Many collectives so small that each takes only the time that any one takes at least."""
    groups = _runs_of_small(view)
    if not groups:
        return
    amounts = [view.program.works[number].amount_us for numbers in groups for number in numbers]
    total = sum(amounts) / view.program.num_ranks
    if not view.is_worth_a_look(total):
        return
    first = groups[0][0]
    num = view.a_step(sum(map(len, groups)))
    yield Finding(
        Cause.SMALL_MESSAGES,
        "many small collectives, each of which takes the time that the smallest one takes",
        f"{num:.3g} collectives of less than 1 MB a step ({view.name_of(first)}, ...),"
        f" {sum(amounts) / len(amounts):.0f} us each, take"
        f" {share(view.share_of(total))} of the time in all",
        view.work_sites(number for numbers in groups for number in numbers),
        "send them as one: flatten into one tensor, or coalesce",
        "with dist._coalescing_manager(group, async_ops=True):\n    for x in tensors:\n        dist.all_reduce(x, group=group)",
        view.work_marks([number for numbers in groups for number in numbers], "small"),
        partial(sent_as_one, groups=groups, saved_us=min(amounts) * 0.9),
    )


def _runs_of_small(view: View) -> list[list[int]]:
    """Small collectives that are launched one after the other, with no computation in between."""
    runs: list[list[int]] = []
    for rank in range(view.program.num_ranks):
        run: list[int] = []
        own = [
            n for n, work in enumerate(view.program.works) if work.rank == rank and work.kind is not ActivityKind.COPY
        ]
        for number in own:
            work = view.program.works[number]
            is_small = work.kind is ActivityKind.COMMUNICATION and work.amount_us < _SHORT_US
            if is_small and 0 < message_bytes(view, number) < _SMALL_BYTES:
                run.append(number)
                continue
            runs.append(run)
            run = []
        runs.append(run)
    return [run for run in runs if len(run) >= _FEWEST]


def contention(view: View) -> Iterator[Finding]:
    """Communication is beside computation, and both are slower for it."""
    slower = 0.0
    for number, work in enumerate(view.program.works):
        if work.kind is ActivityKind.COMPUTE and work.demand:
            seen = view.traced.ends_us[number] - view.traced.starts_us[number]
            slower += max(seen - work.amount_us, 0.0) * work.demand
    slower /= view.program.num_ranks
    if not view.traced.rates.is_measured or not view.is_worth_a_look(slower):
        return
    beside = list(view.collectives())
    yield Finding(
        Cause.CONTENTION,
        "communication is hidden, but it slows down the computation beside it",
        f"kernels beside collectives run at {view.traced.rates.other_compute:.0%} of their speed alone, which costs"
        f" {share(view.share_of(slower))} of the time",
        "all collectives beside computation",
        "give NCCL fewer multiprocessors where its time allows it, or move the bytes by copy engines, which need"
        " none (crossfade.peers,"
        " crossfade.ops)",
        "NCCL_MAX_CTAS=8",
        view.work_marks(beside, "slows computation down"),
        without_contention,
        is_at_most=True,
        likely=without_contention,  # copy engines beside products were measured not to slow them down
    )
