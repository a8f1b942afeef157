"""Interleaving two batches of an unmodified module: one's communication runs behind the other's computation.

::

    entry        `interleave` wraps a module, `interleaved` a training step, `yield_point` marks where another batch may run
    handle       a module whose calls are run in the fastest way
    steps        whole training steps likewise
    runner       what their calls share: streams, carriers, and the agreement of the ranks
    capture/     calls as CUDA graphs
    choice/      trying each way, choosing one with all ranks, watching that choice, and saying why
    wrappers/    modules in DDP, FSDP1 or FSDP2, and others whose batch must not be split
    coroutines/  batches that take turns on one thread, and stop at collectives
    ranks/       what ranks tell each other through the store: what they issue, and answers to questions
    carriers/    how collectives are started: by process groups, or by copy engines
    tensors      splitting a batch, joining outputs, and what makes two calls one kind

A file imports files of its own line and of lines below (`tests/unit/test_floors.py`).
Importing this room imports neither torch nor greenlet: the names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from crossfade.batches.choice.report import BatchesReport
    from crossfade.batches.entry import interleave, interleaved, yield_point
    from crossfade.batches.handle import Interleaved
    from crossfade.batches.steps import InterleavedSteps
    from crossfade.batches.tensors import Call

__all__ = ["BatchesReport", "Call", "Interleaved", "InterleavedSteps", "interleave", "interleaved", "yield_point"]

_FILES = {
    "entry": "interleave interleaved yield_point",
    "choice.report": "BatchesReport",
    "handle": "Interleaved",
    "steps": "InterleavedSteps",
    "tensors": "Call",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _FILE_OF:
        raise AttributeError(f"module 'crossfade.batches' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"crossfade.batches.{_FILE_OF[name]}"), name)
    return value
