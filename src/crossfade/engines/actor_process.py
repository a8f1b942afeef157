"""One actor's process, as the driver sees it: how it is started, spoken to, and buried."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from crossfade.engines import control
from crossfade.engines.control import post, send
from crossfade.engines.output import Pipes
from crossfade.engines.sentinel import SideDoor
from crossfade.engines.state import ActorState
from crossfade.errors import ActorDiedError, ActorError, ActorStartError, Failure
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.frames import FrameError, new_key
from crossfade.host.memory import Memory
from crossfade.host.processes import await_end, count_oom_kills, describe_exit, is_ending, open_pidfd
from crossfade.host.sockets import Connection, hand_over
from crossfade.interrupted import passed_through_others

__all__ = ["ActorProcess"]

_SIGNAL_S = 0.5
_ENTRY = "import sys; sys.path[:] = {path!r}; from crossfade.engines.actor import main; main({arguments})"


class ActorProcess:
    """One actor's process, as the driver sees it.

    Args:
        name: the actor's name.
        spin_us: how long it looks for work before it sleeps.
        driver_pidfd: readable once the driver has ended.
        pipes: where its output goes.

    Raises:
        ActorStartError: the system could not start it; nothing is left behind.
    """

    def __init__(self, name: str, spin_us: float, driver_pidfd: int, pipes: Pipes) -> None:
        self.name = name
        self.num_oom_kills = count_oom_kills()
        self.known: set[str] = set()  # peers that it was introduced to
        self.is_created = False
        self.start_failure: Failure | None = None
        self.end = ""  # how it ended, once it has
        self._is_overdue = False  # it was seen to end, and did not in time
        self.refusal = ""  # why nothing that it says is believed any more
        self.on_message: Callable[[], None] = lambda: None  # for what comes in while we send
        self.on_room: Callable[[bool], None] = lambda is_wanted: None  # for what we could not send, while it is so
        self._wants_room = False
        self.awaited: set[int] = set()  # calls whose reference is alive
        self.replies: dict[int, control.Returned] = {}
        with ExitStack() as undo:  # all of it goes if something fails
            self.bell_fds = Doorbell.create_fds(name)
            for fd in self.bell_fds:
                undo.callback(os.close, fd)
            self.bell = Bell(Memory(os.dup(self.bell_fds[0])), os.dup(self.bell_fds[1]))
            undo.callback(self.bell.close)
            keys = new_key(), new_key()
            self.connection, theirs = Connection.pair(keys[0])
            undo.callback(self.connection.close)
            door, their_door = Connection.pair(keys[1])
            stacks = Memory.create(f"stacks-{name}", 0)
            self.side_door = SideDoor(door, stacks)
            undo.callback(self.side_door.close)
            their_lifeline, self._lifeline = os.pipe()
            undo.callback(os.close, self._lifeline)
            keys_fd = hand_over(b"".join(keys))
            with theirs, their_door:
                try:
                    mine = (*self.bell_fds, driver_pidfd, their_lifeline, their_door.fileno(), stacks.fd)
                    self.popen = _start(name, (theirs.fileno(), keys_fd, *mine), spin_us, pipes)
                finally:
                    os.close(their_lifeline)
                    os.close(keys_fd)
            self.pidfd = open_pidfd(self.popen.pid)
            undo.pop_all()

    def send(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Sends a message, also to an actor that is too busy to look at its socket. What an interrupted wait leaves is sent by
        whoever waits for anything.
        """
        with self._spoken_to():
            send(self.connection, message, fds)
        if self.connection.has_message:
            self.on_message()

    def post(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        """Sends a message without waiting for the actor to take it: if there is no room, it is sent by whoever waits."""
        with self._spoken_to():
            post(self.connection, message, fds)

    def flush(self) -> None:
        """Sends what is left of messages, as far as there is room."""
        with self._spoken_to():
            self.connection.flush()

    @contextmanager
    def _spoken_to(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if passed_through_others(error):
                raise
            # It is gone; its pidfd tells how.
        finally:
            self.bell.announce_mail()
            if self.connection.has_unsent or self._wants_room:
                self._wants_room = self.connection.has_unsent
                self.on_room(self._wants_room)

    def break_off(self, error: FrameError) -> None:
        """Somebody without the key has written to its control connection: it cannot be talked to any more, and is killed."""
        self.refusal = f"its control connection is broken, {error}; so it was killed"
        self.popen.kill()

    def error(self) -> ActorError:
        """What became of it."""
        error: ActorError
        if self.start_failure is not None:
            cause = self.start_failure.to_error()
            error = ActorStartError(f"actor {self.name} could not be started: {cause}")
            error.__cause__ = cause
        elif not self.is_created:
            error = ActorStartError(f"actor {self.name} is dead: {self.end} before its constructor had returned")
        else:
            error = ActorDiedError(f"actor {self.name} is dead: {self.end}")
        error.actor = self.name
        return error

    def await_ending(self, timeout_s: float) -> bool:
        """Whether it has ended. If it is on its way out, waits for that; but once only where it takes longer."""
        if self._is_overdue or not is_ending(self.popen.pid):
            return False
        has_ended = await_end(self.pidfd, timeout_s)
        self._is_overdue = not has_ended
        return has_ended

    def await_exit(self) -> int | None:
        """Waits for its end. Its exit status, as ``subprocess`` gives it; None if nobody can say.

        ``Popen.wait`` has a lock, which a signal's handler would wait for where its own thread has it, and leave others waiting.
        """
        if self.popen.returncode is not None:
            return self.popen.returncode
        try:
            result = os.waitid(os.P_PID, self.popen.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return self.popen.poll()  # somebody has waited for it already
        self.popen.poll()
        if result is None:
            return None
        return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status

    def describe_end(self, code: int | None) -> str:
        """How it ended. The kernel's choice of a victim looks like any other SIGKILL, so its counter has to tell."""
        if self.refusal:
            return self.refusal
        if failure := self.side_door.last_words():
            return f"{failure}; its process was ended, for others would have waited for what it had begun there"
        text = describe_exit(code)
        if code == -signal.SIGKILL and count_oom_kills() > self.num_oom_kills:
            text += " (memory ran out, and the system ended a process)"
        return text

    def disown(self) -> None:
        """In a forked child: it must not be what keeps the actors alive."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:  # it is closed already where the actor has ended
            os.close(lifeline)

    def look(self, timeout_s: float) -> ActorState:
        """What it is doing; it was asked through its side door."""
        try:
            state = self.side_door.answer(timeout_s)
            if state is not None:
                return state
            stacks = "" if self.end else self.side_door.stacks_by_signal(self.popen.pid, _SIGNAL_S)
        except (OSError, ValueError):  # another thread has closed the descriptors
            stacks = ""
        if self.end:
            return self.obituary()
        why = "it holds the interpreter lock in a long call" if stacks else "it is starting, stopped or ending"
        return ActorState(self.name, self.popen.pid, f"does not answer: {why}", stacks=stacks)

    def obituary(self) -> ActorState:
        """What it is doing, once it has ended."""
        return ActorState(self.name, self.popen.pid, f"is dead: {self.end}")

    def discard(self) -> None:
        """Ends it at once, and gives its descriptors back."""
        self.popen.kill()
        self.await_exit()
        self.close()

    def close(self) -> None:
        """Gives its descriptors back."""
        self.connection.close()
        self.side_door.close()
        self.bell.close()
        fds = (*self.bell_fds, self.pidfd, self._lifeline)
        self.bell_fds, self.pidfd, self._lifeline = (-1, -1), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def _start(name: str, fds: tuple[int, ...], spin_us: float, pipes: Pipes) -> subprocess.Popen[bytes]:
    """Starts the interpreter of an actor. Until it ignores Ctrl-C, which is the driver's business, it has it blocked."""
    arguments = ", ".join(map(repr, (*fds, spin_us)))
    code = _ENTRY.format(path=[str(entry) or os.getcwd() for entry in sys.path], arguments=arguments)
    command = [sys.executable, "-u", "-c", code]
    stdout, stderr = pipes.for_child
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
    except (OSError, subprocess.SubprocessError) as error:
        failed = ActorStartError(
            f"the process of actor {name} could not be started: {error}",
            hint=f"the interpreter is {sys.executable!r}; is there memory, and room for one more process?",
        )
        failed.actor = name
        raise failed from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
