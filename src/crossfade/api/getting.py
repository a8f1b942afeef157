"""Gets results: one, or several, of which the first error is raised as soon as it arrives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, TypeGuard

from crossfade.api.accepted import deadline_of, left_of, limit_of
from crossfade.api.refs import CompiledRef, Ref
from crossfade.api.session import current
from crossfade.api.wait import wait_for
from crossfade.engines.protocol import EMPTY
from crossfade.errors import Failure
from crossfade.interrupted import uninterrupted

_COMPILED: Final = {CompiledRef}


def get(refs: Any, *, timeout: float | None = None) -> Any:
    """Returns the value of a reference, or the list of values of a list of references (nested lists keep their shape).

    Of several, the first that turns out to be an error is raised at once, without waiting for the others; all may be got again.

    Args:
        refs: what ``execute`` or ``method.remote`` returned, or a list of such.
        timeout: the longest wait in seconds, for all of them together; None, or -1 as in Ray, is for ever.

    Raises:
        GetTimeoutError, TaskError, ActorDiedError: see `Ref.get`.
        TypeError: something else was passed.
        ValueError: ``timeout`` is below 0 and not -1.
    """
    if isinstance(refs, Ref):
        return refs.get(timeout)
    deadline = None if timeout is None else deadline_of(limit_of(timeout))
    if type(refs) is list and _are_of_one_graph(refs):
        return _get_of_one_graph(refs, deadline, timeout)
    flat = list(_flat(refs))
    if _are_of_one_graph(flat):
        _get_of_one_graph(flat, deadline, timeout)
    elif len(flat) > 1:
        _await(flat, deadline)
    return _shaped(refs, deadline, timeout)


def _flat(refs: Any) -> Iterator[Ref]:
    if isinstance(refs, Ref):
        yield refs
    elif isinstance(refs, Sequence) and not isinstance(refs, str | bytes):
        for ref in refs:
            yield from _flat(ref)
    else:
        is_rays = any(str(kind.__module__).partition(".")[0] == "ray" for kind in type(refs).__mro__)
        takes = "pass a reference that execute() or .remote() returned, or a list of them"
        hint = (
            "ray.get(...) takes it: references of Ray's, and of graphs of Ray's actors, are Ray's" if is_rays else takes
        )
        raise TypeError(f"cannot get {refs!r}\nhint: {hint}")


def _shaped(refs: Any, deadline: float | None, timeout: float | None) -> Any:
    if not isinstance(refs, Ref):
        return [_shaped(ref, deadline, timeout) for ref in refs]
    return refs.get_within(left_of(deadline), timeout)


def _are_of_one_graph(refs: Sequence[Any]) -> TypeGuard[Sequence[CompiledRef]]:
    """Whether all references are results of the same compiled graph: the usual case, and the fast one."""
    return set(map(type, refs)) == _COMPILED and len({ref._executions for ref in refs}) == 1


@uninterrupted
def _get_of_one_graph(refs: Sequence[CompiledRef], deadline: float | None, timeout: float | None) -> list[Any]:
    """Returns the values, in order. While waiting for one, checks the others only after an error has been taken in."""
    executions = refs[0]._executions
    num_looked_at = 0
    failed: CompiledRef | None = None

    def has_failed() -> bool:
        nonlocal num_looked_at, failed
        if failed is None and executions.num_failures != num_looked_at:
            num_looked_at = executions.num_failures
            failed = next((ref for ref in refs if type(ref._execution.values[ref._index]) is Failure), None)
        return failed is not None

    values, looks_first = [], True
    for ref in refs:
        value = ref._execution.values[ref._index]
        if value is EMPTY:
            left_s = left_of(deadline)
            value = executions.collect(ref._execution, ref._index, left_s, timeout, has_failed, looks_first)
            looks_first = False
        if value is EMPTY or type(value) is Failure:  # the thread that took it in may not have counted it yet
            (failed if has_failed() and failed is not None else ref).get()
        ref._keeper = None
        values.append(value)
    return values


@uninterrupted
def _await(refs: Sequence[Ref], deadline: float | None) -> None:
    """Waits until all references are ready, or one of them is an error, which is raised."""
    session = current()
    if session is None or any(ref.session not in (None, session) for ref in refs):
        return  # getting them one after another raises the right error
    pending, failed = list(refs), list[Ref]()

    def is_enough() -> bool:
        looks = [(ref, ref.is_ready()) for ref in pending]
        pending[:] = [ref for ref, is_ready in looks if not is_ready]
        failed.extend(ref for ref, is_ready in looks if is_ready and ref.has_failed())
        return bool(failed) or not pending

    wait_for(refs, is_enough, left_of(deadline))
    if failed:
        failed[0].get()
