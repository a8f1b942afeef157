"""The executions of a graph that are under way: submitting them and taking their results in, from any thread or event loop."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import get_ident
from typing import TYPE_CHECKING, Any, NoReturn

from crossfade.api.accepted import deadline_of
from crossfade.api.execution import Execution
from crossfade.engines.protocol import EMPTY, HalfSubmitted, OpenPlan
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
from crossfade.interrupted import longest_sleep, passed_through_others, uninterrupted

if TYPE_CHECKING:
    from crossfade.api.session import Session
    from crossfade.plan.plan import Plan

__all__ = ["Executions"]


class Executions:
    """Submits executions of one open plan and collects their results, in the order in which they were submitted.

    Args:
        session: whose engine runs it.
        plan: the plan.
        opened: the same, open.
        submit_timeout: the longest wait for room, in seconds; None for ever.

    Attributes:
        session, plan, opened: see above.
        is_quick: whether the last result that an event loop waited for came within the time for which it looked.
        inflight: executions that were submitted, and whose outputs have not all been taken in, oldest first.
        num_submitted: executions that were started.
        num_collected: executions whose outputs have all been taken in; these are always the oldest ones.
        num_failures: errors that were taken in; a value that is several outputs counts once.
        ended: why no more can be done, once that is so.
    """

    def __init__(self, session: Session, plan: Plan, opened: OpenPlan, submit_timeout: float | None) -> None:
        self.session = session
        self.plan = plan
        self.opened = opened
        self.is_quick = True
        self.inflight: deque[Execution] = deque()
        self.num_submitted = 0
        self.num_collected = 0
        self.num_failures = 0
        self.ended = ""
        self._num_outputs = len(plan.outputs)
        self._has_one_output = len(plan.outputs) == 1
        self._num_values = len(set(plan.outputs))
        self._max_inflight = plan.max_inflight
        self._submit_timeout = submit_timeout
        self._is_torn = False  # an interrupt (Ctrl-C) came while an input was written
        self._is_collect_torn = False  # ... while a result was taken in
        self._make_locks()

    def _make_locks(self) -> None:
        # Reentrant, since an interrupt between taking and holding one must not lock its own thread out, and so that a signal's
        # handler may tear the graph down wherever it comes.
        self._submitting = threading.RLock()
        self._is_submitting = False
        self._collecting = threading.RLock()
        self._collector = 0  # the thread that takes a result in
        self._collected = threading.Condition()  # for threads that wait while another one collects
        self._num_waiting = 0
        self._num_watching = 0
        self._is_missed = False  # one who watches found a lock taken: whoever lets go of it says so

    # Submitting

    def submit(self, values: Sequence[Any]) -> Execution:
        """Starts an execution.

        Raises:
            CapacityExceeded, ActorDiedError, ChannelTimeout: see `CompiledGraph.execute`.
        """
        try:
            with self._submitting:
                if self.ended or self._is_submitting or self._is_torn or self._is_collect_torn:
                    self._refuse()
                if self._collector:
                    self._refuse_within_collect()
                self._is_submitting = True
                try:
                    if len(self.inflight) >= self._max_inflight:
                        self._make_room()
                    execution = Execution(self.num_submitted, self._num_outputs)
                    self._submit(execution, values)
                    return execution
                finally:
                    self._is_submitting = False
        finally:
            if self._is_missed:
                self._tell_missed()

    @uninterrupted
    def try_submit(self, values: Sequence[Any], num_own: int = 0) -> Execution | None:
        """Starts an execution if that needs no waiting. ``num_own``: see `take_in`."""
        if not self._try_lock(self._submitting):
            return None
        try:
            if self.ended or self._is_submitting or self._is_torn or self._is_collect_torn:
                self._refuse()
            if self._collector:
                self._refuse_within_collect()
            self._is_submitting = True
            try:
                if len(self.inflight) >= self._max_inflight:
                    self.take_in(num_own)
                    if len(self.inflight) >= self._max_inflight:
                        return None
                execution = Execution(self.num_submitted, self._num_outputs)
                return execution if self._submit(execution, values, may_wait=False) else None
            finally:
                self._is_submitting = False
        finally:
            self._submitting.release()
            self._tell_missed()

    def _refuse(self) -> NoReturn:
        if self.ended:
            raise GraphClosed(f"the graph cannot be executed: {self.ended}")
        if self._is_submitting:
            raise SessionError(
                "the graph cannot be executed in the middle of its own execute",
                hint="a signal's handler or a destructor came in between: let it take a note, and execute afterwards",
            )
        raise _torn()

    def _refuse_within_collect(self) -> None:
        """Raises where this thread, and not another one, is in the middle of taking a result in."""
        if self._collector == get_ident():
            raise SessionError(
                "the graph cannot be used in the middle of taking in one of its results",
                hint="a signal's handler or a destructor came in between: let it take a note, and do it afterwards",
            )

    def _submit(self, execution: Execution, values: Sequence[Any], *, may_wait: bool = True) -> bool:
        """Starts an execution. False, with nothing written, if there is no room and ``may_wait`` is False."""
        try:
            self.inflight.append(execution)  # before its results can come
            if not self.opened.try_submit(values):
                if not may_wait:
                    self.inflight.pop()
                    return False
                self._submit_slowly(values)
            self.num_submitted += 1
        except HalfSubmitted as half:
            self.num_submitted += 1
            execution.drop()
            raise half.failure.to_error() from None
        except BaseException as error:
            number = execution.number
            if self.num_submitted == number:  # else it is under way, and nobody has its reference
                self._is_torn = True  # pessimistic until checked: another error may interrupt the check
                if self.inflight and self.inflight[-1] is execution:
                    self.inflight.pop()
                self._is_torn = not (self.opened.is_whole_after(error, number) or _is_an_end(error))
            if self.ended and isinstance(error, ChannelError | OSError):  # another thread has shut the session down
                raise GraphClosed(f"the graph cannot be executed: {self.ended}") from error
            raise
        return True

    def _make_room(self) -> None:
        """Takes the oldest results in, and waits for them, unless it is the caller who has to get some first."""
        deadline = self._submit_deadline()
        while len(self.inflight) >= self._max_inflight:
            inflight = list(self.inflight)
            if len(inflight) < self._max_inflight:
                return  # another thread has collected one just now
            if all(execution.is_wanted() for execution in inflight):
                self.opened.check()
                raise CapacityExceeded(
                    f"{len(inflight)} executions are in flight, and max_inflight is {self._max_inflight}",
                    hint="get the oldest result first, or compile with a larger max_inflight",
                )
            try:
                self.collect_all(inflight[0], None if deadline is None else max(0.0, deadline - time.monotonic()))
            except GetTimeoutError as error:
                raise self._submit_timed_out() from error

    def _submit_slowly(self, values: Any) -> None:
        """Waits for room in a ring. Results are taken in meanwhile: the actors may be waiting for that."""
        deadline = self._submit_deadline()
        is_submitted = False

        def ready() -> bool:
            nonlocal is_submitted
            if self.ended:
                raise GraphClosed(f"the graph cannot be executed: {self.ended}")
            if self.inflight and self._collecting.acquire(False):
                try:
                    self._collect_next()
                finally:
                    self._collecting.release()
                    self._notify()
            is_submitted = self.opened.try_submit(values)
            return is_submitted

        left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
        if not self.opened.wait_until(ready, left_s) and not is_submitted:
            raise self._submit_timed_out()

    def _submit_deadline(self) -> float | None:
        timeout_s = self._submit_timeout
        return None if timeout_s is None else time.monotonic() + timeout_s

    def _submit_timed_out(self) -> ChannelTimeout:
        return ChannelTimeout(
            f"there was no room for another execution within {self._submit_timeout} s",
            hint="an actor is slower than that; get results first, or compile with a larger submit_timeout",
        )

    # Collecting

    def collect_all(self, execution: Execution, timeout: float | None) -> None:
        """Takes results in until all outputs of ``execution`` have arrived."""
        deadline = deadline_of(timeout)
        for place in range(self._num_outputs):
            if execution.values[place] is EMPTY:
                self.collect(execution, place, None if deadline is None else max(0.0, deadline - time.monotonic()))

    def collect(
        self,
        execution: Execution,
        place: int,
        timeout: float | None,
        told_timeout: float | None = None,
        is_enough: Callable[[], bool] | None = None,
        looks_first: bool = True,
    ) -> Any:
        """Takes results in until an output of ``execution`` has arrived or ``is_enough()`` is true, which looks at what came.

        Args:
            execution: the execution.
            place: the position of the output.
            timeout: the longest wait, in seconds; None for ever.
            told_timeout: the time limit to name in an error; ``timeout`` is what is left of it.
            is_enough: see above.
            looks_first: whether to look for results before waiting; False if the caller has just done so.

        Returns:
            The value or a `Failure`; `EMPTY` if ``is_enough()`` was true without it.
        """
        deadline = None if timeout is None else deadline_of(timeout)
        values = execution.values
        if not self._collecting.acquire(False) and not self._await_turn(execution, place, deadline, is_enough):
            if values[place] is EMPTY and not (is_enough and is_enough()):
                raise self._timed_out(execution, timeout if told_timeout is None else told_timeout)
            return values[place]  # another thread has collected it
        try:
            while values[place] is EMPTY and not (is_enough and is_enough()):
                if looks_first and self._collect_next():
                    continue

                def is_done() -> bool:
                    # A signal's handler that gets results in this very thread may take in what is waited for.
                    while values[place] is EMPTY and not (is_enough and is_enough()):
                        if not self._collect_next():
                            return False
                    return True

                left_s = None if deadline is None else max(0.0, deadline - time.monotonic())
                if not self.opened.wait_to_collect(is_done, place, left_s):
                    raise self._timed_out(execution, timeout if told_timeout is None else told_timeout)
                break
            return values[place]
        finally:
            self._collecting.release()
            if self._num_waiting or self._num_watching:
                self._notify()

    @uninterrupted
    def is_over(self, execution: Execution, place: int) -> bool:
        """Whether a get of this output would return without waiting. Takes results in, unless another thread is doing so."""
        if self._collector:
            self._refuse_within_collect()
        if self._try_lock(self._collecting):
            try:
                while execution.values[place] is EMPTY:
                    if not self._collect_next():
                        self.opened.check()
                        break
            except Exception:
                return True  # get will say it
            finally:
                self._collecting.release()
                self._pass_turn()
                self._tell_missed()
        return execution.values[place] is not EMPTY or bool(self.ended)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While `crossfade.wait` waits for results: who takes them in wakes it."""
        with self._collected:
            self._num_watching += 1
        try:
            yield
        finally:
            with self._collected:
                self._num_watching -= 1
            if self._num_watching:  # another one may have looked while this one took results in
                self.opened.nudge()

    def _await_turn(
        self, execution: Execution, place: int, deadline: float | None, is_enough: Callable[[], bool] | None
    ) -> bool:
        """Waits while another thread collects: True once this one may, False if that is not needed or the time is up."""
        if self.opened.is_waiting_here():
            return self._await_turn_within(execution, place, deadline, is_enough)
        with self._collected:
            self._num_waiting += 1
            try:
                while execution.values[place] is EMPTY and not (is_enough and is_enough()):
                    if self._collecting.acquire(False):
                        return True
                    left_s = None if deadline is None else deadline - time.monotonic()
                    if left_s is not None and left_s <= 0:
                        return False
                    self._collected.wait(longest_sleep(None if left_s is None else min(left_s, threading.TIMEOUT_MAX)))
                return False
            finally:
                self._num_waiting -= 1

    def _await_turn_within(
        self, execution: Execution, place: int, deadline: float | None, is_enough: Callable[[], bool] | None
    ) -> bool:
        """In a signal's handler, whose thread others may count on to be woken: waits where that one does."""
        has_turn = False

        def ready() -> bool:
            nonlocal has_turn
            if execution.values[place] is not EMPTY or (is_enough and is_enough()):
                return True
            has_turn = self._collecting.acquire(False)
            return has_turn

        with self.watched():
            self.opened.wait_until(ready, None if deadline is None else max(0.0, deadline - time.monotonic()))
        return has_turn

    def _notify(self, num_own: int = 0) -> None:
        self._pass_turn()
        if self._num_watching > num_own:
            self.opened.nudge()

    def _pass_turn(self) -> None:
        if self._num_waiting:  # a thread that is not counted yet has still to try the lock, or to look at its values
            with self._collected:
                self._collected.notify_all()

    def _collect_next(self, num_own: int = 0) -> bool:
        """Takes in what has arrived, at most one value of each output. ``num_own``: watchers that need no notification."""
        if self.ended or self._is_collect_torn or self._collector:
            self._refuse_to_collect()
        self._collector = get_ident()
        try:
            if self._has_one_output:
                value = self.opened.try_take()
                if value is EMPTY:
                    return False
                self.inflight.popleft().values[0] = value
                self.num_collected += 1
                if type(value) is Failure:  # counted after the value is stored: readers of the count then find it
                    self.num_failures += 1
            elif not self._take_some_of_several():
                return False
        except BaseException as error:
            self._is_collect_torn = True  # pessimistic until checked: another error may interrupt the check
            if self.ended and isinstance(error, ChannelError | OSError):  # another thread has shut the session down
                raise GraphClosed(f"the results are gone: {self.ended}") from error
            # An interrupt, or what a signal's handler raised: a value may be taken and in nobody's hands.
            self._is_collect_torn = not isinstance(error, CrossfadeError) or passed_through_others(error)
            raise
        finally:
            self._collector = 0
        if self._num_waiting or self._num_watching > num_own:
            self._notify(num_own)
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

    def _refuse_to_collect(self) -> None:
        """Raises an error, unless another thread is the one that collects, which its lock tells."""
        if self.ended:
            raise GraphClosed(f"there is no result: {self.ended}")
        if self._is_collect_torn:
            raise _torn()
        self._refuse_within_collect()

    def _timed_out(self, execution: Execution, timeout: float | None) -> GetTimeoutError:
        return GetTimeoutError(
            f"execution {execution.number} has not finished within {timeout} s", hint="get the same reference again"
        )

    @uninterrupted
    def take_in(self, num_own: int = 0) -> None:
        """Takes in all results that are there, unless another thread does.

        Args:
            num_own: 1 if the caller watches, and need not be told what it does itself.

        Raises:
            ActorDiedError, SessionError: no more will come.
        """
        if self._try_lock(self._collecting):
            try:
                while self.inflight and self._collect_next(num_own):
                    pass
                self.opened.check()
            finally:
                self._collecting.release()
                self._pass_turn()
                self._tell_missed()

    def _try_lock(self, lock: Any) -> bool:
        """Takes the lock, or leaves a note to whoever holds it that the caller has to look again (see `_tell_missed`).

        The second attempt comes after the note: if that fails too, the holder lets go, and reads the note, only afterwards.
        """
        if lock.acquire(False):
            return True
        self._is_missed = True
        taken: bool = lock.acquire(False)
        return taken

    def _tell_missed(self) -> None:
        """After letting go of a lock: wakes those who watch and found it taken, as what they were rung for may still be there."""
        if self._is_missed:
            self._is_missed = False
            if self._num_watching:
                self.opened.nudge()

    # Ending

    def abandon(self) -> None:
        """The session ends."""
        self.end("the session was shut down")
        self.opened.nudge()

    def end(self, reason: str) -> None:
        """Ends submitting and collecting: a thread that waits for room or for a result gets a `GraphClosed`."""
        self.ended = self.ended or reason

    @contextmanager
    def halted(self) -> Iterator[None]:
        """Nobody submits or collects meanwhile."""
        with self._submitting, self._collecting:
            yield
        self._notify()

    def disown(self) -> None:
        """This process was forked: the graph is its parent's, and other threads may have held the locks."""
        self.ended = "it belongs to the process that this one was forked from"
        self._make_locks()


def _is_an_end(error: BaseException) -> bool:
    """Whether an error says that the graph does not go on at all, so that nobody need be kept from trying."""
    is_ours = isinstance(error, CrossfadeError) and not passed_through_others(error)
    return is_ours and not isinstance(error, ChannelTimeout)


def _torn() -> SessionError:
    return SessionError(
        "the graph was interrupted in the middle of moving a value", hint="tear it down and compile it again"
    )
