"""The tensors of a collective, moved by a process group of torch.distributed that these parties have for themselves: NCCL's.

NCCL's kernels take SMs, and wait for SMs beside a product that holds them all; `crossfade.collectives.movers.copies` takes some for
additions only. So it is used where it is asked for. The group is the parties' own, so no order with a user's collectives matters.

A wait for a collective of a GPU's process group holds the stream and not the host. gloo's waits hold the host; with CPU tensors
that is the thread which may wait, so a gloo group does here as well.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from crossfade.collectives.terms import Meeting, finish_reduction, reduced_dtype
from crossfade.errors import MissingDependency
from crossfade.types import CollectiveKind, ReduceOp

__all__ = ["GroupMover", "open_nccl"]

_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}
_NARROW = (torch.int16, torch.uint16, torch.uint32)
"""What NCCL cannot reduce, and is reduced in a wider dtype."""


def open_nccl(store: Any, rank: int, num_ranks: int, device: torch.device) -> Any:
    """A communicator of these parties; its own set-up listens on loopback only.

    Args:
        store: torch's, where they meet.
        rank: this party.
        num_ranks: of how many.
        device: its GPU.

    Raises:
        MissingDependency: this torch has no NCCL.
    """
    if not dist.is_nccl_available():
        raise MissingDependency("torch with NCCL", extra="gpu", needed_for="the transport 'nccl'")
    os.environ["NCCL_SOCKET_IFNAME"] = "lo"
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # type: ignore[attr-defined,unused-ignore]
    options._timeout = timedelta(days=365)
    group: Any = dist.ProcessGroupNCCL(store, rank, num_ranks, options)  # type: ignore[attr-defined,unused-ignore]
    with torch.cuda.device(device):
        first = torch.zeros(1, device=device)
        group.allreduce([first]).wait()  # connects
        torch.cuda.synchronize(device)
    return group


class GroupMover:
    """One party's (see `crossfade.collectives.end.Mover`).

    Args:
        group: a process group of c10d; owned by this object from now on.
        parties: everybody, in the order of its ranks.
    """

    def __init__(self, group: Any, parties: Sequence[str]) -> None:
        self._group: Any = group
        self._parties = tuple(parties)

    def move(self, meeting: Meeting, rank: int, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Enqueues on torch's current stream; ``tensors`` lie in one piece each."""
        match meeting.kind:
            case CollectiveKind.ALLREDUCE:
                for tensor, out in zip(tensors, outs, strict=True):
                    self._all_reduce(meeting, tensor, out)
            case CollectiveKind.REDUCESCATTER:
                self._reduce_scatter(meeting, tensors[0], outs[0])
            case CollectiveKind.ALLGATHER:
                self._all_gather(meeting, tensors[0], outs[0])
            case CollectiveKind.BROADCAST:
                self._broadcast(meeting, rank, tensors, outs[0])

    def _all_reduce(self, meeting: Meeting, tensor: torch.Tensor, out: torch.Tensor) -> None:
        total = out if self._dtype(tensor) == tensor.dtype else torch.empty_like(out, dtype=self._dtype(tensor))
        total.copy_(tensor)
        if total.numel():
            self._group.allreduce([total], _options(dist.AllreduceOptions(), meeting)).wait()
        finish_reduction(meeting, total)
        if total is not out:
            out.copy_(total)

    def _reduce_scatter(self, meeting: Meeting, tensor: torch.Tensor, out: torch.Tensor) -> None:
        wide = self._dtype(tensor)
        part, whole = torch.empty_like(out, dtype=wide), tensor.to(wide)
        blocks = whole.view(len(self._parties), *out.shape).unbind()
        dealt = [blocks[meeting.parties.index(party)].contiguous() for party in self._parties]
        if part.numel():
            self._group.reduce_scatter([part], [dealt], _options(dist.ReduceScatterOptions(), meeting)).wait()
        out.copy_(finish_reduction(meeting, part))

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Half-precision floats are reduced as they are on GPUs, which is what NCCL is asked for."""
        if tensor.is_cuda and tensor.dtype not in _NARROW:
            return tensor.dtype
        return reduced_dtype(tensor.dtype)

    def _all_gather(self, meeting: Meeting, tensor: torch.Tensor, out: torch.Tensor) -> None:
        if out.numel():
            blocks = _bytes(out).view(len(self._parties), -1).unbind()
            self._group.allgather(
                [[blocks[meeting.parties.index(party)] for party in self._parties]], [_bytes(tensor)]
            ).wait()

    def _broadcast(self, meeting: Meeting, rank: int, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        if rank == meeting.root:
            out.copy_(tensors[0])
        options = dist.BroadcastOptions()
        options.rootRank = self._parties.index(meeting.parties[meeting.root])
        options.rootTensor = 0
        if out.numel():
            self._group.broadcast([_bytes(out)], options).wait()

    def let_go(self, why: str) -> None:
        """Nobody can be waited for any more: what is under way is ended."""
        self._group.abort()

    def close(self) -> None:
        """All parties have done with it."""
        self._group.shutdown()


def _options(options: Any, meeting: Meeting) -> Any:
    options.reduceOp = _OPS[meeting.op or ReduceOp.SUM]
    return options


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor in one piece."""
    return tensor.view(-1).view(torch.uint8)
