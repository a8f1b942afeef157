"""What a way to do an operator needs ahead of its calls, and what refuses to make it too late.

`crossfade.ops.prepare` puts a `Rehearsal` in the place of a candidate. The operator makes its `crossfade.ops.job.Job` as ever;
then, on each rank, `PREPARERS` has what makes the way ready for such jobs, with no word to other ranks; the ranks tell each other
that it went well; and the job is done once. By then libraries have loaded their kernels for these lengths, made their communicators
and taken their memory, so a capture, which allows none of this, needs none of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossfade.errors import DeviceError
from crossfade.peers.meeting import gather

if TYPE_CHECKING:
    from crossfade.ops.candidate import Candidate
    from crossfade.ops.job import Job, Way
    from crossfade.peers.group import PeerGroup

__all__ = ["PREPARERS", "Preparer", "Rehearsal", "make_ready", "refuse_in_capture", "rehearse"]

Preparer = Callable[..., None]
"""A function that is given a `Job`, and the parameters of its candidate by name, as a way is. It loads kernels and takes memory for
such jobs, and keeps them in `PeerGroup.belongings`. It moves nothing, and says no word to other ranks."""

PREPARERS: dict[str, Preparer] = {}
"""By the name of the way, for ways that keep something. What a way asks of libraries alone, its rehearsal brings about."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """In the place of a candidate: its way is made ready, then gone once.

    Attributes:
        candidate: the way.
        is_whole: else it is made ready on this rank, with no word to other ranks, and not gone.
    """

    candidate: Candidate
    is_whole: bool = True


def refuse_in_capture(group: PeerGroup, what: str) -> None:
    """What a way calls before it loads or makes what is not there yet.

    Args:
        group: on whose device.
        what: it has to do, for the error.

    Raises:
        DeviceError: the current stream is being captured.
    """
    if group.is_capturing():
        raise DeviceError(
            f"{what}, and the current stream is being captured",
            hint="prepare() the operator for this shape and lane first (crossfade.ops.prepare), or call it once",
        )


def rehearse(candidate: Candidate, way: Way, job: Job) -> None:
    """Makes a way ready and goes it once. Collective.

    Raises:
        DeviceError: it could not be made ready on one of the ranks; on that rank its own error instead.
    """
    error = None
    try:
        make_ready(candidate, way, job)
    except Exception as raised:
        error = raised
    failed = [rank for rank, has_failed in enumerate(_told(job.group, has_failed=error is not None)) if has_failed]
    if error is not None:
        raise error
    if failed:
        raise DeviceError(
            f"'{candidate}' could not be prepared on rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}",
            hint="see the error there",
        )
    way(job)


def make_ready(candidate: Candidate, way: Way, job: Job) -> None:
    """Makes a way ready on this rank; whatever that raises is raised."""
    prepare = PREPARERS.get(candidate.name)
    if prepare is not None:
        prepare(job, **candidate.arguments)


def _told(group: PeerGroup, *, has_failed: bool) -> list[bool]:
    """Everybody's word; this rank's alone where torch.distributed does not know the group."""
    if group.process_group is None:
        return [has_failed]
    return [bool(row[0]) for row in gather(group.process_group, group.device, [int(has_failed)])]
