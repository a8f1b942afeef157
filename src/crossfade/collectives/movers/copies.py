"""The tensors of a collective, moved by copy engines over a `crossfade.peers` group.

`peers` adds up. For products, minima, maxima and small integers the tensors are dealt out first, so that each party reduces a
part by torch's kernels, in the order of the group; then all gather the parts: as many bytes as any all-reduce needs. An average is
a sum, divided: of half-precision floats it is rounded twice, where gloo rounds once.

The group has one order of its parties, a collective may have another as its ranks: then blocks are put into place by a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch

from crossfade.collectives.protocol import Caller
from crossfade.collectives.rendezvous import Rendezvous
from crossfade.collectives.table import Part
from crossfade.collectives.terms import Terms, finish_reduction, reduce_in_order
from crossfade.device.context import DeviceContext
from crossfade.device.memory import Block
from crossfade.peers.collectives import (
    SUMMABLE,
    all_gather,
    all_reduce,
    all_reduce_coalesced,
    all_to_all,
    broadcast,
    reduce_scatter_coalesced,
)
from crossfade.peers.exported import Rank, Shape, open_exported
from crossfade.peers.group import PeerGroup
from crossfade.types import CollectiveKind, ReduceOp

_NUM_LANES = 2
_GPU_BUFFER_BYTES = 32 << 20
_HOST_BUFFER_BYTES = 1 << 20
_PACKED_BYTES = 64 << 10
_ALIGNMENT = 16


class CopyMover:
    """Moves through buffers of ``buffer_bytes``, four on each device; longer tensors go in pieces.

    ``on_death`` is called in another thread with the name of a dead party, before any stream that waits for it is released.
    """

    def __init__(
        self,
        context: DeviceContext,
        parties: Sequence[str],
        buffer_bytes: int | None = None,
        on_death: Callable[[str], None] | None = None,
    ) -> None:
        self.caller = Caller.GROUP if context.is_host else Caller.ANY
        size = buffer_bytes or (_HOST_BUFFER_BYTES if context.is_host else _GPU_BUFFER_BYTES)
        self._shape = Shape(len(parties), _NUM_LANES, size)
        self.signal_bytes = self._shape.signal_bytes
        self._context = context
        self._parties = tuple(parties)
        self._on_death = on_death
        self._opened = ExitStack()
        self._block: Block
        self._group: PeerGroup

    def describe(self) -> str:
        label = f"collectives of {', '.join(self._parties)}"
        self._block = self._context.pool.take(self._shape.data_bytes, f"buffers of {label}", label)
        self._opened.callback(self._block.release)
        return f"{self._context.device} {self._block.handle.hex()}"

    def connect(self, rendezvous: Rendezvous, parts: Sequence[Part], published: Sequence[tuple[int, str]]) -> None:
        ranks = [
            Rank(party, pid, part.memory, bytes.fromhex(handle), int(device))
            for party, part, (pid, text) in zip(self._parties, parts, published, strict=True)
            for device, handle in [text.split()]
        ]
        self._group = open_exported(
            self._context.driver,
            self._block,
            ranks,
            rendezvous.rank,
            self._shape,
            signals_at=Part.SIGNALS_AT,
            on_death=self._on_death,
        )
        self._opened.callback(self._group.close, have_met=True)

    def move(self, terms: Terms, rank: int, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        match terms.kind:
            case CollectiveKind.ALLREDUCE:
                self._all_reduce(terms, tensors, outs)
            case CollectiveKind.REDUCESCATTER:
                self._reduce_scatter(terms, self._in_group_order(terms, tensors[0]), outs[0])
            case CollectiveKind.ALLGATHER:
                self._all_gather(terms, tensors[0], outs[0])
            case CollectiveKind.BROADCAST:
                root = self._parties.index(terms.parties[terms.root])
                broadcast(tensors[0] if rank == terms.root else outs[0], root, self._group, outs[0])

    def abort(self, reason: str) -> None:
        self._group.let_go(reason)

    def close(self) -> None:
        self._opened.close()

    # Blocks in the order of ranks

    def _order(self, terms: Terms) -> list[int] | None:
        """For each member of the group its rank in the collective; None if that is the same."""
        order = [terms.parties.index(party) for party in self._parties]
        return None if order == list(range(len(order))) else order

    def _in_group_order(self, terms: Terms, tensor: torch.Tensor) -> torch.Tensor:
        order = self._order(terms)
        if order is None:
            return tensor
        dealt = torch.empty_like(tensor)
        block_bytes = tensor.nbytes // len(order)
        for member, rank in enumerate(order):
            self._put(dealt.data_ptr() + member * block_bytes, tensor.data_ptr() + rank * block_bytes, block_bytes)
        return dealt

    def _all_gather(self, terms: Terms, tensor: torch.Tensor, out: torch.Tensor) -> None:
        order = self._order(terms)
        if order is None:
            all_gather(tensor, self._group, out)
            return
        whole, block_bytes = all_gather(tensor, self._group), tensor.nbytes
        for member, rank in enumerate(order):
            self._put(out.data_ptr() + rank * block_bytes, whole.data_ptr() + member * block_bytes, block_bytes)

    def _put(self, target: int, source: int, size_bytes: int) -> None:
        self._group.memory.kernels.copy(self._group.current_stream(), target, source, size_bytes)

    # Reductions

    @staticmethod
    def _is_sum(terms: Terms, dtype: torch.dtype) -> bool:
        return terms.op in (ReduceOp.SUM, ReduceOp.AVG) and str(dtype).removeprefix("torch.") in SUMMABLE

    def _reduce_scatter(self, terms: Terms, dealt: torch.Tensor, out: torch.Tensor) -> None:
        if self._is_sum(terms, out.dtype):
            reduce_scatter_coalesced([dealt], self._group, [out])
            finish_reduction(terms, out)
        else:
            blocks = all_to_all(dealt, self._group).view(len(self._parties), *out.shape)
            out.copy_(reduce_in_order(terms, list(blocks)))

    def _all_reduce(self, terms: Terms, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        """Sums of small tensors as one for each dtype, of long ones several at a time."""
        small: dict[torch.dtype, list[int]] = {}
        large = []
        for index, tensor in enumerate(tensors):
            if not self._is_sum(terms, tensor.dtype):
                self._reduce_parts(terms, tensor, outs[index])
            elif tensor.nbytes <= _PACKED_BYTES:
                small.setdefault(tensor.dtype, []).append(index)
            else:
                large.append(index)
        for places in small.values():
            self._sum_packed([tensors[k] for k in places], [outs[k] for k in places])
        if large:
            all_reduce_coalesced([tensors[k] for k in large], self._group, [outs[k] for k in large])
        for index in (*large, *(k for places in small.values() for k in places)):
            finish_reduction(terms, outs[index])

    def _sum_packed(self, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        if len(tensors) == 1:
            all_reduce(tensors[0], self._group, outs[0])
            return
        offsets = [0]
        for tensor in tensors:
            offsets.append(offsets[-1] + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT)
        packed = torch.empty(offsets[-1] // tensors[0].itemsize, dtype=tensors[0].dtype, device=tensors[0].device)
        for tensor, offset in zip(tensors, offsets, strict=False):
            self._put(packed.data_ptr() + offset, tensor.data_ptr(), tensor.nbytes)
        all_reduce(packed, self._group, packed)
        for out, offset in zip(outs, offsets, strict=False):
            self._put(out.data_ptr(), packed.data_ptr() + offset, out.nbytes)

    def _reduce_parts(self, terms: Terms, tensor: torch.Tensor, out: torch.Tensor) -> None:
        """Each party reduces a part and all gather the parts; the last ones are filled up with uninitialized memory."""
        num_parties = len(self._parties)
        length = -(-tensor.numel() // num_parties)
        whole = torch.empty(num_parties * length, dtype=tensor.dtype, device=tensor.device)
        whole[: tensor.numel()].copy_(tensor.view(-1))
        part = torch.empty(length, dtype=tensor.dtype, device=tensor.device)
        self._reduce_scatter(terms, whole, part)
        out.view(-1).copy_(all_gather(part, self._group)[: tensor.numel()])
