"""Streams that wait for the default stream, and it for them, although no event says so.

CUDA's default stream (0 in programs, 7 in traces) runs nothing beside streams that were made without ``cudaStreamNonBlocking``:
work of either waits for all that was launched on the other before. torch's own streams are not of this kind, those of other
libraries often are. A trace does not say of which kind a stream is; such a pair is told by what it does:

- the two never run at once, and
- several times work of one starts just when work of the other ends, later than all known reasons explain, where no lack of free
  multiprocessors could be the reason (one of both is a copy, or neither fills the GPU), nor an event that is not understood (the
  host makes no stream wait between the launches of both).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from crossfade.intervals import common_us, merged
from crossfade.profile.traces.events import Activity, ActivityKind
from crossfade.profile.traces.launches import HostOrder
from crossfade.profile.traces.roles import Role

DEFAULT_STREAM = 7  # as CUPTI numbers it
_FEWEST = 3  # such starts
_TOUCH_US = 2.0  # so long may two seem to run at once
_NEAR_US = 12.0
_LATE_US = 8.0
_LAUNCH_US = 7.0  # from a call to its kernel on an idle stream


def implicit_waits(
    order: HostOrder, events: Mapping[Activity, Sequence[Activity]], num_sms: int
) -> Iterator[tuple[Activity, Activity]]:
    """Pairs of an activity, and the one of the other stream that it waits for."""
    event_waits = [call.start_us for call in order.calls if call.role is Role.WAIT_EVENT]
    for (device, stream), activities in order.lanes.items():
        default = order.lanes.get((device, DEFAULT_STREAM), [])
        is_of_nccl = all(activity.kind is ActivityKind.COMMUNICATION for activity in activities)
        if stream == DEFAULT_STREAM or not default or is_of_nccl or _overlap(activities, default):
            continue
        pairs = list(_pairs(activities, default))
        num_sure = sum(
            _is_late(*pair, events) and not _may_lack_sms(*pair[:2], num_sms) and not _has_wait(*pair[:2], event_waits)
            for pair in pairs
        )
        if num_sure >= _FEWEST:
            yield from ((target, source) for target, source, _ in pairs)


def _overlap(one: Sequence[Activity], other: Sequence[Activity]) -> bool:
    spans = [merged((activity.start_us, activity.end_us) for activity in activities) for activities in (one, other)]
    return common_us(*spans) > _TOUCH_US


def _pairs(one: Sequence[Activity], other: Sequence[Activity]) -> Iterator[tuple[Activity, Activity, Activity | None]]:
    """For each activity: the last one of the other stream that was launched before it, and the one before it on its own."""
    last: dict[int, Activity] = {}
    launched = [activity for activity in (*one, *other) if activity.call is not None]
    for activity in sorted(launched, key=lambda activity: (activity.call.start_us, activity.start_us)):  # type: ignore[union-attr]
        source = next((found for stream, found in last.items() if stream != activity.stream), None)
        if source is not None:
            yield activity, source, last.get(activity.stream)
        last[activity.stream] = activity


def _is_late(
    target: Activity,
    source: Activity,
    before: Activity | None,
    events: Mapping[Activity, Sequence[Activity]],
) -> bool:
    """Whether an activity starts when the other stream's ends, and could have started sooner for all that is known."""
    assert target.call is not None, "only what was launched is paired"
    known = [target.call.start_us + _LAUNCH_US, *(event.end_us for event in events.get(target, ()))]
    if before is not None:
        known.append(before.end_us)
    is_near = source.end_us - _TOUCH_US <= target.start_us <= source.end_us + _NEAR_US
    return is_near and target.start_us - max(known) > _LATE_US


def _has_wait(target: Activity, source: Activity, event_waits: Sequence[float]) -> bool:
    assert target.call is not None, "only what was launched is paired"
    assert source.call is not None, "only what was launched is paired"
    return bisect_left(event_waits, target.call.start_us) > bisect_left(event_waits, source.call.start_us)


def _may_lack_sms(target: Activity, source: Activity, num_sms: int) -> bool:
    if ActivityKind.COPY in (target.kind, source.kind):
        return False
    return not num_sms or any(not one.num_blocks or one.num_blocks >= num_sms for one in (target, source))
