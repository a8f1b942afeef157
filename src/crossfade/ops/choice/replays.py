"""Calls that come again with the same tensors are captured once and replayed (`crossfade.peers.replays`).

What a call by rounds enqueues costs the host more than many a product takes. Addresses, shapes, the candidate and torch's settings
for products are the whole of what a graph knows. Work of the caller's that a call takes along (``Job.fill``) is not captured; it
follows. A captured call fills the output that it is given (``Job.is_new_out``): what a caller keeps may not lie in a graph's
memory. A call that is captured by its caller stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.algorithms import fused
from crossfade.ops.calls.job import Job, Once
from crossfade.ops.choice.candidate import Candidate
from crossfade.peers.replays import Replays

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

_REPLAYED = ("rounds", "fused")
"""Not those that call NCCL: when a rank has died, torch ends what it enqueued itself, and not what a graph replays."""


def enqueue(candidate: Candidate, run: Callable[[Job], None], job: Job) -> None:
    """Does a call, by a replay where it can."""
    group = job.group
    if (
        group.device_type != "cuda"
        or candidate.name not in _REPLAYED
        or not group.lane(job.lane).is_replayable
        or group.is_capturing()
    ):
        run(job)
        return
    name = _name(job.lane)
    replays: Replays | None = group.belongings.get(name)
    if replays is None:
        replays = group.belongings[name] = Replays(group, job.lane)

    def captured() -> None:
        run(replace(job, fill=Once(None), is_new_out=False))

    tensors = [each for each in (job.a, job.b, job.bias, job.out, job.gathered) if each is not None]
    addresses = [each.data_ptr() for each in tensors]
    replays.run((candidate, *_key(candidate, job)), addresses, partial(run, job), captured)


def is_replayed(group: PeerGroup) -> bool:
    """Whether calls of a group that come again are replayed."""
    return group.device_type == "cuda" and group.lane().is_replayable


def forget(group: PeerGroup, lane: int = 0) -> None:
    """Gives the graphs of a lane back, and their memory. Calls that come again are captured again."""
    replays: Replays | None = group.belongings.get(_name(lane))
    if replays is not None:
        replays.forget()


def _name(lane: int) -> str:
    return f"crossfade.ops.choice.replays of lane {lane}"


def _key(candidate: Candidate, job: Job) -> tuple[object, ...]:
    """Equal ones mean equal graphs."""
    # What torch's fused operators share with the other ranks changes when it grows, for all of them at once.
    shared = fused.shared_bytes(job.group) if candidate.name == "fused" else 0
    places = map(_place, (job.a, job.b, job.bias, job.out, job.gathered))
    return (job.name, job.counts, job.has_bias, shared, *_settings(job.a.dtype), *places)


def _place(tensor: torch.Tensor | None) -> tuple[object, ...] | None:
    return None if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)


def _settings(dtype: torch.dtype) -> tuple[object, ...]:
    """What torch lets a program change of products of a type, at any time."""
    torch = torch_or_raise()
    cuda = torch.backends.cuda
    library = cuda.preferred_blas_library()
    if dtype == torch.bfloat16:
        return library, cuda.matmul.allow_bf16_reduced_precision_reduction
    if dtype == torch.float16:
        return library, cuda.matmul.allow_fp16_reduced_precision_reduction, cuda.matmul.allow_fp16_accumulation
    return library, cuda.matmul.fp32_precision
