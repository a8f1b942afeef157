"""What actors print, shown by the driver: ``(Worker0 pid=123) step 1``.

An actor's stdout and stderr are pipes. One thread of the driver, started with the first actor, sleeps on all of them and writes
whole lines to ``sys.stdout`` and ``sys.stderr`` as they are at that moment (pytest and notebooks replace them).
"""

from __future__ import annotations

import array
import codecs
import fcntl
import os
import select
import sys
import termios
import threading
from collections import deque
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Self

from crossfade.interrupted import longest_sleep

__all__ = ["MAX_LINE_LETTERS", "Lines", "Output", "Pipes"]

MAX_LINE_LETTERS = 1 << 16
"""A longer line is shown in pieces."""

_CHUNK_BYTES = 1 << 16

_writing = threading.Lock()
"""Held while the thread writes. A fork waits for it, so that the child has no half-written buffer and no lock that nobody frees."""

_FORK_WAIT_S = 1.0


class Lines:
    """Puts what comes out of a pipe together to prefixed lines. Text only, no files.

    Args:
        prefix: what each line begins with.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._rest = ""  # the beginning of a line whose end has not come

    def feed(self, data: bytes) -> str:
        """The lines that are whole now, each with its end."""
        *whole, rest = (self._rest + self._decoder.decode(data)).split("\n")
        num_pieces = len(rest) // MAX_LINE_LETTERS
        whole += [rest[k * MAX_LINE_LETTERS : (k + 1) * MAX_LINE_LETTERS] for k in range(num_pieces)]
        self._rest = rest[num_pieces * MAX_LINE_LETTERS :]
        return "".join(f"{self._prefix}{line}\n" for line in whole)

    def flush(self) -> str:
        """What is left: a last line without an end."""
        rest, self._rest = self._rest + self._decoder.decode(b"", final=True), ""
        return f"{self._prefix}{rest}\n" if rest else ""


@dataclass(slots=True)
class _Stream:
    """One pipe of one actor."""

    fd: int
    stream: str  # "stdout" or "stderr"
    lines: Lines


class Pipes:
    """The two pipes of an actor that is about to be started. A context manager; both are closed unless `follow` was called.

    Attributes:
        for_child: the write ends of stdout and stderr, or (None, None): the actor inherits the driver's.
    """

    def __init__(self, output: Output | None) -> None:
        self._output = output
        self._read_fds: tuple[int, ...] = ()
        self._undo = ExitStack()
        self.for_child: tuple[int, int] | tuple[None, None] = (None, None)

    def __enter__(self) -> Self:
        if self._output is not None:
            with ExitStack() as undo:
                out_fd, out_child_fd = self._pipe(undo)
                err_fd, err_child_fd = self._pipe(undo)
                self._undo = undo.pop_all()
            self._read_fds, self.for_child = (out_fd, err_fd), (out_child_fd, err_child_fd)
        return self

    @staticmethod
    def _pipe(undo: ExitStack) -> tuple[int, int]:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        undo.callback(os.close, read_fd)
        undo.callback(os.close, write_fd)
        os.set_blocking(read_fd, False)
        return read_fd, write_fd

    def follow(self, actor: str, pid: int, pidfd: int) -> None:
        """Shows what comes out from now on.

        Args:
            actor: the actor's name.
            pid: its process.
            pidfd: readable once that has ended; a duplicate is kept.
        """
        if self._output is not None:
            self._undo.pop_all()
            for fd in self.for_child:
                if fd is not None:
                    os.close(fd)
            lines = [Lines(f"({actor} pid={pid}) ") for _ in range(2)]
            streams = [
                _Stream(fd, name, each)
                for fd, name, each in zip(self._read_fds, ("stdout", "stderr"), lines, strict=True)
            ]
            self._output.add(os.dup(pidfd), streams)

    def __exit__(self, *exception: object) -> None:
        self._undo.close()


class Output:
    """Shows what the actors of an engine print. The thread starts with the first actor and uses no CPU while nobody prints."""

    def __init__(self) -> None:
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._poller = select.poll()
        self._poller.register(self._wake_fd, select.POLLIN)
        self._new: deque[tuple[int, list[_Stream]]] = deque()
        self._streams: dict[int, _Stream] = {}
        self._ends: dict[int, list[_Stream]] = {}  # by the pidfd of the actor
        self._is_ending = False
        self._is_starting = False
        self._thread: threading.Thread | None = None
        self._starting = threading.RLock()  # a signal's handler may end the session where its thread has it

    def add(self, pidfd: int, streams: list[_Stream]) -> None:
        """Follows one more actor. The descriptors are this object's from now on."""
        self._new.append((pidfd, streams))
        with self._starting:
            if self._thread is None and not self._is_ending:
                self._is_starting = True
                try:
                    thread = threading.Thread(target=self._run, name="crossfade-output", daemon=True)
                    thread.start()
                    self._thread = thread
                finally:
                    self._is_starting = False
        if self._is_ending:  # a signal's handler has ended the session in the middle of this
            self.close()
        else:
            os.eventfd_write(self._wake_fd, 1)

    def _run(self) -> None:
        while not self._is_ending:
            for fd, _ in self._poller.poll():
                self._look(fd)
        self._take_new()
        for stream in list(self._streams.values()):
            self._drain(stream)

    def _look(self, fd: int) -> None:
        if fd == self._wake_fd:
            with suppress(BlockingIOError):
                os.eventfd_read(fd)
            self._take_new()
        elif fd in self._ends:
            for stream in self._forget(fd):
                if stream.fd in self._streams:
                    self._drain(stream)
        elif fd in self._streams:
            self._read(self._streams[fd])

    def _take_new(self) -> None:
        while self._new:
            pidfd, streams = self._new.popleft()
            self._ends[pidfd] = streams
            self._poller.register(pidfd, select.POLLIN)
            for stream in streams:
                self._streams[stream.fd] = stream
                self._poller.register(stream.fd, select.POLLIN)

    def _forget(self, pidfd: int) -> list[_Stream]:
        """The actor has ended. Its pipes are followed on: a process that it started may hold them."""
        self._poller.unregister(pidfd)
        os.close(pidfd)
        return self._ends.pop(pidfd)

    def _read(self, stream: _Stream) -> None:
        try:
            data = os.read(stream.fd, _CHUNK_BYTES)
        except BlockingIOError:
            return
        if data:
            _show(stream.lines.feed(data), stream.stream)
        else:
            self._close(stream)

    def _drain(self, stream: _Stream) -> None:
        """Shows all that is in the pipe now, a last line without its end too, whoever may go on writing."""
        left_bytes = _num_unread(stream.fd)
        while left_bytes > 0:
            data = os.read(stream.fd, min(left_bytes, _CHUNK_BYTES))
            _show(stream.lines.feed(data), stream.stream)
            left_bytes -= len(data) or left_bytes
        _show(stream.lines.flush(), stream.stream)

    def _close(self, stream: _Stream) -> None:
        _show(stream.lines.flush(), stream.stream)
        self._poller.unregister(stream.fd)
        del self._streams[stream.fd]
        os.close(stream.fd)

    def close(self) -> None:
        """Shows what is left and ends the thread. Idempotent. Waits as long as ``sys.stdout`` takes to accept it."""
        with self._starting:
            self._is_ending = True
            if self._is_starting:  # in a signal's handler, in the middle of `add`: that closes it
                return
            thread = self._thread
        if self._wake_fd >= 0:
            os.eventfd_write(self._wake_fd, 1)
        if thread is not None and thread is not threading.current_thread():
            while thread.is_alive():
                thread.join(longest_sleep(None))
        self._thread = None
        self._close_fds()

    def disown(self) -> None:
        """In a forked child, which has no such thread: the actors are its parent's."""
        self._thread = None
        self._close_fds()

    def _close_fds(self) -> None:
        new = list(self._new)
        fds = [*self._ends, *self._streams, *(pidfd for pidfd, _ in new), self._wake_fd]
        fds += [stream.fd for _, streams in new for stream in streams]
        self._new.clear()
        self._ends.clear()
        self._streams.clear()
        self._wake_fd = -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


def _num_unread(fd: int) -> int:
    """Bytes that are in a pipe."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def _show(text: str, stream: str) -> None:
    """Writes to ``sys.stdout`` or ``sys.stderr``, whatever these are now. What they refuse is lost: nobody could be told."""
    file = getattr(sys, stream)
    if text and file is not None:
        with _writing, suppress(Exception):
            try:
                file.write(text)
            except UnicodeEncodeError:
                encoding = file.encoding or "ascii"
                file.write(text.encode(encoding, "replace").decode(encoding))
            file.flush()


class _Forking:
    """Whether the thread that forks holds the lock."""

    has_lock = False


def _before_fork() -> None:
    _Forking.has_lock = _writing.acquire(timeout=_FORK_WAIT_S)


def _after_fork_in_parent() -> None:
    if _Forking.has_lock:
        _writing.release()


def _after_fork_in_child() -> None:
    global _writing
    _writing = threading.Lock()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
