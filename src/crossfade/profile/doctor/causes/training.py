"""What training steps do: gradients in buckets, parameters that are looked for, gradients that are summed several times."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise

from crossfade.intervals import merged
from crossfade.profile.doctor.causes.streams import is_of_backward, message_bytes
from crossfade.profile.doctor.changes import in_pieces, with_scaled_work, without_collectives, without_waits
from crossfade.profile.doctor.program import NOBODY, Program
from crossfade.profile.doctor.view import Cause, Finding, View, share
from crossfade.profile.traces.events import ActivityKind
from crossfade.profile.traces.roles import Role

_LARGE_BUCKET_BYTES = 40 << 20  # torch's own are 25 MB
_NUM_PIECES = 8
_COPIES = ("torch::distributed::reducer::", "torch.distributed.ddp.reducer::")  # where DDP copies gradients
_COPY_BACK = "copy_bucket_to_grad"
_INTEGERS = {"int", "int32", "long", "int64"}


def buckets(view: View) -> Iterator[Finding]:
    """Gradients of DDP that travel in few large buckets, the last one when the backward pass is over."""
    found = [number for number in view.collectives() if _is_large_bucket(view, number)]
    lost = view.exposed_us(found)
    if not found or not view.is_worth_a_look(lost):
        return
    sources = {number: _sources(view, number) for number in found}
    found = [number for number in found if len(sources[number]) == _NUM_PIECES - 1]
    whole = Counter(view.program.works[number].meeting for number in found)
    sizes = Counter(work.meeting for work in view.program.works)
    found = [n for n in found if (m := view.program.works[n].meeting) == NOBODY or whole[m] == sizes[m]]
    if not found:
        return
    megabytes = max(message_bytes(view, number) for number in found) / 1e6
    yield Finding(
        Cause.BUCKETS,
        f"gradients travel in buckets of up to {megabytes:.0f} MB, which start when most of the backward pass is over",
        f"{view.a_step(len(found)):.3g} large buckets a step; computation waits for them for"
        f" {share(view.share_of(lost))} of the time",
        view.work_sites(found),
        "use smaller buckets (torch's default is 25 MB), so that gradients travel while the rest of the backward pass computes",
        "DistributedDataParallel(model, bucket_cap_mb=25, gradient_as_bucket_view=True)",
        view.work_marks(found, "a large bucket"),
        partial(in_pieces, works=found, num_pieces=_NUM_PIECES, sources=sources),
    )


def _is_large_bucket(view: View, number: int) -> bool:
    work, message = view.program.works[number], view.traced.activities[number].message
    if "allreduce" not in message.collective.replace("_", "") or work.call == NOBODY:
        return False
    return is_of_backward(view, number) and message_bytes(view, number) >= _LARGE_BUCKET_BYTES


def _sources(view: View, number: int) -> Sequence[int]:
    """Kernels that end when a part of the backward pass before a bucket is over."""
    work = view.program.works[number]
    last = next(
        (wait.work for wait in work.after if view.program.works[wait.work].kind is ActivityKind.COMPUTE), NOBODY
    )
    if last == NOBODY:
        return ()
    thread = view.traced.calls[work.call].thread
    kernels: list[int] = []
    for earlier in range(last, -1, -1):
        other = view.program.works[earlier]
        if other.rank != work.rank or other.step != work.step:
            break
        if other.kind is not ActivityKind.COMPUTE or other.call == NOBODY:
            continue
        if view.traced.calls[other.call].thread == thread:
            kernels.append(earlier)
    kernels.reverse()
    total, reached = sum(view.program.works[n].amount_us for n in kernels), 0.0
    found: list[int] = []
    for kernel in kernels[:-1]:
        reached += view.program.works[kernel].amount_us
        if len(found) < _NUM_PIECES - 1 and reached >= total * (len(found) + 1) / _NUM_PIECES:
            found.append(kernel)
    return found


def unused_parameters(view: View) -> Iterator[Finding]:
    """The small all-reduce of integers by which DDP finds out which parameters were used."""
    found = []
    for number in view.collectives():
        message = view.traced.activities[number].message
        is_sum = "allreduce" in message.collective.replace("_", "")
        if is_sum and message.dtype.lower() in _INTEGERS and 0 < message.num_in < 1 << 17:
            found.append(number)
    if not found or not _has_ddp(view):
        return
    waits = [call for number in found for call in _read_of_used(view, number)]
    amount = sum(view.program.works[number].amount_us for number in found) / view.program.num_ranks
    yield Finding(
        Cause.UNUSED_PARAMETERS,
        "DDP looks for unused parameters in every step",
        f"{view.a_step(len(found)):.3g} all-reduces of integers a step behind the gradients,"
        f" {share(view.share_of(amount))} of the time; the host waits {len(waits) / 2 / view.program.num_steps:.3g} times for the"
        " result, and launches the next step only then",
        "DistributedDataParallel",
        "leave find_unused_parameters=True out where all parameters are used in every step",
        "DistributedDataParallel(model, find_unused_parameters=False)",
        view.work_marks(found, "which parameters were used?"),
        partial(_without_looking, works=found, calls=waits),
    )


def _without_looking(program: Program, works: Sequence[int], calls: Sequence[int]) -> Program:
    return without_waits(with_scaled_work(program, dict.fromkeys(works, 0.1)), calls)


def _read_of_used(view: View, number: int) -> list[int]:
    """The calls in which the host reads what the all-reduce gave: a copy to pageable memory, and the wait for it."""
    work = view.program.works[number]
    for call in range(work.call + 1, len(view.program.calls)):
        there = view.program.calls[call]
        if there.rank != work.rank or there.step > work.step + 1:
            break
        copies = [n for n in view.launched[call] if "DtoH" in view.traced.activities[n].name]
        if copies and there.waits:
            is_followed = call + 1 < len(view.program.calls) and view.traced.calls[call + 1].role is Role.SYNC_STREAM
            return [call, call + 1] if is_followed else [call]
    return []


def two_backwards(view: View) -> Iterator[Finding]:
    """DDP that sums the same gradients in each of several backward passes between two steps of the optimizer."""
    if not _has_ddp(view):
        return
    found: list[int] = []
    copies: list[int] = []
    most = 0
    for rank in range(view.program.num_ranks):
        of_steps = _passes(view, rank)
        of_rank: list[int] = []
        for passes in of_steps:
            last = Counter(_message(view, number) for number in passes[-1])
            earlier = [one for one in passes[:-1] if Counter(_message(view, number) for number in one) == last]
            of_rank += [number for one in earlier for number in one]
            most = max(most, 1 + len(earlier))
        found += of_rank
        copies += _bucket_copies(view, rank, [one for passes in of_steps for one in passes], of_rank)
    if not found:
        return
    megabytes = view.a_step(sum(message_bytes(view, number) for number in found))

    def change(program: Program) -> Program:
        return without_collectives(with_scaled_work(program, dict.fromkeys(copies, 0.1)), found)

    yield Finding(
        Cause.TWO_BACKWARDS,
        f"DDP sums all gradients in each of {most} backward passes of a step",
        f"{megabytes / 1e6:.0f} MB a step are sums that a later pass makes anew; computation waits for them for"
        f" {share(view.share_of(view.exposed_us(found)))} of the time",
        "the backward passes between two steps of the optimizer",
        "sum in the last pass only: run the others, forward and backward, under no_sync(); or add the losses and call backward()"
        " once",
        "with model.no_sync():\n    model(first).sum().backward()\nmodel(last).sum().backward()     # this one sums",
        view.work_marks(found, "summed again later"),
        change,
    )


def _bucket_copies(view: View, rank: int, passes: Sequence[Sequence[int]], sums: Sequence[int]) -> list[int]:
    """What copies gradients into buckets and back, for the passes that have these sums.

    A copy into a bucket is launched no later than the last sum of its pass, a copy back behind all of them.
    """
    if not sums:
        return []
    unwanted = set(sums)
    calls = {number: view.traced.calls[view.program.works[number].call].start_us for one in passes for number in one}
    ordered = sorted(passes, key=lambda one: calls[one[0]])
    is_unwanted = [not unwanted.isdisjoint(one) for one in ordered]
    starts, ends = [calls[one[0]] for one in ordered], [calls[one[-1]] for one in ordered]
    scopes = [scope for name in _COPIES for scope in view.traced.traces[rank].operators.named(name)]
    into, back = (
        merged((scope.start_us, scope.end_us) for scope in scopes if (_COPY_BACK in scope.name) is is_back)
        for is_back in (False, True)
    )
    found = []
    for number, works in enumerate(view.launched):
        if view.program.calls[number].rank == rank and works:
            time = view.traced.calls[number].start_us
            place = len(ordered)
            if _is_inside(into, time):
                place = bisect_left(ends, time)
            elif _is_inside(back, time):
                place = bisect_right(starts, time) - 1
            if 0 <= place < len(ordered) and is_unwanted[place]:
                found += works
    return found


def _is_inside(spans: Sequence[tuple[float, float]], time: float) -> bool:
    place = bisect_right(spans, (time, float("inf"))) - 1
    return place >= 0 and time <= spans[place][1]


def _has_ddp(view: View) -> bool:
    return any(trace.operators.named("DistributedDataParallel") for trace in view.traced.traces)


def _message(view: View, number: int) -> tuple[str, int]:
    message = view.traced.activities[number].message
    return message.collective, message.num_in


def backward_spans(view: View, rank: int) -> list[tuple[float, float]]:
    """When the autograd engine runs a rank's backward pass, in its trace's own time."""
    scopes = view.traced.traces[rank].operators.named("autograd::engine")
    return merged((scope.start_us, scope.end_us) for scope in scopes)


def _passes(view: View, rank: int) -> list[list[list[int]]]:
    """For each step of the optimizer, its backward passes, each as its gradients' collectives.

    What computes between two collectives and is not launched by the backward pass parts two passes.
    """
    spans = backward_spans(view, rank)
    outside: list[float] = []
    for number, works in enumerate(view.launched):
        if view.program.calls[number].rank == rank and any(
            view.program.works[work].kind is ActivityKind.COMPUTE for work in works
        ):
            time = view.traced.calls[number].start_us
            if not _is_inside(spans, time):
                outside.append(time)
    collectives = view.program.works_of(rank, ActivityKind.COMMUNICATION)
    sums = [number for number in collectives if is_of_backward(view, number)]
    times = {number: view.traced.calls[view.program.works[number].call].start_us for number in sums}
    sums.sort(key=times.__getitem__)
    ends = [scope.start_us for scope in view.traced.traces[rank].operators.named("Optimizer.step")]
    steps: dict[int, list[list[int]]] = defaultdict(list)
    for before, number in pairwise([NOBODY, *sums]):
        time = times[number]
        step = bisect_right(ends, time) if ends else view.program.works[number].step
        is_next = before == NOBODY or bisect_right(outside, time) > bisect_right(outside, times[before])
        if is_next or not steps[step]:
            steps[step].append([])
        steps[step][-1].append(number)
    return list(steps.values())
