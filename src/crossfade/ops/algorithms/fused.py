"""torch's own fused operators, ``torch.ops.symm_mem.fused_*``: products and copies by turns on two streams. GPUs only.

They move by memory that torch shares among the ranks, one piece for each of its groups. So only lane 0 uses them: on other lanes,
where a second call may be in flight, it is `plain`. The memory grows with the shapes that come: a call that would let it grow
cannot be captured. What a graph has captured stays shared as long as the group. NVLink multicast, by which torch may gather few
rows, is not used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import DeviceError
from crossfade.ops.algorithms import plain
from crossfade.ops.calls.job import Job, Operator, Shape, takes_fused, whole
from crossfade.ops.calls.products import require_group

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

_FUNCTIONS = {Operator.REDUCE_SCATTER: "fused_matmul_reduce_scatter", Operator.ALL_GATHER: "fused_all_gather_matmul"}
_MODULE = "torch.distributed._symmetric_memory"
_KEPT_AS = "crossfade.ops.algorithms.fused"
_MULTICAST_ROWS = 2048
"""Up to so many rows torch may gather by multicast, unless the rows are wanted too."""


def is_offered(shape: Shape, group: PeerGroup) -> bool:
    """Whether this torch has a fused operator for such a shape and group."""
    name = _FUNCTIONS.get(Operator(shape.operator))
    if name is None or group.process_group is None or group.device_type != "cuda":
        return False
    if shape.num_ranks == 1 or shape.m % shape.num_ranks or find_spec(_MODULE) is None:
        return False
    return _function(name) is not None


def shared_bytes(group: PeerGroup) -> int:
    """How much of torch's memory the ranks share for these operators by now; the same on all ranks, call by call."""
    return max(_handles(group), default=0)


def reduce_scatter(job: Job) -> None:
    """See `matmul_reduce_scatter`. A bias, which these operators do not know, makes it `plain`."""
    if not takes_fused(Operator.REDUCE_SCATTER, job.lane, has_bias=job.has_bias):
        plain.reduce_scatter(job)
        return
    name, function = _set_up(job, Operator.REDUCE_SCATTER, 2 * job.out.nbytes)
    whole(job, lambda: _deliver(job, function(job.a, job.b, "sum", 0, name)))


def all_gather(job: Job) -> None:
    """See `all_gather_matmul`."""
    if not takes_fused(Operator.ALL_GATHER, job.lane, has_bias=job.bias is not None):
        plain.all_gather(job)
        return
    name, function = _set_up(job, Operator.ALL_GATHER, job.a.nbytes)
    wants_rows = job.gathered is not None or len(job.out) <= _MULTICAST_ROWS

    def body() -> None:
        rows, (product,) = function(job.a, [job.b], 0, name, return_A=wants_rows)
        if job.bias is not None:
            product += job.bias
        _deliver(job, product)
        if job.gathered is not None:
            job.gathered.copy_(rows)

    whole(job, body)


def _function(name: str) -> Callable[..., Any] | None:
    from torch.distributed import _symmetric_memory  # noqa: F401 - it defines the operators

    return getattr(torch_or_raise().ops.symm_mem, name, None)


def _set_up(job: Job, operator: Operator, size_bytes: int) -> tuple[Any, Callable[..., Any]]:
    """The name of torch's group, and the operator, for which shared memory of a size is there. Collective where it has to grow."""
    group = job.group
    process_group = require_group(group)
    function = _function(_FUNCTIONS[operator]) if group.device_type == "cuda" else None
    if function is None:
        raise DeviceError(
            f"there is no fused {operator} of torch's for {group.device}", hint="take the candidate 'plain'"
        )
    name = process_group.group_name
    handles = _handles(group)
    if max(handles, default=-1) < size_bytes:
        if group.is_capturing():
            raise DeviceError(
                f"'fused' has to share {size_bytes} bytes first, which cannot be captured",
                hint="call it once with such a shape in front of the capture",
            )
        handles[size_bytes] = _share(name, size_bytes)
    return name, function


def _handles(group: PeerGroup) -> dict[int, Any]:
    """By the size that was asked for."""
    return group.belongings.setdefault(_KEPT_AS, {})  # type: ignore[no-any-return]


def _share(name: Any, size_bytes: int) -> Any:
    """A handle that keeps torch's shared memory of at least this size. Collective."""
    from torch.distributed import _symmetric_memory as symmetric

    with warnings.catch_warnings():  # later torches need no such call, and warn of it
        warnings.simplefilter("ignore", FutureWarning)
        symmetric.enable_symm_mem_for_group(name)
    return symmetric.get_symm_mem_workspace(name, min_size=size_bytes)


def _deliver(job: Job, result: torch.Tensor) -> None:
    """Makes it the output: without a copy, if the output is a new one."""
    if job.is_new_out and result.is_contiguous() and result.dtype == job.out.dtype:
        job.out.set_(result)  # type: ignore[call-overload]
    else:
        job.out.copy_(result)
