"""Words that every room shares: names of things, transports, collectives."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["DRIVER", "CollectiveKind", "ReduceOp", "Transport"]

DRIVER = "driver"
"""The name of the driving process in plans; no actor may have it."""


class Transport(StrEnum):
    """How a channel moves bytes.

    ``auto`` is a request, the others are what a plan shows.
    """

    AUTO = "auto"
    SHM = "shm"
    """A ring in shared memory, for processes of one host."""
    GLOO = "gloo"
    """torch.distributed's gloo, for CPU tensors; moves bytes in the background of both sides."""


class CollectiveKind(StrEnum):
    """What actors do together with a tensor of each of them (t_0 ... t_(n-1), in rank order)."""

    ALLREDUCE = "allreduce"
    """Everybody gets the reduction of all tensors, of their common shape."""
    ALLGATHER = "allgather"
    """Everybody gets all tensors, one after the other along dim 0."""
    REDUCESCATTER = "reducescatter"
    """Rank r gets part r of n equal parts, along dim 0, of the reduction."""
    BROADCAST = "broadcast"
    """Everybody gets the tensor of one of them, the root."""

    @property
    def reduces(self) -> bool:
        """Whether it takes a `ReduceOp`."""
        return self in (CollectiveKind.ALLREDUCE, CollectiveKind.REDUCESCATTER)


class ReduceOp(StrEnum):
    """How tensors of several actors become one, element by element."""

    SUM = "sum"
    PRODUCT = "product"
    MIN = "min"
    MAX = "max"
    AVG = "avg"
    """The sum over the number of actors; for floating point only."""
