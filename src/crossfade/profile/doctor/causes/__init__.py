"""Causes of idle GPUs and exposed communication, each with its evidence and the change that a fix makes.

::

    host.py         the host waits, allocates, or is not there in time
    streams.py      collectives: blocking, in one communicator's order, late beside full multiprocessors, small, contended
    events.py       collectives that wait for more than their input, gradients that are summed late
    queues.py       more streams than hardware queues, the default stream
    training.py     DDP: buckets, unused parameters, sums in several backward passes
    batches.py      batches launched one after the other
    ranks.py        a peer is late
"""

from collections.abc import Callable, Iterator

from crossfade.profile.doctor.causes.batches import launch_order
from crossfade.profile.doctor.causes.events import late_events, late_sums
from crossfade.profile.doctor.causes.host import allocator, host_waits, launches, pageable_copies
from crossfade.profile.doctor.causes.queues import default_stream, hardware_queues
from crossfade.profile.doctor.causes.ranks import late_peer
from crossfade.profile.doctor.causes.streams import blocking, communicator_order, contention, small_messages, sms_full
from crossfade.profile.doctor.causes.training import buckets, two_backwards, unused_parameters
from crossfade.profile.doctor.view import Finding, View

__all__ = ["CAUSES"]

CAUSES: tuple[Callable[[View], Iterator[Finding]], ...] = (
    host_waits,
    pageable_copies,
    allocator,
    launches,
    blocking,
    communicator_order,
    late_events,
    late_sums,
    hardware_queues,
    default_stream,
    sms_full,
    small_messages,
    buckets,
    unused_parameters,
    two_backwards,
    launch_order,
    late_peer,
    contention,
)
