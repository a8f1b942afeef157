"""The tensors of a collective, moved by a process group of torch.distributed that these parties have for themselves.

**NCCL** for tensors on GPUs. Its kernels take SMs, and wait for SMs while a product holds them all;
`crossfade.collectives.movers.copies` takes some for additions only. So it is used where it is asked for. A wait for one of its
collectives holds the stream and not the host.

**gloo** for tensors on the CPU, on loopback or, between hosts, at the address by which they reach each other; its members prove to
each other that they hold the group's key (`crossfade.channels.gloo_proof`). A wait holds the thread. Gloo cannot reduce each dtype:
half-precision floats are reduced in float32 and rounded once, small integers in wider ones. The order in which it reduces the
ranks is not defined. Its reduce-scatter is slower than an all-reduce, of which each party then keeps its part.

The group is the parties' own, so it does not meet with collectives of the user's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from crossfade.channels.gloo_proof import KEY_BYTES, open_gloo
from crossfade.collectives.protocol import Caller
from crossfade.collectives.rendezvous import Rendezvous
from crossfade.collectives.table import Part
from crossfade.collectives.terms import Terms, finish_reduction, reduced_dtype, shard
from crossfade.device.borrowed import device_of
from crossfade.device.context import DeviceContext
from crossfade.errors import ChannelBroken, DeviceError, MissingDependency
from crossfade.host.tcp import let_nccl_meet_at
from crossfade.types import CollectiveKind, ReduceOp

_PACKED_BYTES = 256 << 10
"""CPU tensors up to this size that are reduced in one dtype are copied together, and reduced as one."""
_OPS = {
    ReduceOp.SUM: dist.ReduceOp.SUM,
    ReduceOp.AVG: dist.ReduceOp.SUM,
    ReduceOp.PRODUCT: dist.ReduceOp.PRODUCT,
    ReduceOp.MIN: dist.ReduceOp.MIN,
    ReduceOp.MAX: dist.ReduceOp.MAX,
}
_NARROW = (torch.int16, torch.uint16, torch.uint32)  # dtypes that NCCL cannot reduce; they are reduced in a wider one


def _open_nccl(rendezvous: Rendezvous, device: torch.device) -> Any:
    if not dist.is_nccl_available():
        raise MissingDependency("torch with NCCL", extra="gpu", needed_for="the transport 'nccl'")
    let_nccl_meet_at(rendezvous.address)
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)  # type: ignore[attr-defined,unused-ignore]
    options._timeout = timedelta(days=365)
    group: Any = dist.ProcessGroupNCCL(  # type: ignore[attr-defined,unused-ignore]
        rendezvous.store, rendezvous.rank, len(rendezvous.parties), options
    )
    with torch.cuda.device(device):
        first = torch.zeros(1, device=device)
        group.allreduce([first]).wait()  # connects
        torch.cuda.synchronize(device)
    return group


class C10dMover:
    """Owns a process group: NCCL's on this GPU, or gloo's."""

    signal_bytes = 0

    def __init__(self, context: DeviceContext, *, is_gloo: bool) -> None:
        self.caller = Caller.GROUP if is_gloo else Caller.ANY
        self._is_gloo = is_gloo
        self._context = context
        self._parties: tuple[str, ...] = ()  # in the order of the group's ranks
        self._group: Any = None
        self._store: Any = None  # of the group, which refers to a part of it only

    def describe(self) -> str:
        if self._is_gloo:
            return os.urandom(KEY_BYTES).hex()
        if self._context.is_host:
            raise DeviceError(
                "the transport 'nccl' needs a GPU, and its actor has none", hint="give its actor one: num_gpus=1"
            )
        return ""

    def connect(self, rendezvous: Rendezvous, parts: Sequence[Part], published: Sequence[tuple[int, str]]) -> None:
        self._parties, self._store = rendezvous.parties, rendezvous.store
        if self._is_gloo:
            key = bytes.fromhex(published[0][1])
            self._group = open_gloo(rendezvous.store, key, rendezvous.parties, rendezvous.rank, rendezvous.address)
        else:
            self._group = _open_nccl(rendezvous, device_of(self._context.device))

    def move(self, terms: Terms, rank: int, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
        group = self._group
        if group is None:
            raise ChannelBroken("the group is closed")
        match terms.kind:
            case CollectiveKind.ALLREDUCE:
                self._all_reduce(group, terms, tensors, outs)
            case CollectiveKind.REDUCESCATTER:
                self._reduce_scatter(group, terms, rank, tensors[0], outs[0])
            case CollectiveKind.ALLGATHER:
                self._all_gather(group, terms, tensors[0], outs[0])
            case CollectiveKind.BROADCAST:
                self._broadcast(group, terms, rank, tensors, outs[0])

    def _all_reduce(
        self, group: Any, terms: Terms, tensors: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]
    ) -> None:
        packs: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            if self._is_gloo and len(tensors) > 1 and tensor.nbytes <= _PACKED_BYTES:
                packs.setdefault(self._dtype(tensor), []).append(index)
                continue
            wide, out = self._dtype(tensor), outs[index]
            total = out if wide == tensor.dtype else torch.empty_like(out, dtype=wide)
            total.copy_(tensor)
            self._reduce(group, terms, total)
            if total is not out:
                out.copy_(total)
        for wide, indices in packs.items():
            total = torch.cat([tensors[index].view(-1).to(wide) for index in indices])
            self._reduce(group, terms, total)
            for index, part in zip(indices, torch.split(total, [tensors[k].numel() for k in indices]), strict=True):
                outs[index].view(-1).copy_(part)

    def _reduce(self, group: Any, terms: Terms, total: torch.Tensor) -> None:
        """In place."""
        if total.numel():
            compares = self._is_gloo and terms.op in (ReduceOp.MAX, ReduceOp.MIN) and total.is_floating_point()
            is_nan = total.isnan().to(torch.uint8) if compares else None
            group.allreduce([total], _options(dist.AllreduceOptions(), terms)).wait()
            if is_nan is not None:  # gloo keeps a NaN or loses it, depending on which rank has it
                options: Any = dist.AllreduceOptions()
                options.reduceOp = dist.ReduceOp.MAX
                group.allreduce([is_nan], options).wait()
                total.masked_fill_(is_nan.bool(), float("nan"))
        finish_reduction(terms, total)

    def _reduce_scatter(self, group: Any, terms: Terms, rank: int, tensor: torch.Tensor, out: torch.Tensor) -> None:
        wide = self._dtype(tensor)
        if self._is_gloo:
            total = tensor.to(wide, copy=True)
            self._reduce(group, terms, total)
            out.copy_(shard(terms, total, rank))
            return
        part, whole = torch.empty_like(out, dtype=wide), tensor.to(wide)
        blocks = whole.view(len(self._parties), *out.shape).unbind()
        dealt = [blocks[terms.parties.index(party)].contiguous() for party in self._parties]
        if part.numel():
            group.reduce_scatter([part], [dealt], _options(dist.ReduceScatterOptions(), terms)).wait()
        out.copy_(finish_reduction(terms, part))

    def _dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """The dtype in which a tensor is reduced. NCCL reduces half-precision floats as they are."""
        return reduced_dtype(tensor.dtype) if self._is_gloo or tensor.dtype in _NARROW else tensor.dtype

    def _all_gather(self, group: Any, terms: Terms, tensor: torch.Tensor, out: torch.Tensor) -> None:
        if out.numel():
            blocks = _bytes(out).view(len(self._parties), -1).unbind()
            by_group = [blocks[terms.parties.index(party)] for party in self._parties]
            group.allgather([by_group], [_bytes(tensor)]).wait()

    def _broadcast(
        self, group: Any, terms: Terms, rank: int, tensors: Sequence[torch.Tensor], out: torch.Tensor
    ) -> None:
        if rank == terms.root:
            out.copy_(tensors[0])
        options = dist.BroadcastOptions()
        options.rootRank = self._parties.index(terms.parties[terms.root])
        options.rootTensor = 0
        if out.numel():
            group.broadcast([_bytes(out)], options).wait()

    def abort(self, reason: str) -> None:
        """gloo closes its connections, at which the others fail, when the group is destroyed: as soon as no call is under way."""
        if not self._is_gloo:
            self._group.abort()
        self._group = None

    def close(self) -> None:
        """torch's store writes once more, by its descriptor's number, when it is destroyed: that must be before it is closed."""
        if self._group is not None and not self._is_gloo:
            self._group.shutdown()
        self._group = self._store = None


def _options(options: Any, terms: Terms) -> Any:
    options.reduceOp = _OPS[terms.op or ReduceOp.SUM]
    return options


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor. (The stride of one element may be anything.)"""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
