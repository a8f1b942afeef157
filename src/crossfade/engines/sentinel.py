"""The thread of an actor that is there while the main thread is busy.

It ends the process when the driver is gone, and tells what the main thread is doing when the driver asks. It sleeps otherwise,
but in an actor whose GPUs take part in graphs: there it asks them now and then whether they have failed. A GPU that has (a kernel
took an illegal address, say) does nothing more for this process, which hears of it when it asks for something next; and other GPUs
wait for what it had been given. So the process is ended, which lets them go.

The driver asks over a connection of its own (the *side door*): the control connection belongs to the main thread.
"""

from __future__ import annotations

import faulthandler
import linecache
import os
import pickle
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from crossfade.engines.state import ActorState
from crossfade.host.memory import Memory
from crossfade.host.processes import die_on_hangup
from crossfade.host.sockets import Connection

STACKS_SIGNAL = signal.SIGRTMAX - 1
"""Makes an actor write its stacks into the memory that it shares with the driver, also while it holds the interpreter lock."""

_THREAD = re.compile(r"^(?:Thread|Current thread) 0x([0-9a-f]+)[^\n]*:\n((?:  .*\n)*)", re.MULTILINE)
_CALL = re.compile(r'  File "(.*)", line (\d+) in (.*)')
_ESCAPED = re.compile(r"\\x([0-9a-f]{2})|\\u([0-9a-f]{4})|\\U([0-9a-f]{8})")
"""What faulthandler writes: a thread, a call of it, and a letter that is not ASCII."""

_LAST_LINES = (b" in <module>\n", b"  ...\n")
"""How it ends: with the outermost call of the main thread, or with what stands for those outside of the hundredth."""

_POLL_S = 0.005

_ASK_S = 0.2  # how often devices are asked

_GRACE_S = 0.3
"""How long a process whose device has failed continues: a method that has met it may tell in words of its own."""


@dataclass(frozen=True, slots=True)
class _Question:
    number: int


@dataclass(frozen=True, slots=True)
class _Answer:
    number: int
    state: ActorState


@dataclass(frozen=True, slots=True)
class _LastWords:
    """From a sentinel that ends its process: why."""

    reason: str


class Sentinel:
    """The actor's side. ``driver_pidfd`` is readable once the driver has ended, which holds the other end of ``lifeline_fd``. Where
    the actor ``is_guest`` in a process of somebody else's, that process and its signals are left alone.
    """

    def __init__(
        self,
        driver_pidfd: int,
        lifeline_fd: int,
        door: Connection,
        stacks_fd: int,
        describe: Callable[[], ActorState],
        *,
        is_guest: bool = False,
    ) -> None:
        self._is_guest = is_guest
        self._driver_pidfd = driver_pidfd
        self._door = door
        self._describe = describe
        self._failure: Callable[[], str] | None = None
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._fds = (driver_pidfd, lifeline_fd, stacks_fd)
        if not is_guest:
            die_on_hangup(lifeline_fd)
            faulthandler.register(STACKS_SIGNAL, file=stacks_fd, all_threads=True)
            faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or 2, all_threads=True)
        threading.Thread(target=self._watch, name="crossfade-sentinel", daemon=True).start()

    def look_after(self, failure: Callable[[], str]) -> None:
        """Asks ``failure`` in this thread, several times a second from now on, how devices have failed; empty if not."""
        self._failure = failure
        os.eventfd_write(self._wake_fd, 1)

    def _watch(self) -> None:
        poller = select.poll()
        for fd in (self._driver_pidfd, self._wake_fd, self._door):
            poller.register(fd, select.POLLIN)
        while True:
            ready = {fd for fd, _ in poller.poll(_ASK_S * 1e3 if self._failure is not None else None)}
            if self._driver_pidfd in ready:
                if not self._is_guest:
                    os._exit(1)
                self._release()
                return
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
            self._answer_all()
            if self._door.is_closed:
                if self._is_guest:  # the driver has closed its side: this actor is not its own any more
                    self._release()
                    return
                poller.unregister(self._door)
            if failure := self._ask():
                self._end(failure)

    def _release(self) -> None:
        self._door.close()
        for fd in (*self._fds, self._wake_fd):
            os.close(fd)

    def _ask(self) -> str:
        try:
            return self._failure() if self._failure is not None else ""
        except Exception:  # there is no reason to end the process in that; but the driver has to be watched on
            traceback.print_exc()
            self._failure = None
            return ""

    def _end(self, failure: str) -> NoReturn:
        grace = select.poll()
        grace.register(self._driver_pidfd, select.POLLIN)
        grace.poll(_GRACE_S * 1e3)
        with suppress(OSError):
            self._door.send(pickle.dumps(_LastWords(failure), 5))
        os._exit(1)

    def _answer_all(self) -> None:
        with suppress(
            OSError
        ):  # the driver has hung up, its pidfd says the rest; or a stranger has written to the door
            while (message := self._door.take()) is not None:
                question: _Question = pickle.loads(message.payload)
                self._door.send(pickle.dumps(_Answer(question.number, self._describe()), 5))


