"""One actor's process, as the driver sees it: how it is spoken to, and buried. What knows how it started and ended is a `Child`."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Protocol, TypeAlias

from crossfade.engines import control
from crossfade.engines.control import post, send
from crossfade.engines.sentinel import SideDoor
from crossfade.engines.state import ActorState, Fate
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.frames import FrameError, new_key
from crossfade.host.limits import limit_met
from crossfade.host.memory import Memory
from crossfade.host.processes import KILLED, await_end, count_oom_kills, is_ending, open_pidfd
from crossfade.host.sockets import Connection, hand_over
from crossfade.interrupted import passed_through_others

_SIGNAL_S = 0.5


class Child(Protocol):
    """A process that was started, as the system knows it."""

    pid: int
    is_borrowed: bool  # whether it is a process of somebody else's, which goes on without the driver

    def await_exit(self, pidfd: int) -> int | None:
        """Waits for its end; its exit status as ``subprocess`` has it, or None if the status is lost."""

    def describe(self, code: int | None) -> str:
        """Its exit status in words."""

    def discard(self) -> None:
        """Ends a process that nobody is going to use."""


Start: TypeAlias = Callable[[tuple[int, ...]], Child]
"""Starts an actor's process, or finds one, and gives it these descriptors: the arguments of `crossfade.engines.serving.serve`."""


class ActorProcess:
    """One actor's process, as the driver sees it. An error of ``start`` leaves nothing behind."""

    def __init__(self, name: str, driver_pidfd: int, start: Start) -> None:
        self.name = name
        self.num_oom_kills = count_oom_kills()
        self.known: set[str] = set()  # peers that it was introduced to
        self._is_killed = False  # by `kill`
        self._has_exited = False  # and its exit status was collected
        self._exit_code: int | None = None
        self._is_overdue = False  # it was seen to end, and did not in time
        self.refusal = ""  # why nothing that it says is believed any more
        self.on_message: Callable[[], None] = lambda: None  # for what comes in while we send
        self.on_room: Callable[[bool], None] = lambda is_wanted: None  # called when the wait for room starts or ends
        self._wants_room = False
        self.awaited: set[int] = set()  # calls whose reference is alive
        self.replies: dict[int, control.Returned] = {}
        with ExitStack() as undo, ExitStack() as theirs:  # after an error, all is closed; the actor's copies always are
            self.bell_fds = Doorbell.create_fds(name)
            for fd in self.bell_fds:
                undo.callback(os.close, fd)
            self.bell = Bell.of(*self.bell_fds)
            undo.callback(self.bell.close)
            keys = new_key(), new_key()
            self.connection, their_end = Connection.pair(keys[0])
            undo.callback(self.connection.close)
            theirs.enter_context(their_end)
            door, their_door = Connection.pair(keys[1])
            undo.callback(door.close)
            theirs.enter_context(their_door)
            stacks = Memory.create(f"stacks-{name}", 0)
            undo.callback(stacks.close)
            self.side_door = SideDoor(door, stacks)
            their_lifeline, self._lifeline = os.pipe()
            undo.callback(os.close, self._lifeline)
            theirs.callback(os.close, their_lifeline)
            keys_fd = hand_over(b"".join(keys))
            theirs.callback(os.close, keys_fd)
            mine = (*self.bell_fds, driver_pidfd, their_lifeline, their_door.fileno(), stacks.fd)
            self._child = start((their_end.fileno(), keys_fd, *mine))
            undo.callback(self._child.discard)
            self.pid = self._child.pid
            self.pidfd = open_pidfd(self.pid)
            self.fate = Fate(name, self.pid)
            undo.pop_all()

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Sends a message, waiting for room if the actor is busy. If the wait is interrupted, the next thread that waits on the
        driver's doorbell sends the rest.
        """
        with self._spoken_to():
            send(self.connection, message, fds)
        if self.connection.has_message:
            self.on_message()

    def post(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Sends a message without waiting for the actor: what has no room now is sent by a thread that waits on the doorbell."""
        with self._spoken_to():
            post(self.connection, message, fds)

    def flush(self) -> None:
        """Sends the queued messages, as far as there is room."""
        with self._spoken_to():
            self.connection.flush()

    @contextmanager
    def _spoken_to(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if passed_through_others(error) or limit_met(error) is not None:
                raise
            # The actor has ended; its pidfd tells how.
        finally:
            self.bell.announce_mail()
            if self.connection.has_unsent or self._wants_room:
                self._wants_room = self.connection.has_unsent
                self.on_room(self._wants_room)

    def break_off(self, error: FrameError) -> None:
        """A process without the key has written to its control connection: it cannot be talked to any more, and is killed."""
        self.refusal = f"its control connection is broken, {error}; so it was killed"
        self.kill()

    def kill(self) -> None:
        """Kills the process. (``Popen.kill`` would poll it, and mistake an exit status that was collected elsewhere for code 0.)"""
        if self._child.is_borrowed:
            self.connection.hang_up()
            return
        with suppress(OSError):  # it has ended, and another thread may have closed the pidfd
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self._is_killed = True

    @property
    def is_borrowed(self) -> bool:
        """Whether its process goes on without the driver: to end it is to let it go."""
        return self._child.is_borrowed

    def await_ending(self, timeout_s: float) -> bool:
        """Whether it has ended. If it is on its way out, waits for that; but once only where it takes longer."""
        if self._is_overdue or not is_ending(self.pid):
            return False
        has_ended = await_end(self.pidfd, timeout_s)
        self._is_overdue = not has_ended
        return has_ended

    def await_exit(self) -> int | None:
        """Waits for the process to end. Returns its exit status as ``subprocess`` does; None if the status is lost."""
        if not self._has_exited:
            self._exit_code = self._child.await_exit(self.pidfd)
            self._has_exited = True
        return self._exit_code

    def describe_end(self, code: int | None) -> str:
        """How it ended. The kernel's choice of a victim looks like any other SIGKILL, so its counter has to tell."""
        if self.refusal:
            return self.refusal
        if failure := self.side_door.last_words():
            return f"{failure}; its process was ended, for others would have waited for what it had begun there"
        if code is None and self._is_killed:
            return KILLED
        text = self._child.describe(code)
        if code == -signal.SIGKILL and count_oom_kills() > self.num_oom_kills:
            text += " (memory ran out, and the system ended a process)"
        return text

    def disown(self) -> None:
        """In a forked child: it must not be what keeps the actors alive."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:  # it is closed already where the actor has ended
            os.close(lifeline)

    def ask(self) -> None:
        """Asks what it is doing; `look` has the answer."""
        self.side_door.ask()

    def look(self, timeout_s: float) -> ActorState:
        """What it is doing; it was asked through its side door."""
        try:
            state = self.side_door.answer(timeout_s)
            if state is not None:
                return state
            stacks = "" if self.fate.end else self.side_door.stacks_by_signal(self.pid, _SIGNAL_S)
        except (OSError, ValueError):  # another thread has closed the descriptors
            stacks = ""
        if self.fate.end:
            return self.fate.obituary()
        why = "it holds the interpreter lock in a long call" if stacks else "it is starting, stopped or ending"
        return ActorState(self.name, self.pid, f"does not answer: {why}", stacks=stacks)

    def discard(self) -> None:
        """Ends it at once, and gives its descriptors back."""
        self.kill()
        self.await_exit()
        self.close()

    def close(self) -> None:
        self.connection.close()
        self.side_door.close()
        self.bell.close()
        fds = (*self.bell_fds, self.pidfd, self._lifeline)
        self.bell_fds, self.pidfd, self._lifeline = (-1, -1), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)
