"""The tensors of a collective, moved by copy engines over a `crossfade.peers` group.

What `peers` cannot add up (products, minima, maxima, small integers) is dealt out first, so that each party reduces a part by
torch's kernels, in the order of the group, and then gathers the parts: as many bytes as any all-reduce needs. An average is a sum,
divided: of half-precision floats it is rounded twice, where gloo rounds once.

The group has one order of its parties, a collective may have another as its ranks: then blocks are put into place by a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from crossfade.collectives.terms import Meeting, finish_reduction, reduce_in_order
from crossfade.peers.collectives import (
    SUMMABLE,
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    broadcast,
    reduce_scatter_coalesced,
)
from crossfade.peers.group import PeerGroup
from crossfade.types import CollectiveKind, ReduceOp

__all__ = ["CopyMover"]

_PACKED_BYTES = 64 << 10
_ALIGNMENT = 16


class CopyMover:
    """One party's (see `crossfade.collectives.end.Mover`).

    Args:
        group: owned by this object from now on.
        parties: everybody, in the order of the group's ranks.
    """

    def __init__(self, group: PeerGroup, parties: Sequence[str]) -> None:
        self._group = group
        self._parties = tuple(parties)
        self._copy = group.home.kernels.copy

    def move(self, meeting: Meeting, rank: int, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Enqueues on torch's current stream; ``tensors`` lie in one piece each."""
        match meeting.kind:
            case CollectiveKind.ALLREDUCE:
                self._all_reduce(meeting, tensors, outs)
            case CollectiveKind.REDUCESCATTER:
                self._reduce_scatter(meeting, self._in_group_order(meeting, tensors[0]), outs[0])
            case CollectiveKind.ALLGATHER:
                self._all_gather(meeting, tensors[0], outs[0])
            case CollectiveKind.BROADCAST:
                root = self._parties.index(meeting.parties[meeting.root])
                broadcast(self._group, tensors[0] if rank == meeting.root else outs[0], root, outs[0])

    def let_go(self, why: str) -> None:
        """Nobody can be waited for any more: streams here that do are released."""
        self._group.let_go(why)

    def close(self) -> None:
        """All parties have done with it."""
        self._group.close(have_met=True)

    # Blocks in the order of ranks

    def _order(self, meeting: Meeting) -> list[int] | None:
        """For each member of the group its rank in the collective; None if that is the same."""
        order = [meeting.parties.index(party) for party in self._parties]
        return None if order == list(range(len(order))) else order

    def _in_group_order(self, meeting: Meeting, tensor: torch.Tensor) -> torch.Tensor:
        order = self._order(meeting)
        if order is None:
            return tensor
        dealt = torch.empty_like(tensor)
        block_bytes = tensor.nbytes // len(order)
        for member, rank in enumerate(order):
            self._put(dealt.data_ptr() + member * block_bytes, tensor.data_ptr() + rank * block_bytes, block_bytes)
        return dealt

    def _all_gather(self, meeting: Meeting, tensor: torch.Tensor, out: torch.Tensor) -> None:
        order = self._order(meeting)
        if order is None:
            all_gather(self._group, tensor, out)
            return
        whole, block_bytes = all_gather(self._group, tensor), tensor.nbytes
        for member, rank in enumerate(order):
            self._put(out.data_ptr() + rank * block_bytes, whole.data_ptr() + member * block_bytes, block_bytes)

    def _put(self, target: int, source: int, size_bytes: int) -> None:
        self._copy(self._group.current_stream(), target, source, size_bytes)

    # Reductions

    @staticmethod
    def _is_sum(meeting: Meeting, dtype: torch.dtype) -> bool:
        return meeting.op in (ReduceOp.SUM, ReduceOp.AVG) and str(dtype).removeprefix("torch.") in SUMMABLE

    def _reduce_scatter(self, meeting: Meeting, dealt: torch.Tensor, out: torch.Tensor) -> None:
        if self._is_sum(meeting, out.dtype):
            reduce_scatter_coalesced(self._group, [dealt], [out])
            finish_reduction(meeting, out)
        else:
            blocks = all_to_all(self._group, dealt).view(len(self._parties), *out.shape)
            out.copy_(reduce_in_order(meeting, list(blocks)))

    def _all_reduce(self, meeting: Meeting, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Sums of small tensors as one for each dtype, of long ones several at a time."""
        small: dict[torch.dtype, list[int]] = {}
        large = []
        for index, tensor in enumerate(tensors):
            if not self._is_sum(meeting, tensor.dtype):
                self._reduce_parts(meeting, tensor, outs[index])
            elif tensor.nbytes <= _PACKED_BYTES:
                small.setdefault(tensor.dtype, []).append(index)
            else:
                large.append(index)
        for places in small.values():
            self._sum_packed([tensors[k] for k in places], [outs[k] for k in places])
        if large:
            all_reduce_coalesced(self._group, [tensors[k] for k in large], [outs[k] for k in large])
        for index in (*large, *(k for places in small.values() for k in places)):
            finish_reduction(meeting, outs[index])

    def _sum_packed(self, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        if len(tensors) == 1:
            all_reduce(self._group, tensors[0], outs[0])
            return
        offsets = [0]
        for tensor in tensors:
            offsets.append(offsets[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        packed = torch.empty(offsets[-1] // tensors[0].itemsize, dtype=tensors[0].dtype, device=tensors[0].device)
        for tensor, offset in zip(tensors, offsets, strict=False):
            self._put(packed.data_ptr() + offset, tensor.data_ptr(), tensor.nbytes)
        all_reduce(self._group, packed, packed)
        for out, offset in zip(outs, offsets, strict=False):
            self._put(out.data_ptr(), packed.data_ptr() + offset, out.nbytes)

    def _reduce_parts(self, meeting: Meeting, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Each party reduces a part and all gather the parts; the last ones are filled up with whatever lies there."""
        num_parties = len(self._parties)
        length = -(-tensor.numel() // num_parties)
        whole = torch.empty(num_parties * length, dtype=tensor.dtype, device=tensor.device)
        whole[: tensor.numel()].copy_(tensor.view(-1))
        part = torch.empty(length, dtype=tensor.dtype, device=tensor.device)
        self._reduce_scatter(meeting, whole, part)
        out.view(-1).copy_(all_gather(self._group, part)[: tensor.numel()])
