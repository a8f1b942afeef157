"""How a way to do an operator begins and ends on its lane."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from crossfade.ops.job import Job
from crossfade.peers.lane import Lane
from crossfade.peers.steps import end

__all__ = ["OnLane", "on_lane", "whole"]


class OnLane(NamedTuple):
    """Where exchanges are enqueued.

    Attributes:
        lane: of the job.
        stream: the caller's.
        local: the lane's own, which goes on behind the beginning of the call.
    """

    lane: Lane
    stream: int
    local: int


@contextmanager
def on_lane(job: Job) -> Iterator[OnLane]:
    """A call that uses the lane: in step with all ranks, or the lane is broken.

    At its end the stream goes on behind the lane's local one, so what the call used may be used again behind it on the stream.

    Raises:
        ChannelBroken: a rank has died.
        DeviceError: the call is captured on a lane that cannot be replayed.
    """
    group, lane = job.group, job.group.lane(job.lane)
    stream = group.current_stream()
    lane.begin(stream, is_captured=group.is_capturing())
    try:
        yield OnLane(lane, stream, lane.fork_local(stream))
        lane.join_local(stream)
        end(lane, stream)
    except BaseException as error:
        lane.cut_off(error)
        raise
    # On a CPU a captured graph holds what it touches, by an action that does nothing; on a GPU torch's allocator sees to it.
    group.do(partial(_nothing, job))
    group.check_call(lane)


def whole(job: Job, body: Callable[[], None]) -> None:
    """A call that is torch's alone; a lane whose ranks have died refuses it like any other.

    Raises:
        ChannelBroken: a rank has died.
    """
    lane = job.group.lane(job.lane)
    lane.check()
    job.group.do(body)
    job.group.check_call(lane)


def _nothing(job: Job) -> None: ...
