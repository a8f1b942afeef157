"""References to results."""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator
from typing import Any

from crossfade.api.accepted import limit_of
from crossfade.api.execution import Execution
from crossfade.api.executions import Executions
from crossfade.api.session import Session
from crossfade.engines.protocol import EMPTY, PendingCall
from crossfade.engines.stored import Stored
from crossfade.errors import Failure, GetTimeoutError, SessionError
from crossfade.interrupted import Held, brief, raise_held, uninterrupted, whole


class Ref:
    """A result that may not be there yet."""

    __slots__ = ("__weakref__",)

    @property
    def session(self) -> Session | None:
        """Whose result it is; None if it does not depend on one."""
        return None

    @property
    def _compiled(self) -> tuple[Executions, Execution, int] | None:
        """For a result of a compiled graph: its executions, the execution, and the position of the output. Else None."""
        return None

    def get(self, timeout: float | None = None) -> Any:
        """The value. May be called again, after a time-out too.

        Args:
            timeout: the longest wait in seconds; None, or -1 as in Ray, waits until the value is there or an actor of its graph has
                died.

        Raises:
            GetTimeoutError: it was not there in time; nothing is lost.
            TaskError: a method raised; also an instance of that error's own type.
            ActorDiedError: an actor of its graph is gone, and the value has not come.
            ActorError: one that lives cannot go on with the graph.
            TypeError, ValueError: ``timeout`` is no number, or below 0 and not -1.
        """
        return self.get_within(limit_of(timeout), timeout)

    def get_within(self, left_s: float | None, timeout: float | None) -> Any:
        """`get`, where ``left_s`` seconds are left of a time limit that several have together; None if there is none."""
        raise NotImplementedError

    def is_ready(self) -> bool:
        """Whether `get` would return, or raise, without waiting."""
        raise NotImplementedError

    def has_failed(self) -> bool:
        """Whether `get` would raise an error; for a reference that is ready."""
        return False

    def __await__(self) -> Generator[Any, Any, Any]:
        """For event loops: waits without blocking the loop, then gives or raises what `get` would. May be awaited again."""
        if not self.is_ready():
            from crossfade.api.asynchronous import arrival

            yield from arrival(self)
        return self.get()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{self!r} cannot be sent inside another value\nhint: make it an argument by itself, which passes its value on, or get "
            "the value first"
        )


class CallRef(Ref):
    """The result of an ordinary call."""

    __slots__ = ("_index", "_label", "_pending", "_session")

    def __init__(self, session: Session, pending: PendingCall, label: str, index: int | None) -> None:
        self._session = session
        self._pending = pending
        self._label = label
        self._index = index

    def get_within(self, left_s: float | None, timeout: float | None) -> Any:
        if self._session.pid != os.getpid():
            raise SessionError(f"{self._label} was called in the process that this one was forked from")
        if not self._pending.wait(left_s):
            raise GetTimeoutError(
                f"{self._label} has not returned within {timeout} s", hint="get the same reference again"
            )
        value = self._pending.result()
        if type(value) is Failure:
            raise value.to_error()
        return value if self._index is None else value[self._index]

    @property
    def session(self) -> Session | None:
        return self._session

    def is_ready(self) -> bool:
        return self._pending.is_done()

    def has_failed(self) -> bool:
        try:
            return type(self._pending.result()) is Failure
        except Exception:  # its actor has died
            return True

    def __repr__(self) -> str:
        return f"CallRef({self._label})"


class StoredRef(Ref):
    """A value that was put aside. It is there at once, and each `get` gives a new one."""

    __slots__ = ("_stored",)

    def __init__(self, stored: Stored) -> None:
        self._stored = stored

    def get_within(self, left_s: float | None, timeout: float | None) -> Any:
        return self._stored.load()

    def is_ready(self) -> bool:
        return True

    def __repr__(self) -> str:
        return "StoredRef()"


class Keeper:
    """Keeps a plan open: the graph and all references without a value hold it, and the plan is closed once all have dropped it."""

    __slots__ = ("__weakref__", "executions")

    def __init__(self, executions: Executions) -> None:
        self.executions = executions

    @brief
    def __del__(self) -> None:
        # The garbage collector may call this at any point, so it only takes a note.
        executions = getattr(self, "executions", None)  # a handler may have raised before `__init__` ran
        if executions is not None and not executions.ended:
            executions.end("the graph was dropped")
            executions.session.orphans.append(executions.opened)


class CompiledRef(Ref):
    """One output of one execution of a compiled graph.

    It may be dropped at any time without waiting; the execution continues and its result is thrown away. The graph may be dropped
    before it: the result comes all the same.
    """

    __slots__ = ("_execution", "_executions", "_index", "_keeper")

    def __init__(self, executions: Executions, execution: Execution, index: int, keeper: Keeper) -> None:
        self._executions = executions
        self._execution = execution
        self._index = index
        self._keeper: Keeper | None = keeper  # until the values are there
        execution.owners.append(weakref.ref(self))

    @property
    def session(self) -> Session | None:
        return self._executions.session

    @property
    def _compiled(self) -> tuple[Executions, Execution, int] | None:
        return self._executions, self._execution, self._index

    @whole
    def get(self, timeout: float | None = None) -> Any:
        """References may be got in any order, by any thread."""
        try:
            if timeout is not None:
                timeout = limit_of(timeout)
            value = self._execution.values[self._index]
            if value is EMPTY:
                value = self._executions.collect(self._execution, self._index, timeout)
            self._keeper = None
            if type(value) is Failure:
                raise value.to_error()
            return value
        finally:
            if Held.is_pending:
                raise_held()

    def get_within(self, left_s: float | None, timeout: float | None) -> Any:
        if not self._execution.has(self._index):
            self._collect(left_s, timeout)
        return self.get()

    @uninterrupted
    def _collect(self, left_s: float | None, timeout: float | None) -> None:
        self._executions.collect(self._execution, self._index, left_s, timeout)

    def has_failed(self) -> bool:
        """A reference that is ready but has no value will never get one."""
        value = self._execution.values[self._index]
        return type(value) is Failure or value is EMPTY

    @property
    def was_got(self) -> bool:
        """Whether `get` has returned the value or raised the error."""
        return self._keeper is None

    @whole
    def is_ready(self) -> bool:
        try:
            return self._execution.has(self._index) or self._executions.is_over(self._execution, self._index)
        finally:
            if Held.is_pending:
                raise_held()

    def __repr__(self) -> str:
        return f"CompiledRef(execution {self._execution.number}, output {self._index})"


def put(value: Any) -> Ref:
    """Puts a value aside: it is serialised once, now, and each ``get`` of the reference gives a value of its own.

    Numpy arrays come back as read-only views on what was put aside. The reference may be an argument of ``remote``, ``bind`` and
    ``execute``.

    Raises:
        TypeError: it is a reference.
        Exception: what pickling the value raised.
    """
    if isinstance(value, Ref):
        raise TypeError(f"{value!r} is a reference already\nhint: pass it on as it is")
    return StoredRef(Stored(value))


def resolve(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with references (at the top level, as in Ray) replaced by their values; waits for them."""
    return (
        tuple([item.get() if isinstance(item, Ref) else item for item in args]),
        {key: item.get() if isinstance(item, Ref) else item for key, item in kwargs.items()},
    )
