"""A matrix product and its collective as one operator, which hides the collective behind the product where it can.

::

    ahead       what later calls need, done before they come
    tuning      measuring which algorithm is best
    layers/     linear layers split over the ranks, models made of them
    operators   the public operators, with their schedules drawn, and OPERATORS, the table of them
    references  the same by torch alone
    gradients/  what each operator saves and goes back by; the node in torch's graph; what torch.compile sees
    forward     from operands to the algorithm that fills the output
    choice/     which algorithm that is: candidates, model, tuner, cache; replays of calls that come again
    algorithms/ plain, fused, rounds (by copy engines); the order of products and exchanges, on addresses
    signaled/   the product that signals its tiles, and `matmul_signaled`
    calls/      a call's shape and job, what it may be given

A file imports files of its own line and of lines below (`tests/unit/test_floors.py`). Importing this room imports neither torch
nor triton: the names that it has itself are imported when they are first used. docs/decisions/0013-tile-operators.md says why it
is so, docs/tuning.md shows the choice from outside.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfade.ops.ahead import prepare, prepare_call
    from crossfade.ops.calls.counts import gather_counts
    from crossfade.ops.calls.job import Shape
    from crossfade.ops.choice.candidate import Candidate
    from crossfade.ops.gradients.backward import reserve_scratch
    from crossfade.ops.layers import regions
    from crossfade.ops.layers.linear import ColumnParallelLinear, RowParallelLinear
    from crossfade.ops.layers.parallel import parallelize
    from crossfade.ops.layers.plans import ColwiseParallel, RowwiseParallel, SequenceParallel
    from crossfade.ops.operators import (
        all_gather_matmul,
        matmul_all_reduce,
        matmul_all_to_all,
        matmul_all_to_all_padded,
        matmul_reduce_scatter,
        replicated_matmul,
    )
    from crossfade.ops.signaled.product import matmul_signaled, prepare_signaled
    from crossfade.ops.tuning import tuner_of

__all__ = [
    "Candidate",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "Shape",
    "all_gather_matmul",
    "gather_counts",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_all_to_all_padded",
    "matmul_reduce_scatter",
    "matmul_signaled",
    "parallelize",
    "prepare",
    "prepare_call",
    "prepare_signaled",
    "regions",
    "replicated_matmul",
    "reserve_scratch",
    "tuner_of",
]

_FILES = {
    "ahead": "prepare prepare_call",
    "calls.counts": "gather_counts",
    "calls.job": "Shape",
    "choice.candidate": "Candidate",
    "gradients.backward": "reserve_scratch",
    "layers.linear": "ColumnParallelLinear RowParallelLinear",
    "layers.parallel": "parallelize",
    "layers.plans": "ColwiseParallel RowwiseParallel SequenceParallel",
    "operators": "all_gather_matmul matmul_all_reduce matmul_all_to_all matmul_all_to_all_padded matmul_reduce_scatter "
    "replicated_matmul",
    "signaled.product": "matmul_signaled prepare_signaled",
    "tuning": "tuner_of",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name == "regions":
        return import_module("crossfade.ops.layers.regions")
    if name not in _FILE_OF:
        raise AttributeError(f"module 'crossfade.ops' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"crossfade.ops.{_FILE_OF[name]}"), name)
    return value