class SideDoor:
    """The driver's side."""

    def __init__(self, door: Connection, stacks: Memory) -> None:
        self._door = door
        self._stacks = stacks
        self._number = 0
        self._last_words = ""

    def ask(self) -> None:
        """Asks what the actor is doing; does not wait."""
        self._number += 1
        try:
            self._door.send(pickle.dumps(_Question(self._number), 5))
        except OSError:
            return  # it is dying

    def answer(self, timeout_s: float) -> ActorState | None:
        """The answer to the latest question, or None if it did not come in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(OSError):  # what comes is not the actor's: as if nothing came
                while (message := self._door.take()) is not None:
                    answer: _Answer | _LastWords = pickle.loads(message.payload)
                    if isinstance(answer, _LastWords):
                        self._last_words = answer.reason
                    elif answer.number == self._number:
                        return answer.state
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._door.is_closed:
                return None
            self._door.wait(left_s)

    def last_words(self) -> str:
        """Once the process has ended: why it ended itself, if a sentinel did it."""
        while self.answer(0.0) is not None:
            pass
        return self._last_words

    def stacks_by_signal(self, pid: int, timeout_s: float) -> str:
        """The stacks of an actor that does not answer: it writes them without taking the interpreter lock.

        Empty if it has written nothing in that time.
        """
        before = os.lseek(self._stacks.fd, 0, os.SEEK_CUR)  # the two processes share the position
        try:
            os.kill(pid, STACKS_SIGNAL)
        except ProcessLookupError:
            return ""
        deadline = time.monotonic() + timeout_s
        text = b""
        while (
            time.monotonic() < deadline
        ):  # nothing tells when the handler is done; it writes line by line, and may be held up
            time.sleep(_POLL_S)
            last, text = text, os.pread(self._stacks.fd, os.lseek(self._stacks.fd, 0, os.SEEK_CUR) - before, before)
            if text != last:
                deadline = time.monotonic() + timeout_s
            elif text.endswith(_LAST_LINES):
                break
        return text.decode(errors="replace")

    def close(self) -> None:
        self._door.close()
        self._stacks.close()


def all_stacks() -> str:
    """The stack of each thread of this process, the main thread's last.

    What other threads are doing is read in one go, in which none of them runs: who follows their frames from Python follows some
    that are gone meanwhile, which has crashed interpreters.
    """
    fd = os.memfd_create("crossfade-own-stacks", os.MFD_CLOEXEC)
    try:
        faulthandler.dump_traceback(fd, all_threads=True)
        text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
    finally:
        os.close(fd)
    linecache.checkcache()
    stacks = {int(ident, 16): _as_tracebacks_show_it(stack) for ident, stack in _THREAD.findall(text)}
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    if main is not None and main not in stacks:  # it is the oldest, and was left out: there are more than a hundred
        stacks[main] = "".join(traceback.format_stack(sys._current_frames().get(main)))
    return "".join(
        f"thread {names.get(ident, ident)}:\n{stack}"
        for ident, stack in sorted(stacks.items(), key=lambda each: each[0] == main)
        if ident != own or ident == main
    )


def _as_tracebacks_show_it(stack: str) -> str:
    """A stack of faulthandler's, the oldest call first and with the text of the lines."""
    entries = []
    for line in stack.splitlines():
        if call := _CALL.fullmatch(line):
            path, number, name = (_ESCAPED.sub(lambda code: chr(int(code[0][2:], 16)), part) for part in call.groups())
            source = linecache.getline(path, int(number)).strip()
            entries.append(f'  File "{path}", line {number}, in {name}\n' + (f"    {source}\n" if source else ""))
        elif line.strip():
            entries.append(f"{line}\n")
    return "".join(reversed(entries))
