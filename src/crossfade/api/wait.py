"""Waiting for some of many references."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from crossfade.api.accepted import check_timeout, seconds_of
from crossfade.api.refs import CompiledRef, Ref
from crossfade.api.session import current
from crossfade.interrupted import uninterrupted


@uninterrupted
def wait(
    refs: Sequence[Ref], *, num_returns: int = 1, timeout: float | None = None, fetch_local: bool = True
) -> tuple[list[Ref], list[Ref]]:
    """Waits until ``num_returns`` of the references are ready: their value is there, or the error that ``get`` would raise.

    Results are not consumed: all references may be got afterwards, ready or not.

    Args:
        refs: references of any kind, each once.
        num_returns: how many.
        timeout: the longest wait in seconds; None for ever.
        fetch_local: accepted for Ray's sake.

    Returns:
        As many references as are wanted that are ready, fewer if the time passed; and all others. Both in the order of ``refs``.

    Raises:
        TypeError: not a list of references, or a ``timeout`` that is no number.
        ValueError: a reference appears twice, or ``num_returns`` or ``timeout`` is out of range.
    """
    all_refs, ready = _checked(refs, num_returns, timeout), set[int]()  # positions

    def is_enough() -> bool:
        for position, ref in enumerate(all_refs):
            if len(ready) == num_returns:
                break
            if position not in ready and ref.is_ready():
                ready.add(position)
        return len(ready) == num_returns

    wait_for(all_refs, is_enough, seconds_of(timeout))
    positions = range(len(all_refs))
    return [all_refs[k] for k in positions if k in ready], [all_refs[k] for k in positions if k not in ready]


def wait_for(refs: Sequence[Ref], is_enough: Callable[[], bool], timeout_s: float | None) -> None:
    """Waits until ``is_enough()``, which checks the references, is true or the time limit passes. Never waits without a session."""
    session = current()
    if not is_enough() and session is not None:
        with ExitStack() as watching:
            for executions in {ref._executions for ref in refs if isinstance(ref, CompiledRef)}:
                watching.enter_context(executions.watchers.watched())
            session.engine.wait_until(is_enough, timeout_s)


def _checked(refs: object, num_returns: int, timeout: float | None) -> list[Ref]:
    if not isinstance(refs, Sequence) or not all(isinstance(ref, Ref) for ref in refs):
        raise TypeError(f"wait takes a list of references, not {refs!r}\nhint: write wait([ref]) for one")
    if len(set(refs)) < len(refs):
        raise ValueError("a reference is in the list twice\nhint: wait for each one once")
    if not 1 <= num_returns <= len(refs):
        raise ValueError(
            f"num_returns is {num_returns} and there are {len(refs)} references\nhint: from 1 to as many as there are"
        )
    check_timeout(timeout)
    return list(refs)
