"""torch.distributed's collectives on a peer group, under the names that this torch has for them.

NCCL on GPUs, gloo on a CPU. With ``is_async`` a call runs beside what follows, on a stream or in a thread of torch's own, until
``wait`` of what it gives; on a GPU that holds the current stream and not the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import DeviceError

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.peers.group import PeerGroup

__all__ = ["all_gather", "all_reduce", "all_to_all", "reduce_scatter", "require_group"]


def require_group(group: PeerGroup) -> Any:
    """torch's group of the same ranks."""
    if group.process_group is None:
        raise DeviceError(
            "these ranks have no group of torch.distributed, which this candidate needs", hint="take 'rounds'"
        )
    return group.process_group


def _named(*names: str) -> Any:
    """The first of these that there is: since 2.13 torch warns of the older names."""
    distributed = torch_or_raise().distributed
    return next(getattr(distributed, name) for name in names if hasattr(distributed, name))


def reduce_scatter(group: PeerGroup, out: Tensor, tensor: Tensor, *, is_async: bool = False) -> Any:
    """(W n, ...) to the sum's (n, ...)."""
    function = _named("reduce_scatter_single", "reduce_scatter_tensor")
    return function(out, tensor, group=require_group(group), async_op=is_async)


def all_reduce(group: PeerGroup, tensor: Tensor, *, is_async: bool = False) -> Any:
    """In place."""
    return torch_or_raise().distributed.all_reduce(tensor, group=require_group(group), async_op=is_async)


def all_gather(group: PeerGroup, out: Tensor, tensor: Tensor) -> None:
    """(n, ...) to (W n, ...)."""
    _named("all_gather_single", "all_gather_into_tensor")(out, tensor, group=require_group(group))


def all_to_all(group: PeerGroup, out: Tensor, tensor: Tensor, received: Sequence[int], sent: Sequence[int]) -> None:
    """Rows of the first dimension: ``sent[p]`` of them to rank p, ``received[p]`` from it."""
    torch_or_raise().distributed.all_to_all_single(out, tensor, list(received), list(sent), group=require_group(group))
