"""The executions of a graph that are under way: submitting them and taking their results in, from any thread or event loop.

A call that a signal's handler or a destructor makes in the middle of a call of the same thread is refused: half of a value may
have been moved. Such a handler may raise; if it raised while a value was moved, the graph cannot be used any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NoReturn

from crossfade.api.accepted import deadline_of, left_of
from crossfade.api.execution import Execution
from crossfade.api.session import Session
from crossfade.api.watchers import Watchers
from crossfade.engines.protocol import EMPTY, OpenPlan
from crossfade.errors import (
    CapacityExceeded,
    ChannelError,
    ChannelTimeout,
    CrossfadeError,
    Failure,
    GetTimeoutError,
    GraphClosed,
    SessionError,
)
from crossfade.interrupted import passed_through_others, uninterrupted
from crossfade.plan.plan import Plan

get_ident: Final = threading.get_ident


class Executions:
    """Submits executions of one open plan and collects their results, in the order in which they were submitted.

    ``inflight`` has the executions whose outputs have not all been collected, oldest first. ``ended`` says why the graph cannot be
    used any more. An error that is the value of several outputs counts once in ``num_failures``. ``is_quick``: the last result that
    an event loop waited for came while the loop was looking for it.
    """

    def __init__(self, session: Session, plan: Plan, opened: OpenPlan, submit_timeout: float | None) -> None:
        self.session = session
        self.plan = plan
        self.opened = opened
        self._try_submit, self._try_take, self._wait = opened.try_submit, opened.try_take, opened.wait_to_collect
        self.watchers = Watchers(opened.nudge)
        self.is_quick = True
        self.inflight: deque[Execution] = deque()
        self.num_submitted = 0
        self.num_collected = 0
        self.num_failures = 0
        self.ended = ""
        self._has_one_output = len(plan.outputs) == 1
        self._num_values = len(set(plan.outputs))
        self._max_inflight = plan.max_inflight
        self._submit_timeout = submit_timeout
        self._is_torn = False  # an error came while an input was written
        self._is_collect_torn = False  # ... while a result was taken in
        self._make_locks()

    def _make_locks(self) -> None:
        # Reentrant, since a handler that raises between taking and holding one must not lock its own thread out.
        self._submitting = threading.RLock()
        self._submitter = 0  # the thread that holds it, while it does; another call of that thread is refused
        self._collecting = threading.RLock()
        self._collector = 0  # the same
        self._idle: set[int] = set()  # the threads that wait while another one collects

    # Submitting

    def submit(self, execution: Execution, values: Sequence[Any]) -> None:
        """Starts an execution; waits for room. Raises what `CompiledGraph.execute` does; the caller then drops the execution."""
        me = get_ident()
        if me == self._submitter or me == self._collector or (self._idle and me in self._idle):
            self._refuse_reentry()
        try:
            with self._submitting:  # a raising handler between its taking and a try statement would leave it taken
                try:
                    self._submitter = me
                    if len(self.inflight) >= self._max_inflight or not self._start(execution, values):
                        self._submit_slowly(execution, values)
                finally:
                    self._submitter = 0
        finally:
            if self.watchers.is_missed:
                self.watchers.notify_missed()

    @uninterrupted
    def try_submit(self, execution: Execution, values: Sequence[Any], num_own: int = 0) -> bool:
        """Starts an execution if that needs no waiting. ``num_own``: see `take_in`."""
        self._refuse_reentry()
        if not self.watchers.try_lock(self._submitting):
            return False
        try:
            self._submitter = get_ident()
            if not self._has_room():
                self._take_in(num_own)
            return self._has_room() and self._start(execution, values)
        finally:
            self._submitter = 0
            self._submitting.release()
            self.watchers.notify_missed()

    def _start(self, execution: Execution, values: Sequence[Any]) -> bool:
        """Writes the inputs of an execution. False, with nothing written, if a ring has no room."""
        if self.ended or self._is_torn:
            self._refuse("the graph cannot be executed")
        execution.number = self.num_submitted
        try:
            self.inflight.append(execution)  # before its results can come
            if self._try_submit(values):
                self.num_submitted = execution.number + 1
                return True
            self.inflight.pop()
            return False
        except BaseException as error:
            self._settle(execution, error)
            raise

    def _settle(self, execution: Execution, error: BaseException) -> None:
        """Finds out what became of an execution whose submit raised an error."""
        self._is_torn = True  # until it is known: another error may come in between
        is_submitted = self.opened.is_submitted(execution.number, error)
        if is_submitted:
            self.num_submitted = execution.number + 1
        elif self.inflight and self.inflight[-1] is execution:
            self.inflight.pop()
        self._is_torn = is_submitted is None
        self._explain("the graph cannot be executed", error)

    def _submit_slowly(self, execution: Execution, values: Sequence[Any]) -> None:
        """Waits for room, and takes results in meanwhile: the actors may be waiting for that."""
        if self.ended or self._is_torn:
            self._refuse("the graph cannot be executed")
        deadline = deadline_of(self._submit_timeout)
        is_submitted = (self._has_room() or self._make_room(deadline)) and self._start(execution, values)

        def ready() -> bool:
            nonlocal is_submitted
            if self.inflight and self._collecting.acquire(False):
                try:
                    self._collect_next()
                finally:
                    self._collecting.release()
                    self.watchers.notify_missed()
            is_submitted = self._start(execution, values)
            return is_submitted

        if not is_submitted and self._has_room():  # but a ring has none
            self.opened.wait_until(ready, left_of(deadline))
        if not is_submitted:
            raise ChannelTimeout(
                f"there was no room for another execution within {self._submit_timeout} s",
                hint="an actor is slower than that; get results first, or compile with a larger submit_timeout",
            )

    def _has_room(self) -> bool:
        return len(self.inflight) < self._max_inflight

    def _make_room(self, deadline: float | None) -> bool:
        """Takes results in until fewer executions are in flight. Raises an error if the caller has to get some first."""
        inflight = list(self.inflight)
        if len(inflight) >= self._max_inflight and all(each.is_wanted() for each in inflight):
            self.opened.check()
            text = f"{len(inflight)} executions are in flight, and max_inflight is {self._max_inflight}"
            raise CapacityExceeded(text, hint="get the oldest result first, or compile with a larger max_inflight")

        def ready() -> bool:
            while not self._has_room():
                if not self._collect_next():
                    return False
            return True

        if self._collecting.acquire(False) or self._await_turn(self._has_room, deadline):
            try:
                self.opened.wait_to_collect(ready, 0, left_of(deadline))
            finally:
                self._collecting.release()
                self.watchers.notify_missed()
        return self._has_room()

    # Collecting

    def collect(
        self,
        execution: Execution,
        place: int,
        timeout: float | None,
        told_timeout: float | None = None,
        is_enough: Callable[[], bool] | None = None,
        looks_first: bool = True,
    ) -> Any:
        """Takes results in until an output has arrived or ``is_enough()``, which looks at what came. Then `EMPTY` may be returned.

        ``told_timeout`` is the time limit that an error names; ``looks_first`` is False if the caller has just looked for results.
        """
        me = get_ident()
        if me == self._submitter or me == self._collector or (self._idle and me in self._idle):
            self._refuse_reentry()
        deadline = None if timeout is None else deadline_of(timeout)
        values = execution.values
        if self._collecting.acquire(False) or self._await_turn(partial(_is_here, values, place, is_enough), deadline):
            try:
                self._collector = me
                if looks_first and values[place] is EMPTY:
                    self._collect_next()
                if values[place] is EMPTY:
                    self._wait_to_collect(values, place, deadline, is_enough)
            finally:
                self._collector = 0
                self._collecting.release()
                if self.watchers.is_missed:
                    self.watchers.notify_missed()
        value = values[place]
        if value is EMPTY and not (is_enough and is_enough()):
            limit_s = timeout if told_timeout is None else told_timeout
            text = f"execution {execution.number} has not finished within {limit_s} s"
            raise GetTimeoutError(text, hint="get the same reference again")
        return value

    def _wait_to_collect(
        self, values: list[Any], place: int, deadline: float | None, is_enough: Callable[[], bool] | None
    ) -> None:
        """Takes results in until the output has arrived, or until that is enough, or the time is up."""

        def has_come() -> bool:
            while values[place] is EMPTY and not (is_enough is not None and is_enough()):
                if not self._collect_next():
                    return False
            return True

        self._wait(has_come, place, None if deadline is None else left_of(deadline))

    def _await_turn(self, is_enough: Callable[[], bool], deadline: float | None) -> bool:
        """Waits while another thread collects. True with the lock taken; False if that is not needed or the time is up."""
        has_turn = False

        def ready() -> bool:
            nonlocal has_turn
            if is_enough():
                return True
            has_turn = self.watchers.try_lock(self._collecting)
            return has_turn

        me = get_ident()
        try:
            self._idle.add(me)
            with self.watchers.watched():
                self.opened.wait_beside(ready, left_of(deadline))
        finally:
            self._idle.discard(me)
        return has_turn

    def is_over(self, execution: Execution, place: int) -> bool:
        """Whether a get of this output would return without waiting. Takes results in, unless another thread is doing so."""
        me = get_ident()
        if me == self._submitter or me == self._collector or me in self._idle:
            self._refuse_reentry()
        if self._collecting.acquire(False) or self.watchers.try_lock(self._collecting):
            try:
                self._collector = me
                while execution.values[place] is EMPTY:
                    if not self._collect_next():
                        self.opened.check()
                        break
            except Exception:
                return True  # get will say it
            finally:
                self._collector = 0
                self._collecting.release()
                if self.watchers.is_missed:
                    self.watchers.notify_missed()
        return execution.values[place] is not EMPTY or bool(self.ended)

    @uninterrupted
    def take_in(self, num_own: int = 0) -> None:
        """Takes in all results that are there, unless another thread does. ``num_own``: 1 if the caller is one of the watchers."""
        self._refuse_reentry()
        self._take_in(num_own)

    def _take_in(self, num_own: int) -> None:
        if self.watchers.try_lock(self._collecting):
            try:
                self._collector = get_ident()
                while self.inflight and self._collect_next(num_own):
                    pass
                self.opened.check()
            finally:
                self._collector = 0
                self._collecting.release()
                self.watchers.notify_missed()

    def _collect_next(self, num_own: int = 0) -> bool:
        """Takes in what has arrived, at most one value of each output. ``num_own``: watchers that need no notification."""
        if self.ended or self._is_collect_torn:
            self._refuse("there is no result")
        try:
            if self._has_one_output:
                value = self._try_take()
                if value is EMPTY:
                    return False
                self.inflight.popleft().values[0] = value
                self.num_collected += 1
                if type(value) is Failure:  # counted after the value is stored: readers of the count then find it
                    self.num_failures += 1
            elif not self._take_some_of_several():
                return False
        except BaseException as error:
            self._is_collect_torn = self._is_torn = True  # until it is known: another error may come in between
            is_ours = isinstance(error, CrossfadeError) and not passed_through_others(error)
            self._is_collect_torn = self._is_torn = not is_ours  # a value may be taken from its ring and not be stored
            self._explain("the results are gone", error)
            raise
        if len(self.watchers.waiting) > num_own:
            self.opened.nudge()
        return True

    def _take_some_of_several(self) -> bool:
        arrivals, inflight = self.opened.try_collect(), self.inflight
        for number, places, value in arrivals:
            execution = inflight[number - inflight[0].number]
            for place in places:
                execution.values[place] = value
            if type(value) is Failure:
                self.num_failures += 1
            execution.num_values += 1
            if execution.num_values == self._num_values:  # all outputs of earlier executions are there then, too
                inflight.popleft()
                self.num_collected += 1
        return bool(arrivals)

    def _explain(self, what: str, error: BaseException) -> None:
        """Raises the reason for an error that moving a value has raised, if there is a better one than the error itself."""
        reason = error
        if isinstance(error, ChannelError) and not self.ended:
            try:
                reason = self.opened.explained(error)
            except OSError as closed:
                reason = closed
        if self.ended and isinstance(reason, ChannelError | OSError):  # another thread has shut the session down
            raise GraphClosed(f"{what}: {self.ended}") from reason
        if reason is not error:
            raise reason from None

    def _refuse_reentry(self) -> None:
        me = get_ident()
        if me == self._submitter or me == self._collector or me in self._idle:
            raise SessionError(
                "the graph cannot be used in the middle of its own call",
                hint="a signal's handler or a destructor came in between: let it set a flag and act after the call, or use another "
                "thread",
            )

    def _refuse(self, what: str) -> NoReturn:
        if self.ended:
            raise GraphClosed(f"{what}: {self.ended}")
        raise SessionError(
            "the graph was interrupted in the middle of moving a value", hint="tear it down and compile it again"
        )

    # Ending

    def abandon(self) -> None:
        self.end("the session was shut down")
        self.opened.nudge()

    def end(self, reason: str) -> None:
        """Ends submitting and collecting: a thread that waits for room or for a result gets a `GraphClosed`."""
        self.ended = self.ended or reason

    @uninterrupted
    def close(self, reason: str, action: Callable[[], None]) -> None:
        """Ends submitting and collecting, and calls ``action`` when no other thread is doing either."""
        self._refuse_reentry()
        self.end(reason)
        self.opened.nudge()
        try:
            with self._submitting, self._collecting:
                try:
                    self._submitter = get_ident()
                    action()
                finally:
                    self._submitter = 0
        finally:
            self.watchers.notify_missed()

    def disown(self) -> None:
        """This process was forked: the graph is its parent's, and other threads may have held the locks."""
        self.ended = "it belongs to the process that this one was forked from"
        self._make_locks()


def _is_here(values: list[Any], place: int, is_enough: Callable[[], bool] | None) -> bool:
    return values[place] is not EMPTY or bool(is_enough and is_enough())
