"""Getting results: one, or several, of which the first error is raised as soon as it is there."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from crossfade.api.accepted import deadline_of, limit_of
from crossfade.api.refs import CompiledRef, Ref
from crossfade.api.session import current
from crossfade.api.wait import wait_for

if TYPE_CHECKING:
    from crossfade.api.executions import Executions

__all__ = ["get"]


def get(refs: Any, *, timeout: float | None = None) -> Any:
    """The value of a reference, or the list of values of a list of references (nested lists keep their shape).

    Of several, the first that turns out to be an error is raised at once, whatever the others still do; all may be got again.

    Args:
        refs: what ``execute`` or ``method.remote`` returned, or a list of such.
        timeout: the longest wait in seconds, for all of them together; None, or -1 as in Ray, is for ever.

    Raises:
        GetTimeoutError, TaskError, ActorDiedError: see `Ref.get`.
        TypeError: something else was passed.
        ValueError: ``timeout`` is below 0 and not -1.
    """
    deadline = deadline_of(limit_of(timeout))
    if not isinstance(refs, Ref):
        flat = list(_flat(refs))
        if len(flat) > 1:
            _await(flat, deadline, timeout)
    return _shaped(refs, deadline, timeout)


def _flat(refs: Any) -> Iterator[Ref]:
    if isinstance(refs, Ref):
        yield refs
    elif isinstance(refs, Sequence) and not isinstance(refs, str | bytes):
        for ref in refs:
            yield from _flat(ref)
    else:
        raise TypeError(
            f"cannot get {refs!r}\nhint: pass a reference that execute() or .remote() returned, or a list of them"
        )


def _shaped(refs: Any, deadline: float | None, timeout: float | None) -> Any:
    if not isinstance(refs, Ref):
        return [_shaped(ref, deadline, timeout) for ref in refs]
    return refs.get() if deadline is None else refs.get_within(_left_s(deadline), timeout)


def _left_s(deadline: float) -> float:
    return max(0.0, deadline - time.monotonic())


def _await(refs: Sequence[Ref], deadline: float | None, timeout: float | None) -> None:
    """Waits until all are ready. Raises the first error that there is, though others are not ready."""
    compiled = [ref for ref in refs if isinstance(ref, CompiledRef)]
    graphs = {ref._executions for ref in compiled}
    if len(compiled) == len(refs) and len(graphs) == 1:
        failure = _OfOneGraph(graphs.pop(), compiled)
        for ref in compiled:
            if not ref.await_within(None if deadline is None else _left_s(deadline), timeout, failure.is_there):
                break
        failure.raise_if_there()
        return
    session = current()
    if session is None or any(ref.session not in (None, session) for ref in refs):
        return  # getting them one after another says what is wrong
    mixed = _OfSeveral(refs)
    wait_for(refs, mixed.is_enough, None if deadline is None else _left_s(deadline))
    mixed.raise_if_there()


class _OfOneGraph:
    """Whether one of several results of a graph is an error. They are looked at when another error has come, and only then."""

    def __init__(self, executions: Executions, refs: Sequence[CompiledRef]) -> None:
        self._executions = executions
        self._refs = refs
        self._num_failures = -1
        self._failed: CompiledRef | None = None

    def is_there(self) -> bool:
        """Whether there is one now."""
        if self._num_failures != self._executions.num_failures:
            self._num_failures = self._executions.num_failures
            self._failed = next((ref for ref in self._refs if ref.has_failed()), None)
        return self._failed is not None

    def raise_if_there(self) -> None:
        """Raises it."""
        if self.is_there() and self._failed is not None:
            self._failed.get()


class _OfSeveral:
    """Looks at results of any kind until all are ready, or one of those that are ready is an error."""

    def __init__(self, refs: Sequence[Ref]) -> None:
        self._pending = list(refs)
        self._failed: Ref | None = None

    def is_enough(self) -> bool:
        """Looks at those that were not ready before."""
        looks = [(ref, ref.is_ready()) for ref in self._pending]
        ready = [ref for ref, is_ready in looks if is_ready]
        self._pending = [ref for ref, is_ready in looks if not is_ready]
        self._failed = self._failed or next((ref for ref in ready if ref.has_failed()), None)
        return self._failed is not None or not self._pending

    def raise_if_there(self) -> None:
        """Raises the error."""
        if self._failed is not None:
            self._failed.get()
