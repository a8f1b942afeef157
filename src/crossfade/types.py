"""Words that every room shares: names of things, transports, devices, collectives."""

from __future__ import annotations

from enum import StrEnum

__all__ = ["DRIVER", "CollectiveKind", "ReduceOp", "TargetDevice", "Transport"]

DRIVER = "driver"
"""The name of the driving process in plans; no actor may have it."""


class Transport(StrEnum):
    """How a channel moves bytes.

    ``auto`` and ``accelerator`` are requests, the others are what a plan shows.
    """

    AUTO = "auto"
    ACCELERATOR = "accelerator"
    """Any of those that move device tensors. The string ``"nccl"``, as Ray's programs write it, means this too."""
    SHM = "shm"
    """A ring in shared memory, for processes of one host."""
    GLOO = "gloo"
    """torch.distributed's gloo, for CPU tensors; moves bytes in the background of both sides."""
    COPY = "copy"
    """The copy engine of the sender's GPU writes into memory of the receiver's; everything else goes by a ring in shared memory.

    Between two actors that have no GPU, memory of the host stands for that of GPUs.
    """
    STAGED = "staged"
    """From GPU to GPU through pinned memory of the host, where GPUs cannot reach each other.

    Between two actors that have no GPU, as for ``copy``.
    """
    TCP = "tcp"
    """Between hosts: a TCP connection, and a ring in shared memory where the value arrives. ``auto`` takes it there."""
    NCCL = "nccl"
    """NCCL's send and receive, for edges only where this member itself is asked for; and its collectives, also between GPUs that no
    NVLink connects."""
    COMMUNICATOR = "communicator"
    """A user-defined communicator. It blocks both sides. It is passed as an object: no name selects it."""

    @property
    def blocks(self) -> bool:
        """Whether a transfer blocks the thread that makes it, so that nothing moves in the background."""
        return self is Transport.COMMUNICATOR

    @property
    def moves_device_memory(self) -> bool:
        """Whether it takes device tensors from GPU to GPU."""
        return self in _MOVE_DEVICE_MEMORY


_MOVE_DEVICE_MEMORY = frozenset({Transport.COPY, Transport.STAGED, Transport.NCCL})


class TargetDevice(StrEnum):
    """Where the readers of a value want its tensors."""

    DEFAULT = "default"
    """Device tensors on the reader's GPU if it has one, else on the CPU; CPU tensors on the CPU."""
    CPU = "cpu"
    """All of them on the CPU."""
    CUDA = "cuda"
    """All of them on the reader's GPU."""
    GPU = "cuda"
    """Ray's other name for that."""


class CollectiveKind(StrEnum):
    """What actors do together with a tensor of each of them (t_0 ... t_(n-1), in rank order)."""

    ALLREDUCE = "allreduce"
    """All get the reduction of all tensors, of their common shape."""
    ALLGATHER = "allgather"
    """All get all tensors, one after the other along dim 0."""
    REDUCESCATTER = "reducescatter"
    """Rank r gets part r of n equal parts, along dim 0, of the reduction."""
    BROADCAST = "broadcast"
    """All get the tensor of one of them, the root."""

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
