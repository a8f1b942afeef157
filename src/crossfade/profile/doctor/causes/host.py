"""The host waits, allocates, or is not there in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from crossfade.profile.doctor.changes import with_free_launches, with_scaled_work, without_calls, without_waits
from crossfade.profile.doctor.losses import Loss, Reason
from crossfade.profile.doctor.program import Program
from crossfade.profile.doctor.view import Cause, Finding, Site, View, share
from crossfade.profile.traces.events import ActivityKind
from crossfade.profile.traces.roles import Role

_MOST_SITES = 4
_PINNED_GBS = {
    9: 50.0,
    8: 24.0,
}  # by compute capability, where the trace has no copy of pinned memory to take the rate from
_OTHER_PINNED_GBS = 12.0
_WAITS = {Role.SYNC_STREAM, Role.SYNC_EVENT, Role.SYNC_DEVICE}
_COPY_TO_HOST = (
    "a copy to the host waits for its value",
    "copy to pinned memory with non_blocking=True, and wait for an event later",
)
_KNOWN_WAITS = {
    "aten::item": (
        ".item() reads a value of the GPU's",
        "keep the value on the GPU; read it every hundredth step, or from a copy to pinned memory",
    ),
    "aten::nonzero": (
        "nonzero has to know how many there are",
        "use masks, torch.where with three arguments, or nonzero_static(size=...)",
    ),
    "aten::is_nonzero": ("a tensor's truth is asked for", "decide on the GPU, with torch.where, instead of by `if`"),
    "aten::to": _COPY_TO_HOST,
    "aten::_to_copy": _COPY_TO_HOST,
    "aten::copy_": _COPY_TO_HOST,
}


def host_waits(view: View) -> Iterator[Finding]:
    """Calls in which the host waits for the GPU, by where they are made; and all of them together."""
    waiting = [n for n, call in enumerate(view.program.calls) if call.waits and view.traced.calls[n].role in _WAITS]
    sites = view.by_site(waiting)
    lost: dict[Site, float] = {}
    by_call = {n: site for site, calls in sites.items() for n in calls}
    for loss in view.losses:
        if loss.reason is Reason.HOST_WAIT and loss.call in by_call:
            lost[by_call[loss.call]] = lost.get(by_call[loss.call], 0.0) + loss.length_us
    worst = sorted(sites, key=lambda site: (-lost.get(site, 0.0), -len(sites[site])))[:_MOST_SITES]
    if len(worst) > 1:
        yield _wait_finding(
            view, waiting, f"the host waits for the GPU in {len(worst)} places", None, sum(lost.values())
        )
    for site in worst:
        what = _KNOWN_WAITS.get(site.operator)
        name = site.operator or view.traced.calls[sites[site][0]].name
        title = f"the host waits for the GPU in {name}" + (f": {what[0]}" if what else "")
        yield _wait_finding(view, sites[site], title, what[1] if what else None, lost.get(site, 0.0))


def _wait_finding(view: View, calls: Sequence[int], title: str, fix: str | None, lost_us: float) -> Finding:
    idle = share(view.share_of(lost_us / view.program.num_ranks))
    return Finding(
        Cause.HOST_WAIT,
        title,
        f"{view.a_step(len(calls)):.3g} waits a step;"
        f" the GPU is idle for {idle} of the time until work that was launched only after them begins",
        view.sites(calls),
        fix or "let the host run ahead: leave the wait out, or do it once, after all is launched",
        "flag = (value > limit)            # stays on the GPU\nx = torch.where(flag, a, b)       # instead of:"
        " if value.item() > limit"
        if "item" in title
        else "",
        view.call_marks(calls, "the host waits"),
        partial(without_waits, calls=tuple(calls)),
    )


def pageable_copies(view: View) -> Iterator[Finding]:
    """Copies between the GPU and memory of the host that is not pinned."""
    calls = [
        n
        for n, call in enumerate(view.program.calls)
        if any(wait.is_of_start and "Pageable" in view.traced.activities[wait.work].name for wait in call.waits)
    ]
    lost = view.lost_us(Reason.PAGEABLE, Reason.COPY)
    if not calls or not view.is_worth_a_look(lost):
        return
    works = [n for call in calls for n in view.launched[call] if view.program.works[n].kind is ActivityKind.COPY]
    rate = _pinned_rate(view)
    faster = {
        n: min(view.program.works[n].amount_us, view.traced.activities[n].num_bytes / (rate * 1e3) + 2.0) for n in works
    }
    num_bytes = view.a_step(sum(view.traced.activities[n].num_bytes for n in works))

    def change(program: Program) -> Program:
        return with_scaled_work(without_waits(program, calls), faster)

    yield Finding(
        Cause.PAGEABLE,
        "copies of pageable memory block the host, and the GPU idles meanwhile",
        f"{view.a_step(len(calls)):.3g} copies with {num_bytes / 1e6:.3g} MB a step; the GPU"
        f" computes nothing for {share(view.share_of(lost))} of the time because of them",
        view.sites(calls),
        "copy from and to pinned memory, with non_blocking=True; a DataLoader does it with pin_memory=True",
        "batch = batch.pin_memory().to(device, non_blocking=True)",
        view.call_marks(calls, "blocked in a copy"),
        change,
    )


def _pinned_rate(view: View) -> float:
    """The fastest copy of pinned memory in the trace, in GB/s."""
    rates = [
        activity.num_bytes / activity.duration_us / 1e3
        for activity in view.traced.activities
        if "Pinned" in activity.name and activity.num_bytes > 1 << 20 and activity.duration_us > 0
    ]
    major = min(view.traced.traces[0].compute_major, 9)
    return max(rates, default=_PINNED_GBS.get(major, _OTHER_PINNED_GBS))


def allocator(view: View) -> Iterator[Finding]:
    """Calls that allocate or free GPU memory, in steps in which a caching allocator has all it needs."""
    calls = [
        n
        for n, call in enumerate(view.program.calls)
        if view.traced.calls[n].role in (Role.ALLOCATE, Role.FREE) and (call.step > 0 or view.program.num_steps == 1)
    ]
    lost = view.lost_us(Reason.ALLOCATOR)
    if not calls or not view.is_worth_a_look(lost):
        return
    num_free = sum(view.traced.calls[n].role is Role.FREE for n in calls)
    yield Finding(
        Cause.ALLOCATOR,
        "GPU memory is allocated and freed in every step",
        f"{len(calls) - num_free} allocations and {num_free} frees after the first step; cudaFree waits for the"
        " whole GPU, which is idle"
        f" for {share(view.share_of(lost))} of the time because of them",
        view.sites(calls),
        "let torch's allocator keep its memory: no torch.cuda.empty_cache() in the loop, and a batch that leaves"
        " room; with shapes that"
        " change, expandable segments",
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        view.call_marks(calls, "allocates or frees"),
        partial(without_calls, calls=tuple(calls)),
    )


def launches(view: View) -> Iterator[Finding]:
    """The host cannot launch as fast as the GPU computes."""
    lost = view.lost_us(Reason.LAUNCH)
    if not view.is_worth_a_look(lost):
        return
    num = view.a_step(sum(bool(works) for works in view.launched))
    compute = [n for n, work in enumerate(view.program.works) if work.kind is ActivityKind.COMPUTE]
    mean_us = sum(view.traced.ends_us[n] - view.traced.starts_us[n] for n in compute) / max(len(compute), 1)
    losses: list[Loss] = [loss for loss in view.losses if loss.reason is Reason.LAUNCH]
    yield Finding(
        Cause.LAUNCH,
        "the host launches more slowly than the GPU computes",
        f"the GPU is idle for {share(view.share_of(lost))} of the time because its next work was not launched"
        f" yet; {num:,.0f} launches a"
        f" step, of kernels of {mean_us:.3g} us on average",
        "the whole step",
        "capture the step in a CUDA graph, or compile it; larger batches, fused kernels and optimizers launch less",
        'step = torch.compile(step, mode="reduce-overhead")',
        view.loss_marks(losses, "nothing launched yet"),
        with_free_launches,
        is_at_most=True,
    )
