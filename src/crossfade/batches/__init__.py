"""Interleaving two batches of an unmodified module: one's communication runs behind the other's computation.

`interleave` wraps a module, `interleaved` a training step, and `yield_point` marks a place at which the other batch may run:
`entry`. From there down: `handle` and `steps` are what the user holds; `tuner` runs each way, `calibration` and `report` decide
and tell; `parts` runs the batches as coroutines, which `interception` makes stop at collectives; `carriers` moves their bytes, by
process groups or by what `equivalents` finds in `crossfade.peers`; `captured_ways` and `captured` make CUDA graphs, of a module
that `held` looks after; `thread_state` keeps apart what torch keeps per thread;
`obstacles`, `ddp`, `fsdp`, `agreement` and `following` are for what must not be interleaved, or not silently.

Importing this room imports neither torch nor greenlet: the names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfade.batches.entry import interleave, interleaved, yield_point
    from crossfade.batches.handle import Interleaved
    from crossfade.batches.report import BatchesReport
    from crossfade.batches.steps import InterleavedSteps
    from crossfade.batches.tensors import Call

__all__ = ["BatchesReport", "Call", "Interleaved", "InterleavedSteps", "interleave", "interleaved", "yield_point"]

_FILES = {
    "entry": "interleave interleaved yield_point",
    "handle": "Interleaved",
    "report": "BatchesReport",
    "steps": "InterleavedSteps",
    "tensors": "Call",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module 'crossfade.batches' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"crossfade.batches.{_FILE_OF[name]}"), name)
    return value
