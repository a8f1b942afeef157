"""A call that does ahead what later calls need: kernels loaded, memory taken, communicators made.

`crossfade.ops.prepare` passes a `WarmUp` in place of a candidate. The operator makes its `Job` as for every call. Then each rank
prepares the algorithm for such jobs, without communication; the ranks tell each other whether that went well; and the job is run
once. By then libraries have loaded their kernels for these lengths, made their communicators and taken their memory, so a capture,
which allows none of this, needs none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossfade.errors import DeviceError
from crossfade.peers.rendezvous import gather

if TYPE_CHECKING:
    from crossfade.ops.calls.job import Algorithm, Job
    from crossfade.ops.choice.candidate import Candidate
    from crossfade.peers.group import PeerGroup


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Passed in place of a candidate: prepare its algorithm, and, if ``is_run``, run it once as warm-up, which is collective."""

    candidate: Candidate
    is_run: bool = True

    def do(self, algorithm: Algorithm, job: Job) -> None:
        """Does it."""
        arguments = self.candidate.arguments
        error = None
        try:
            if algorithm.prepare is not None:
                algorithm.prepare(job, **arguments)
        except Exception as raised:
            if not self.is_run:
                raise
            error = raised
        if not self.is_run:
            return
        failed = [
            rank for rank, has_failed in enumerate(_gather(job.group, has_failed=error is not None)) if has_failed
        ]
        if error is not None:
            raise error
        if failed:
            raise DeviceError(
                f"'{self.candidate}' could not be prepared on rank{'s' * (len(failed) > 1)} {', '.join(map(str, failed))}",
                hint="see the error there",
            )
        algorithm.run(job, **arguments)


def _gather(group: PeerGroup, *, has_failed: bool) -> list[bool]:
    """Of each rank; of this one alone where torch.distributed does not know the group."""
    if group.process_group is None:
        return [has_failed]
    return [bool(row[0]) for row in gather(group.process_group, group.device, [int(has_failed)])]
