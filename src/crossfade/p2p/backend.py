"""The backend ``crossfade`` of torch.distributed, which importing this module registers.

``dist.new_group(backend="crossfade")`` and ``dist.init_process_group("crossfade")`` give a group whose ``send``, ``recv``,
``isend``, ``irecv`` and ``batch_isend_irecv`` go by `crossfade.p2p`: tags count, and tensors may be received in any order. Its
collectives are those of gloo for CPU tensors and of NCCL for CUDA tensors. ``pg_options``, a dict, holds arguments of
`crossfade.p2p.P2P`, such as ``{"transport": "staged"}``. It is opened for torch's current GPU. Where that is the first one, the
program may not have set any: then it is the one to which the default group is bound (``device_id``), that with torchrun's number
for this process (``LOCAL_RANK``), or that of its rank; ``{"device": "cuda:0"}`` says that the first one is meant.

torch takes a Python group as the whole group. So the name stands alone, and not in a list such as ``cuda:crossfade,cpu:gloo``,
which would mean the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.distributed.distributed_c10d import PrefixStore, Store

from crossfade.p2p.communicator import P2P
from crossfade.p2p.work import Work
from crossfade.peers.rendezvous import Ranks

NAME = "crossfade"

_COLLECTIVES = (
    "_allgather_base _end_coalescing _reduce_scatter_base _start_coalescing all_gather_single all_gather_single_coalesced "
    "all_to_all_single allgather allgather_coalesced allgather_into_tensor_coalesced allreduce allreduce_coalesced alltoall "
    "alltoall_base barrier broadcast gather monitored_barrier reduce reduce_scatter reduce_scatter_single "
    "reduce_scatter_single_coalesced reduce_scatter_tensor_coalesced scatter"
)


class CrossfadeWork(dist._Work):  # type: ignore[name-defined,misc,unused-ignore]
    """A `Work` as torch.distributed has it."""

    def __init__(self, work: Work, source: int = -1) -> None:
        super().__init__()
        self._work = work
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:
        """See `crossfade.p2p.Work.wait`. ``timeout``: None, or a length of 0, for the group's."""
        seconds = None if not timeout else timeout.total_seconds()
        return self._work.wait(seconds)

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def is_success(self) -> bool:
        return self._work.is_completed() and self._work.exception() is None

    def exception(self) -> BaseException | None:
        return self._work.exception()

    def synchronize(self) -> None:
        self._work.wait()

    def source_rank(self) -> int:
        return self._source

    def _source_rank(self) -> int:
        return self._source


class CrossfadeGroup(ProcessGroup):
    """One rank's side of a group.

    Its collectives are those of a plain group of torch's, with gloo for CPU tensors and NCCL for CUDA tensors. (The methods that it
    inherits would do the same, but call them with Python's lock held, which a thread of gloo may need.)
    """

    def __init__(
        self, store: Store, rank: int, size: int, timeout: timedelta, options: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg,arg-type,unused-ignore]
        # First, since it may refuse the options: a gloo group that ends while it is made breaks off the making of it elsewhere.
        ranks = Ranks.of_store(PrefixStore(NAME, store), rank, size)
        self.p2p = P2P(ranks, timeout_s=timeout.total_seconds(), **{"waits": "stream", **(options or {})})
        self._collectives = ProcessGroup(PrefixStore("collectives", store), rank, size)
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, size, timeout)
        backends = [(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)]
        if torch.cuda.is_available() and dist.is_nccl_available():
            nccl = _nccl(PrefixStore("nccl", store), rank, size, timeout)
            backends.append((torch.device("cuda"), ProcessGroup.BackendType.NCCL, nccl))
        for group in (self, self._collectives):
            for device, kind, backend in backends:
                group._register_backend(device, kind, backend)
            group._set_default_backend(ProcessGroup.BackendType.GLOO)

    def send(self, tensors: list[torch.Tensor], dst: int, tag: int) -> CrossfadeWork:
        return CrossfadeWork(self.p2p.isend(_only(tensors), dst, tag))

    def recv(self, tensors: list[torch.Tensor], src: int, tag: int) -> CrossfadeWork:
        return CrossfadeWork(self.p2p.irecv(_only(tensors), src, tag), src)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> CrossfadeWork:
        src = self.p2p.probe(tag)
        return CrossfadeWork(self.p2p.irecv(_only(tensors), src, tag), src)

    def getBackendName(self) -> str:
        return NAME

    def shutdown(self) -> None:
        self.p2p.close()
        super().shutdown()


def _by_collectives(name: str) -> Callable[..., Any]:
    def call(self: CrossfadeGroup, *args: Any, **options: Any) -> Any:
        return getattr(self._collectives, name)(*args, **options)

    return call


for _name in _COLLECTIVES.split():
    if hasattr(ProcessGroup, _name):  # not every torch has all of them
        setattr(CrossfadeGroup, _name, _by_collectives(_name))


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    nccl = dist.ProcessGroupNCCL(store, rank, size, options)
    nccl._set_sequence_number_for_group()
    return nccl


def _only(tensors: list[torch.Tensor]) -> torch.Tensor:
    (tensor,) = tensors
    return tensor


def placed(options: Mapping[str, Any], rank: int) -> Mapping[str, Any]:
    """Options that say which GPU, where the program may not have set one. ``rank``: in the world."""
    if "device" in options or not torch.cuda.is_available() or torch.cuda.current_device():
        return options
    world = dist.group.WORLD
    bound: torch.device | None = None if world is None else world.bound_device_id
    local_rank = int(os.environ.get("LOCAL_RANK", rank))
    return {"device": bound or torch.device("cuda", local_rank % torch.cuda.device_count()), **options}


def _create(asked: Any, options: Mapping[str, Any] | None) -> CrossfadeGroup:
    rank = dist.get_rank() if dist.is_initialized() else asked.group_rank
    where = placed(options or {}, rank)
    return CrossfadeGroup(asked.store, asked.group_rank, asked.group_size, asked.timeout, where)


dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
