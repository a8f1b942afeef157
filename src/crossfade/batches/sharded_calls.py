"""Finds modules in FSDP that functions call, which cannot be asked before: their batches must not take turns.

``__call__`` of FSDP's classes is replaced while a step runs. (A hook for all modules would make
torch.compile compile each of them again.)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from crossfade.batches.parts import current_part
from crossfade.errors import BatchesError

_lock = threading.Lock()
_num_users = 0
_of_thread = threading.local()  # found: why, in the step that the thread runs


@contextmanager
def sharded_calls() -> Iterator[list[str]]:
    """Gives why the calls inside must not take turns: one entry, or none.

    Raises:
        BatchesError: inside a part, which takes turns already.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = [] if fsdp is None else [fsdp.FSDPModule, fsdp.FullyShardedDataParallel]
    before, _of_thread.found = getattr(_of_thread, "found", None), list[str]()
    _use(kinds, 1)
    try:
        yield _of_thread.found
    finally:
        _use(kinds, -1)
        _of_thread.found = before


def _use(kinds: list[Any], change: int) -> None:
    global _num_users
    with _lock:
        if kinds and _num_users == (change < 0):
            for kind in kinds:
                if change > 0:
                    kind.__call__ = _call
                else:
                    del kind.__call__
        _num_users += change if kinds else 0


def _call(module: Any, *args: Any, **kwargs: Any) -> Any:
    found = getattr(_of_thread, "found", None)
    if found is not None:
        why = f"{type(module).__name__} is sharded by FSDP, which frees a layer's parameters when the first batch leaves it"
        if current_part() is not None:
            raise BatchesError(why, hint='interleave(module) shares those of FSDP2; or interleaved(way="one batch")')
        found[:] = [why]
    return nn.Module.__call__(module, *args, **kwargs)
