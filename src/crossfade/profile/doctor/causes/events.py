"""Collectives that wait for more than what makes their input."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from crossfade.profile.doctor.causes.streams import is_on_own_stream, message_bytes
from crossfade.profile.doctor.causes.training import backward_spans
from crossfade.profile.doctor.changes import behind, beside_their_callers
from crossfade.profile.doctor.program import NOBODY, Program
from crossfade.profile.doctor.view import Cause, Finding, View, share
from crossfade.profile.traces.events import ActivityKind

_LEAST_BYTES = 1 << 20  # of a step's gradients
_SCALARS = 256  # a sum of fewer elements is a norm or a loss, not a gradient


def late_events(view: View) -> Iterator[Finding]:
    """Collectives whose event lies behind other work than what makes their input. Known of records with tensors only."""
    found = {number: producer for number, producer in view.made_by.items() if _is_late(view, number, producer)}
    lost = view.exposed_us(found)
    if not found or not view.is_worth_a_look(lost):
        return
    first = next(iter(found))
    yield Finding(
        Cause.LATE_EVENT,
        f"{view.name_of(first)} waits for computation that does not make its input: its event is recorded too late",
        f"{view.a_step(len(found)):.3g} collectives a step wait for later work than what makes their input"
        f" ({view.traced.activities[found[first]].short_name}, ...); computation waits for them for"
        f" {share(view.share_of(lost))} of the time",
        view.work_sites(found),
        "launch each collective right behind what makes its input, or record an event there and let its stream wait for that",
        "ready = torch.cuda.Event()\nready.record()                       # right behind what makes x\n"
        "...\nside.wait_event(ready)               # instead of side.wait_stream(...)\n"
        "with torch.cuda.stream(side):\n    dist.all_reduce(x, async_op=True)",
        view.work_marks(found, "waits for too much"),
        partial(behind, sources=found),
    )


def _is_late(view: View, number: int, producer: int) -> bool:
    """Whether a collective waits, by an event, for later work of its producer's stream than the producer."""
    works = view.program.works
    waits = [wait.work for wait in works[number].after if not wait.is_order]
    return any(other > producer and works[other].lane == works[producer].lane for other in waits)


def late_sums(view: View) -> Iterator[Finding]:
    """Gradients that are summed between the end of the backward pass and the optimizer's step.

    Which kernel makes which gradient a plain trace does not say: they are taken to come evenly during the backward pass.
    """
    found: dict[int, int] = {}
    needed: dict[int, int] = {}
    for rank in range(view.program.num_ranks):
        spans = backward_spans(view, rank)
        collectives = view.program.works_of(rank, ActivityKind.COMMUNICATION)
        sums = _Launched(view, [number for number in collectives if _is_sum(view, number)])
        steps = [scope.start_us for scope in view.traced.traces[rank].operators.named("Optimizer.step")]
        if not spans or not sums.numbers or not steps:
            continue
        computed = _Launched(view, view.program.works_of(rank, ActivityKind.COMPUTE))
        kernels = _Launched(view, computed.inside(spans))
        for before, step in zip([float("-inf"), *steps], steps, strict=False):
            end = spans[bisect_left(spans, (step,)) - 1][1]
            late = sums.between(end, step)
            if end > before and sum(message_bytes(view, number) for number in late) >= _LEAST_BYTES:
                sources = _evenly(view, late, kernels.between(before, step))
                found.update(sources)
                needed.update(dict.fromkeys(sources, next(iter(computed.between(step, float("inf"))), NOBODY)))
    lost = view.exposed_us(found)
    if not found or not view.is_worth_a_look(lost):
        return
    on_caller = [number for number in found if not is_on_own_stream(view, number)]

    def change(program: Program) -> Program:
        moved = beside_their_callers(program, on_caller, needed.__getitem__) if on_caller else program
        return behind(moved, found)

    megabytes = view.a_step(sum(message_bytes(view, number) for number in found))
    yield Finding(
        Cause.LATE_EVENT,
        "gradients are summed only when the backward pass is over",
        f"{view.a_step(len(found)):.3g} sums with {megabytes / 1e6:.0f} MB a step lie between"
        f" the backward pass and the optimizer; computation waits for them for {share(view.share_of(lost))} of the time, and most"
        " gradients are there long before",
        view.work_sites(found),
        "sum each gradient as soon as it is there: with DistributedDataParallel, or by hooks",
        "for parameter in model.parameters():\n    parameter.register_post_accumulate_grad_hook(\n"
        "        lambda one: works.append(dist.all_reduce(one.grad, async_op=True)))",
        view.work_marks(found, "its gradient was there before"),
        change,
        is_at_most=True,
        likely=change,
    )


def _is_sum(view: View, number: int) -> bool:
    message = view.traced.activities[number].message
    return "reduce" in message.collective and message.num_in >= _SCALARS


class _Launched:
    """Works of one rank in the order of their launches, to find those of a part of its trace."""

    def __init__(self, view: View, numbers: Iterable[int]) -> None:
        calls = [(n, view.program.works[n].call) for n in numbers]
        pairs = sorted((view.traced.calls[call].start_us, n) for n, call in calls if call != NOBODY)
        self._times = [time for time, _ in pairs]
        self.numbers = [n for _, n in pairs]

    def between(self, begin_us: float, end_us: float) -> list[int]:
        """Those launched in a part of the trace."""
        return self.numbers[bisect_left(self._times, begin_us) : bisect_left(self._times, end_us)]

    def inside(self, spans: Sequence[tuple[float, float]]) -> list[int]:
        """Those launched in one of several parts."""
        return [number for begin, end in spans for number in self.between(begin, end)]


def _evenly(view: View, sums: Sequence[int], kernels: Sequence[int]) -> dict[int, int]:
    """For each sum the kernel at which so much of the backward pass is done as of the gradients is sent with it."""
    if not kernels:
        return {}
    total_bytes = sum(message_bytes(view, number) for number in sums)
    total_us = sum(view.program.works[kernel].amount_us for kernel in kernels)
    found: dict[int, int] = {}
    num_bytes, done_us, place = 0, view.program.works[kernels[0]].amount_us, 0
    for number in sums:
        num_bytes += message_bytes(view, number)
        while place + 1 < len(kernels) and done_us < total_us * num_bytes / total_bytes:
            place += 1
            done_us += view.program.works[kernels[place]].amount_us
        found[number] = kernels[place]
    return found
