"""Waiting for results in an event loop, without a thread and without polling.

Each loop that waits has one `LoopWatch`. It hangs the process's doorbell among the loop's own descriptors, and when it is rung
takes in what has come, for all graphs of the session, and tells the tasks that waited. While nobody waits it is not rung.

A pass through an event loop takes longer than a short execution. So a task that awaits a result first looks for it for some
microseconds, as a blocking ``get`` does, but only where the graph's last results came that soon, and only if it has
not kept the loop from its turn for a millisecond.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from crossfade.api.execution import Execution
from crossfade.api.executions import Executions
from crossfade.api.session import Session
from crossfade.engines.protocol import EMPTY, LoopBell
from crossfade.interrupted import brief, uninterrupted

_NUM_LOOKS = 25
"""Looks at a quick graph before the loop continues; each takes about a microsecond."""

_NUM_BLIND = 16
"""Of so many results of a slow graph one is looked for, to find out whether it has become quick."""

_TURN_NS = 1_000_000
"""The loop has a turn at least this often, however many executions are awaited one after another."""


class Awaited(Protocol):
    """A reference, which a task awaits."""

    @property
    def session(self) -> Session | None:
        """Whose result it is; None if it does not depend on a session."""

    @property
    def _compiled(self) -> tuple[Executions, Execution, int] | None: ...

    def is_ready(self) -> bool:
        """Whether the result is there."""


def arrival(ref: Awaited) -> Generator[Any, Any, None]:
    """Waits until the reference is ready; for ``yield from`` in an ``__await__``."""
    watch = None if ref.session is None else _watch(ref.session)
    if watch is None:  # nothing runs by itself: `get` runs it, after others have had their turn
        yield
        return
    if ref._compiled is not None and watch.may_look(executions := ref._compiled[0]):
        is_ready, yield_core = ref.is_ready, os.sched_yield
        for _ in range(_NUM_LOOKS):
            yield_core()
            if is_ready():
                executions.is_quick = True
                return
        executions.is_quick = False
    while not ref.is_ready():
        yield from watch.next_look(ref)


async def submit(executions: Executions, execution: Execution, values: Sequence[Any]) -> None:
    """Starts an execution, after those that wait for room in this loop already."""
    watch = _watch(executions.session)
    if watch is None:
        await _submit_here(executions, execution, values)
        return
    if watch.is_late():
        await asyncio.sleep(0)
    if watch.has_queue(executions) or not executions.try_submit(execution, values):
        await watch.queue(executions, execution, values)


async def _submit_here(executions: Executions, execution: Execution, values: Sequence[Any]) -> None:
    """On an engine that does nothing by itself: the oldest results are worked out to make room."""
    while not executions.try_submit(execution, values):
        try:
            oldest = executions.inflight[0]
        except IndexError:  # another thread is at work, and has taken them all
            await asyncio.sleep(0)
        else:
            for place, value in enumerate(oldest.values):
                if value is EMPTY:
                    executions.collect(oldest, place, None)


_local = threading.local()  # a cache: the watch that this thread used last


def _watch(session: Session) -> LoopWatch | None:
    """The running loop's watch; None on an engine whose results do not come by themselves."""
    loop = asyncio.get_running_loop()
    cached: weakref.ref[LoopWatch] | None = getattr(_local, "watch", None)
    watch = None if cached is None else cached()
    if watch is not None and watch.loop() is loop and watch.session is session and not watch.is_closed:
        return watch
    with session.watches_lock:
        found = session.watches.get(loop)
        if isinstance(found, LoopWatch):
            watch = found
        elif (bell := session.engine.loop_bell()) is not None:
            watch = session.watches[loop] = LoopWatch(session, loop, bell)
        else:
            return None
    _local.watch = weakref.ref(watch)
    return watch


