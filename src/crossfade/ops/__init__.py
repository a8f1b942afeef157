"""A matrix product and its collective as one operator, which hides the collective behind the product where it can.

One file for each operator, with its plain reference beside it: `matmul_reduce_scatter`, `matmul_all_reduce`, `all_gather_matmul`,
`matmul_all_to_all`. They stand on a `crossfade.peers.group.PeerGroup`, on GPUs or on CPU tensors.

The way from there down: `arguments` checks what was given and makes a `job.Job` of it; a `candidate.Candidate` says which way it
is done. The ways are small files: `plain` (the product, then torch.distributed), `rounds` (copy
engines), which stands on `overlaps`, the order of products and exchanges.

Which way is taken (`choice`): `model` predicts how long each takes, from `figures` that were measured once; `tune` measures the
best few and decides, alike on all ranks; `cache` keeps what was decided; `tuners` makes the tuner that a group's operators ask.
docs/tuning.md shows it from outside.

Kernels of Triton: `tiles` cuts a product into tiles, pieces and counters; `kernels` compute and signal, `epilogue` is how they
finish a tile, `loading` makes them ready ahead, `launch` prepares a product for a shape and launches it in a few microseconds, with
`counters` to wait for. All but `tiles`, `operands` and `counters` need triton.

Gradients: `gradients` asks whether a call has one, `backward` says what each operator saves and goes back by, `autograd` is the
node in torch's graph, `scratch` is for what they gather. `linear` has layers whose weight is split over the ranks, `regions` the
edges of what is split, and `parallelize` puts the layers into a model, by a plan of `plans`.

Ahead of calls: `ahead` prepares them, by what `preparing` has for their way. Under torch.compile (`tracing`) each operator is one
of torch's, which `compiled` defines. `matmul_signaled` is the product alone, with callbacks for communication of the user's own:
`signaling` by the kernels, `sides` has the streams.

Importing this room imports neither torch nor triton: the names that it has itself are imported when they are first used.
docs/decisions/0013-tile-operators.md says why it is so.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfade.ops.ahead import prepare, prepare_call
    from crossfade.ops.all_gather import all_gather_matmul
    from crossfade.ops.all_reduce import matmul_all_reduce
    from crossfade.ops.all_to_all import matmul_all_to_all
    from crossfade.ops.candidate import Candidate
    from crossfade.ops.linear import ColumnParallelLinear, RowParallelLinear
    from crossfade.ops.parallel import parallelize
    from crossfade.ops.plans import ColwiseParallel, RowwiseParallel, SequenceParallel
    from crossfade.ops.reduce_scatter import matmul_reduce_scatter
    from crossfade.ops.signaled import matmul_signaled

__all__ = [
    "Candidate",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "all_gather_matmul",
    "matmul_all_reduce",
    "matmul_all_to_all",
    "matmul_reduce_scatter",
    "matmul_signaled",
    "parallelize",
    "prepare",
    "prepare_call",
]

_FILES = {
    "ahead": "prepare prepare_call",
    "all_gather": "all_gather_matmul",
    "all_reduce": "matmul_all_reduce",
    "all_to_all": "matmul_all_to_all",
    "all_to_all_first": "all_to_all_matmul",
    "candidate": "Candidate",
    "linear": "ColumnParallelLinear RowParallelLinear",
    "parallel": "parallelize",
    "plans": "ColwiseParallel RowwiseParallel SequenceParallel",
    "reduce_scatter": "matmul_reduce_scatter",
    "replicated": "replicated_matmul",
    "signaled": "matmul_signaled",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module 'crossfade.ops' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"crossfade.ops.{_FILE_OF[name]}"), name)
    return value
