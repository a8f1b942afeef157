"""Actors that are forked from a process with preloaded modules, a *template*: the driver's side of `crossfade.engines.template`.

There is one for each set of modules, for all sessions of the program, until that ends. At each start of an actor, what a new
interpreter would see (the environment, the search path, limits and so on) is compared with what the template saw. If that has
changed, another template takes its place; it ends with its last actor. What threads have of their own (the cores that they may
use, the signals that they block, their priority) does not replace a template: threads that differ there have one each.
"""

from __future__ import annotations

import marshal
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Hashable
from contextlib import ExitStack, suppress
from typing import Any, ClassVar, TypeAlias

from crossfade.engines.interpreter import Interpreter, not_started
from crossfade.host.processes import await_end, describe_exit, open_pidfd
from crossfade.interrupted import pause

_CHANGING = ("PYTEST_CURRENT_TEST",)
"""Variables that change all the time and that no module reads when it is imported: each actor gets its own values of them."""

_INHERITED = (
    "Umask",
    "Uid",
    "Gid",
    "Groups",
    "SigIgn",
    "CapPrm",
    "NoNewPrivs",
    "Mems_allowed",
)
"""Lines of ``/proc/thread-self/status`` that say what a process that this thread starts inherits."""

_OF_THREADS = ("SigBlk", "Cpus_allowed")
"""Those of them that threads of one program have differently."""

_NUM_KEPT = 8
"""How many templates wait for requests; of more, the one that was asked the longest time ago leaves."""

_LAST_STEPS_S = 1.0  # how long a template that has closed a socket may take to end, so that its status tells why

_ANSWER_S = 5.0
"""How long a template may take to tell how an actor has ended: one that takes longer was stopped."""

_MAX_BYTES = 1 << 16  # of a message

_Stdio: TypeAlias = tuple[int, int] | tuple[None, None]