class LoopWatch:
    """One event loop that waits for results of a session. All of it runs in the loop's thread."""

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop, bell: LoopBell) -> None:
        self.session = session
        self.loop = weakref.ref(loop)
        self.is_closed = False
        self._bell = bell
        self._awaited: dict[Executions, dict[int, _Outputs]] = {}  # by the number of the execution
        self._calls: dict[Awaited, list[asyncio.Future[None]]] = {}
        self._queues: dict[Executions, deque[tuple[asyncio.Future[None], Execution, Sequence[Any]]]] = {}
        self._watched: dict[Executions, AbstractContextManager[None]] = {}
        self._told: dict[Executions, int] = {}  # the first number of which nobody was told
        self._runner: asyncio.Task[Any] | None = None  # the task that has asked last since the loop had its turn
        self._run_since_ns = 0
        self._num_blind = 0
        loop.add_reader(bell.fileno(), self._rung)

    def may_look(self, executions: Executions) -> bool:
        """Whether a task may look for a result for some microseconds before the loop continues."""
        if not executions.is_quick:
            self._num_blind = (self._num_blind + 1) % _NUM_BLIND
            if self._num_blind:
                return False
        return not self.is_late()

    def is_late(self) -> bool:
        """Whether the current task has run for so long that the loop must have its turn now."""
        now_ns = time.monotonic_ns()
        task = asyncio.current_task()
        if task is self._runner:
            return now_ns - self._run_since_ns >= _TURN_NS
        if self._runner is None:
            asyncio.get_running_loop().call_soon(self._had_turn)
        self._runner, self._run_since_ns = task, now_ns
        return False

    def _had_turn(self) -> None:
        self._runner = None

    def next_look(self, ref: Awaited) -> Generator[Any, Any, None]:
        """Lets the loop run until the reference may be ready."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting_for(ref).append(future)
        if ref._compiled is not None:
            self._begin(ref._compiled[0])
        self._bell.arm()
        self._look()  # once more, now that others ring
        if ref._compiled is not None and ref._compiled[1].has(ref._compiled[2]):
            _tell((future,))  # another thread took it in after `is_ready` and before `_begin`
            self._forget(ref, future)
        try:
            yield from future.__await__()
        finally:
            if future.cancelled():
                self._forget(ref, future)

    def _forget(self, ref: Awaited, future: asyncio.Future[None]) -> None:
        futures = self._waiting_for(ref)
        if future in futures:
            futures.remove(future)
        if not futures:
            if ref._compiled is None:
                del self._calls[ref]
            else:
                executions, execution, place = ref._compiled
                outputs = self._awaited[executions][execution.number]
                del outputs.futures[place]
                if not outputs.futures:
                    del self._awaited[executions][execution.number]
                if not self._awaited[executions]:
                    del self._awaited[executions]
        self._look()

    def _waiting_for(self, ref: Awaited) -> list[asyncio.Future[None]]:
        """Those that wait for the same as this reference; the list may be added to."""
        if ref._compiled is None:
            return self._calls.setdefault(ref, [])
        executions, execution, place = ref._compiled
        awaited = self._awaited.setdefault(executions, {})
        outputs = awaited.setdefault(execution.number, _Outputs(execution))
        return outputs.futures.setdefault(place, [])

    def has_queue(self, executions: Executions) -> bool:
        """Whether a task waits for room."""
        return executions in self._queues

    async def queue(self, executions: Executions, execution: Execution, values: Sequence[Any]) -> None:
        """Waits for room, in order, and starts the execution. A task that is cancelled drops it."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queues.setdefault(executions, deque()).append((future, execution, values))
        self._begin(executions)
        self._bell.arm()
        self._look()
        await future

    def _begin(self, executions: Executions) -> None:
        """Other threads that take results of these in notify this loop from now on."""
        if executions not in self._watched:
            self._watched[executions] = watched = executions.watchers.watched()
            watched.__enter__()
            self._told[executions] = executions.num_collected

    @uninterrupted
    def _rung(self) -> None:
        self._bell.take()
        self._look()

    def _look(self) -> None:
        """Takes in what has come and tells those who waited for it."""
        for executions in list(self._watched):
            self._look_at(executions)
        for ref in [ref for ref in self._calls if ref.is_ready()]:
            _tell(self._calls.pop(ref))
        if not (self._watched or self._calls):
            self._bell.disarm()

    def _look_at(self, executions: Executions) -> None:
        is_over = bool(executions.ended)
        try:
            executions.take_in(1)
        except Exception:
            is_over = True  # those who wait find it out by themselves
        numbers = self._awaited.get(executions, {})
        told = executions.num_collected
        for number in list(numbers) if is_over else range(self._told[executions], told):
            if number in numbers:
                numbers.pop(number).tell_all()
        for number in [number for number in numbers if numbers[number].tell()]:  # some outputs may have arrived
            del numbers[number]
        self._told[executions] = told
        self._serve(executions)
        if not numbers:
            self._awaited.pop(executions, None)
            if executions not in self._queues:
                self._watched.pop(executions).__exit__(None, None, None)
                del self._told[executions]

    def _serve(self, executions: Executions) -> None:
        """Starts executions for those who wait for room, as long as there is some."""
        queue = self._queues.get(executions)
        while queue:
            future, execution, values = queue[0]
            if not future.done():
                try:
                    if not executions.try_submit(execution, values, 1):
                        return
                    future.set_result(None)
                except Exception as error:
                    future.set_exception(error)
            queue.popleft()
        self._queues.pop(executions, None)

    def end(self) -> None:
        """The session is over: all tasks that wait are notified. Called in any thread."""
        loop = self.loop()
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(self._end)
            except RuntimeError:  # closed just now
                return

    @uninterrupted
    def _end(self) -> None:
        self._look()
        self.close()

    def close(self) -> None:
        """Takes the doorbell out of the loop."""
        if not self.is_closed:
            self.is_closed = True
            loop = self.loop()
            if loop is not None and not loop.is_closed():
                loop.remove_reader(self._bell.fileno())
            self._bell.close()

    @brief
    def __del__(self) -> None:
        self.close()


class _Outputs:
    """The outputs of one execution that tasks wait for."""

    __slots__ = ("_execution", "futures")

    def __init__(self, execution: Execution) -> None:
        self._execution = execution
        self.futures: dict[int, list[asyncio.Future[None]]] = {}  # by the position of the output

    def tell(self) -> bool:
        """Wakes the tasks whose output has arrived. True if no task waits any more."""
        for place in [place for place in self.futures if self._execution.has(place)]:
            _tell(self.futures.pop(place))
        return not self.futures

    def tell_all(self) -> None:
        for futures in self.futures.values():
            _tell(futures)


def _tell(futures: Iterable[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)
