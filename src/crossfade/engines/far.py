"""Another host, as the driver sees it: its agent there (`crossfade.engines.agent`), and the actors whose messages it passes on."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from crossfade.engines import control, errands
from crossfade.engines.state import ActorState, Fate
from crossfade.errors import ActorStartError
from crossfade.host.doorbell import Doorbell
from crossfade.host.frames import FrameError
from crossfade.host.processes import KILLED
from crossfade.host.sockets import Connection
from crossfade.host.tcp import Stream

_NUM_CLOCK_LOOKS = 12
_ANSWER_S = 20.0


@dataclass(frozen=True, slots=True)
class Told:
    """Who is told of what comes from a host."""

    message: Callable[[FarProcess, Any], None]  # an actor has said this
    end: Callable[[FarProcess], None]  # an actor's fate is over
    lost: Callable[[FarHost], None]  # the host is
    lock: AbstractContextManager[object]  # held while a message is handled, which may say that an actor has ended


class FarHost:
    """A host with an agent. Any thread may call it; what the agent says is heard by threads that wait at the doorbell."""

    def __init__(self, name: str, stream: Stream, key: bytes, doorbell: Doorbell, told: Told) -> None:
        self.name = name
        self.offset_ns = 0  # what its monotonic clock shows more than this host's
        self.clock_error_ns = 0  # at most so much is that wrong by
        self.is_lost = False
        self.processes: dict[str, FarProcess] = {}
        self._stream = stream
        self.connection = Connection(stream.socket, key, "driver")
        self._doorbell = doorbell
        self._told = told
        self._numbers = itertools.count()
        self._ends_told = -1  # the highest number with which they were asked for
        self._answers: dict[tuple[type, Any], Any] = {}
        self._fd = self.connection.fileno()
        doorbell.watch(self._fd, self._converse)

    def align_clocks(self) -> None:
        """Finds out what the host's clock shows: of several answers the one that came quickest tells best."""
        best_ns = 1 << 62
        for _ in range(_NUM_CLOCK_LOOKS):
            number = next(self._numbers)
            start = time.monotonic_ns()
            self.say(errands.AskClock(number))
            answer = self._await(errands.Clock, number, lambda: None)
            taken_ns = time.monotonic_ns() - start
            if taken_ns < best_ns:
                best_ns = taken_ns
                self.offset_ns = answer.now_ns - start - taken_ns // 2
        self.clock_error_ns = best_ns // 2

    # Sending

    def say(self, message: Any) -> None:
        """Sends an errand, without waiting for room. Nothing is sent to a host that is lost."""
        if self.is_lost:
            return
        try:
            control.post(self.connection, message)
        except OSError as error:
            self._lose(str(error))
        else:
            self._watch_room()

    def _watch_room(self) -> None:
        self._doorbell.watch_room(self._fd, is_wanted=self.connection.has_unsent)

    def take_in(self, process: FarProcess, first: control.Create, key: bytes) -> str:
        """Lets a process come in over there; returns where."""
        self.processes[process.name] = process
        self.say(errands.TakeIn(first, key, process.is_borrowed))
        path: str = self._await(errands.Door, process.name, lambda: None).path
        return path

    def await_taken_in(self, process: FarProcess, raise_if_lost: Callable[[], None]) -> None:
        """Waits until it has come."""
        taken = self._await(errands.TakenIn, process.name, raise_if_lost, limit_s=60.0)
        if taken.error:
            raise ActorStartError(f"actor {process.name} did not come to the agent on {self.name}: {taken.error}")
        process.fate.pid = taken.pid

    def _await(self, kind: type, key: Any, raise_if_lost: Callable[[], None], limit_s: float = _ANSWER_S) -> Any:
        deadline = time.monotonic() + limit_s
        while not self._doorbell.wait_until(lambda: self.is_lost or (kind, key) in self._answers, 0.5):
            raise_if_lost()
            if time.monotonic() > deadline:
                raise ActorStartError(f"the agent on {self.name} does not answer within {limit_s} s")
        if self.is_lost:
            raise ActorStartError(f"the agent on {self.name} is gone")
        return self._answers.pop((kind, key))

    # Receiving

    def catch_up(self) -> None:
        """Handles messages that were left when a signal's handler raised."""
        if not self.is_lost and (self.connection.has_unsent or self.connection.has_message):
            self._converse()

    def _converse(self) -> None:
        with self._told.lock:  # one thread at a time, or both would handle the same message
            try:
                if self.connection.has_unsent:
                    self.connection.flush()
                    self._watch_room()
                while (message := self.connection.peek()) is not None:
                    self._heard(pickle.loads(message.payload))
                    self.connection.drop(message)
            except (FrameError, OSError) as error:
                self._lose(str(error))
                return
            if self.connection.is_closed:
                self._lose("the connection to its agent is lost")

    def _heard(self, message: Any) -> None:
        match message:
            case errands.FromActor(actor, said):
                if process := self.processes.get(actor):
                    if isinstance(said, control.Faulted):
                        said = replace(said, at_ns=said.at_ns - self.offset_ns)
                    self._told.message(process, said)
            case errands.Ended(actor, how):
                if process := self.processes.pop(actor, None):
                    process.fate.end = process.fate.end or f"on {self.name} {how}"
                    self._told.end(process)
            case errands.EndsTold(number):
                self._ends_told = max(self._ends_told, number)
            case errands.Door() | errands.TakenIn():
                self._answers[type(message), message.actor] = message
            case errands.Clock() | errands.Seen():
                self._answers[type(message), message.number] = message

    def look(self, timeout_s: float) -> dict[str, ActorState]:
        """What its actors are doing, as far as it answers in time."""
        number = next(self._numbers)
        self.say(errands.Look(number, timeout_s))
        self._doorbell.wait_until(lambda: self.is_lost or (errands.Seen, number) in self._answers, timeout_s)
        answer = self._answers.pop((errands.Seen, number), None)
        return {} if answer is None else {each.actor: each for each in answer.actors}

    def ask_ends(self) -> Callable[[], bool]:
        """Asks for the actors that are ending now. Returns what says whether the agent has told of them all, or is lost itself."""
        number = next(self._numbers)
        self.say(errands.AskEnds(number))
        return lambda: self.is_lost or self._ends_told >= number

    # Ending

    def _lose(self, reason: str) -> None:
        if self.is_lost:
            return
        self.is_lost = True
        self._doorbell.unwatch(self._fd)
        self._told.lost(self)
        while self.processes:
            _, process = self.processes.popitem()
            process.fate.end = process.fate.end or f"its node {self.name} cannot be reached: {reason}"
            self._told.end(process)
        self._doorbell.nudge()

    def close(self) -> None:
        """Its actors are to end: the agent sees to it when this connection ends. Idempotent."""
        self.is_lost = True
        self._doorbell.unwatch(self._fd)
        self.connection.close()
        self._stream.close()


