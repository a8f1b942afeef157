"""Finds modules in FSDP that functions call, which cannot be asked before: their batches must not take turns.

What such a module calls first is replaced while a step runs: FSDP1's ``forward``, and ``pre_forward`` of a group of parameters of
FSDP2, which run eagerly in compiled modules too. (A hook for all modules would make torch.compile compile each of them again.)
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, NamedTuple

from crossfade.batches.coroutines.parts import current_part
from crossfade.errors import BatchesError

_lock = threading.Lock()
_num_users = 0
_replaced: list[tuple[Any, str, Callable[..., Any]]] = []
_of_thread = threading.local()  # step: the one that the thread runs, if any


class _Step(NamedTuple):
    takes_turns: bool
    found: list[str]


@contextmanager
def sharded_calls(*, takes_turns: bool) -> Iterator[list[str]]:
    """Gives why the calls inside must not take turns: one entry, or none. ``takes_turns``: they do.

    Raises:
        BatchesError: and they must not.
    """
    outer, _of_thread.step = getattr(_of_thread, "step", None), _Step(takes_turns, [])
    _use(1)
    try:
        yield _of_thread.step.found
    finally:
        _use(-1)
        _of_thread.step = outer


def look(module: object) -> None:
    """A module in FSDP is called, by the thread's step or by none."""
    step: _Step | None = getattr(_of_thread, "step", None)
    if step is None or (not step.takes_turns and current_part() is not None):  # a handle's own parts
        return
    why = f"{type(module).__name__} is sharded by FSDP, which frees a layer's parameters when the first batch leaves it"
    if step.takes_turns:
        raise BatchesError(why, hint='interleave(module) shares those of FSDP2; or interleaved(way="one batch")')
    step.found[:] = [why]


def _use(change: int) -> None:
    global _num_users
    with _lock:
        if change > 0 and not _num_users:
            _replace("torch.distributed.fsdp", "FullyShardedDataParallel", "forward", 0)
            _replace("torch.distributed.fsdp._fully_shard._fsdp_param_group", "FSDPParamGroup", "pre_forward", 1)
        _num_users += change
        if not _num_users:
            while _replaced:
                kind, name, original = _replaced.pop()
                setattr(kind, name, original)


def _replace(place: str, kind_name: str, name: str, position: int) -> None:
    """``position``: of the module among the arguments. What nobody has imported, nobody uses."""
    kind: Any = getattr(sys.modules.get(place), kind_name, None)
    if kind is None:
        return
    original = vars(kind)[name]

    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        look(args[position])
        return original(*args, **kwargs)

    setattr(kind, name, call)
    _replaced.append((kind, name, original))