class Forked:
    """A `Child` that a template has forked, with this process's stdout and stderr where ``stdio`` has none. An `ActorStartError` if
    that was not possible; nothing is left then.
    """

    is_borrowed = False

    def __init__(
        self, name: str, modules: tuple[str, ...], spin_us: float, stdio: _Stdio, fds: tuple[int, ...]
    ) -> None:
        self._code: int | None = None
        self._has_exited = False
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_ANSWER_S)
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        try:
            with theirs, _Templates.lock:  # no other thread dismisses the template in between
                template = self._template = _template(modules)
                poller.register(template.pidfd, select.POLLIN)
                stdout, stderr = stdio
                own = (1 if stdout is None else stdout, 2 if stderr is None else stderr)
                with suppress(ConnectionError):  # it has ended: that is what will be told
                    template.ask(spin_us, (theirs.fileno(), *own, *fds))
            ready = dict(pause(poller.poll))
            told: tuple[int, str, str] | None = self._receive() if self._socket.fileno() in ready else None
            self.pid, why, hint = told or (-1, template.last_words(), "start the actor again")
            if self.pid < 0:
                with _Templates.lock:
                    template.leave()
                raise not_started(name, why, hint)
        except BaseException:
            self._close()
            raise

    def await_exit(self, pidfd: int) -> int | None:
        """May be called again if it was interrupted, and by another thread. Nothing is left of the process then."""
        while not self._has_exited:
            code = self._receive(socket.MSG_PEEK)
            has_ended = code is not None or await_end(pidfd, _LAST_STEPS_S)
            if self._has_exited:  # another thread has been quicker, and has closed the socket and the pidfd
                return self._code
            if has_ended:
                if code is None:  # a template that was stopped would not tell others either
                    self._template.kill()
                self._code = code
                self._has_exited = True
        self.discard()
        return self._code

    def describe(self, code: int | None) -> str:
        if code is None:
            teller = "the process that it was forked from, which would tell, had ended or was stopped"
            return f"it ended (how is not known: {teller})"
        return describe_exit(code)

    def discard(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        while self._receive() is not None:  # the template kills and buries it, and closes the socket then
            pass
        self._close()

    def _receive(self, flags: int = 0) -> Any:
        """Waits for what the template tells next; None if it tells no more, has ended, or does not answer in time."""
        try:
            data = self._socket.recv(_MAX_BYTES, flags)
        except OSError:  # the template has ended or was stopped, or the socket was closed here
            return None
        return marshal.loads(data) if data else None

    def _close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also where a forked child has the socket, too
        self._socket.close()


class _Template:
    def __init__(self, modules: tuple[str, ...], seen: object) -> None:
        self.seen = seen  # what a new interpreter would have seen when it started
        self._has_left = False
        self._was_asked = False
        self._words = ""
        with (
            ExitStack() as undo,
            ExitStack() as theirs,
        ):  # after an error, all is closed; the template's copies always are
            self._requests, requests = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            undo.callback(self._requests.close)
            theirs.enter_context(requests)
            lifeline_fd, fd = os.pipe()
            theirs.callback(os.close, lifeline_fd)
            self._lifeline = undo.enter_context(open(fd, "wb", buffering=0))
            fds = requests.fileno(), open_pidfd(os.getpid(), theirs), lifeline_fd
            self._process = Interpreter("", "crossfade.engines.template", modules, (None, None), fds)
            undo.callback(self._process.discard)
            self.pidfd = open_pidfd(self._process.pid)
            undo.pop_all()

    def is_of_use(self, seen: object) -> bool:
        return not (self._has_left or self.seen != seen or self.has_ended())

    def has_ended(self, timeout_s: float = 0.0) -> bool:
        return await_end(self.pidfd, timeout_s)

    def ask(self, spin_us: float, fds: tuple[int, ...]) -> None:
        """Asks for an actor. A ConnectionError if the template has ended."""
        self._was_asked = True
        environment = {name: os.environ.get(name) for name in _CHANGING}
        socket.send_fds(self._requests, [marshal.dumps((spin_us, environment))], fds)

    def last_words(self) -> str:
        """Why it says nothing more."""
        with _Templates.lock:
            if not self._words:
                if not self.has_ended(_LAST_STEPS_S):
                    return "the process that it was to be forked from does not answer; it may have no descriptor left"
                how = self._process.describe(self._process.await_exit(self.pidfd))
                self._words = f"the process that it was to be forked from has ended: {how}"
            return self._words

    def kill(self) -> None:
        with suppress(OSError):  # it has ended
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def leave(self) -> None:
        """It is asked for no more actors, and ends with its last one."""
        self._has_left = True
        with suppress(OSError):
            self._requests.shutdown(socket.SHUT_RDWR)

    def end(self) -> None:
        """Ends it, if need be at once: then its actors go on. They have ended as a rule, and it is to bury them first."""
        self.leave()
        if self._was_asked and self.has_ended(_LAST_STEPS_S):
            self.last_words()  # while they can be known
        self._process.discard()
        self.disown()
        self._requests.close()
        pidfd, self.pidfd = self.pidfd, -1
        os.close(pidfd)

    def disown(self) -> None:
        """In a forked child: it must not be what keeps the template alive."""
        self._lifeline.close()


_Kind: TypeAlias = tuple[tuple[str, ...], Hashable]
"""The modules of a template, and what threads have of their own."""


class _Templates:
    by_kind: ClassVar[dict[_Kind, _Template]] = {}  # who was asked last is last
    left: ClassVar[list[_Template]] = []  # they end with their last actors
    lock = threading.RLock()

    @classmethod
    def all(cls) -> list[_Template]:
        return [*cls.by_kind.values(), *cls.left]

    @classmethod
    def dismiss(cls, kind: _Kind) -> None:
        cls.by_kind[kind].leave()
        cls.left.append(cls.by_kind.pop(kind))


def prepare(modules: tuple[str, ...]) -> None:
    """Has a template import the modules, while this process does something else."""
    _template(modules)


def _template(modules: tuple[str, ...]) -> _Template:
    """The one that this thread may ask for an actor."""
    seen, of_thread = _seen()
    asked = modules, of_thread
    with _Templates.lock:
        for kind, template in list(_Templates.by_kind.items()):
            if kind[0] == modules and not template.is_of_use(seen):
                _Templates.dismiss(kind)
        found = _Templates.by_kind.pop(asked, None) or _Template(modules, seen)
        _Templates.by_kind[asked] = found
        if len(_Templates.by_kind) > _NUM_KEPT:
            _Templates.dismiss(next(iter(_Templates.by_kind)))
        for template in [each for each in _Templates.left if each.has_ended()]:
            _Templates.left.remove(template)
            template.end()
        return found


def _seen() -> tuple[object, Hashable]:
    """What an interpreter sees that this thread starts now: of the program, and of this thread."""
    with open("/proc/thread-self/status") as status, open("/proc/thread-self/limits") as limits:
        lines = status.readlines()
        limited = limits.read()
    inherited = [line for line in lines if line.startswith(_INHERITED)]
    here = os.stat(".")
    environment = {name: value for name, value in os.environ.items() if name not in _CHANGING}
    group = os.getpgrp(), os.getsid(0)
    seen = sys.executable, [*map(str, sys.path)], environment, (here.st_dev, here.st_ino), group, inherited, limited
    return seen, (os.getpriority(os.PRIO_PROCESS, 0), *(line for line in lines if line.startswith(_OF_THREADS)))


def end_templates() -> None:
    """Ends all of them, at the end of the program. Actors that are left go on."""
    for template in _Templates.all():
        template.end()
    _disown()


def _disown() -> None:
    """In a forked child: forgets the templates, which are its parent's."""
    for template in _Templates.all():
        template.disown()
    _Templates.by_kind, _Templates.left, _Templates.lock = {}, [], threading.RLock()


os.register_at_fork(after_in_child=_disown)