class FarProcess:
    """One actor's process on another host; what `ActorProcess` is for one of this host."""

    def __init__(self, name: str, host: FarHost, *, is_borrowed: bool) -> None:
        self.name = name
        self.host = host
        self.is_borrowed = is_borrowed
        self.fate = Fate(name, 0)
        self.known: set[str] = set()
        self.awaited: set[int] = set()
        self.replies: dict[int, control.Returned] = {}

    @property
    def pid(self) -> int:
        """Its number over there."""
        return self.fate.pid

    @property
    def connection(self) -> Connection:
        """The agent's."""
        return self.host.connection

    def post(self, message: Any, fds: tuple[int, ...] = ()) -> None:
        self.host.say(errands.ToActor(self.name, message))

    send = post

    def kill(self) -> None:
        self.host.say(errands.Kill(self.name))
        self.host.processes.pop(self.name, None)
        self.fate.end = self.fate.end or KILLED

    def await_ending(self, timeout_s: float) -> bool:
        return False

    def await_exit(self) -> int | None:
        return None

    def describe_end(self, code: int | None) -> str:
        return f"its process on {self.host.name} has ended"

    def ask(self) -> None:
        """Nothing: `look` does both."""

    def look(self, timeout_s: float) -> ActorState:
        if self.fate.end:
            return self.fate.obituary()
        state = self.host.look(timeout_s).get(self.name)
        return state or ActorState(self.name, self.pid, f"does not answer: it is on {self.host.name}")

    def disown(self) -> None:
        """Nothing: it hangs on the agent."""

    def close(self) -> None:
        """Nothing: it has no descriptors here."""
