"""What actors print, shown by the driver: ``(Worker0 pid=123) step 1``.

An actor's stdout and stderr are pipes. One thread of the driver, started with the first actor, sleeps on all of them and writes
whole lines to ``sys.stdout`` and ``sys.stderr`` as they are at that moment (pytest and notebooks replace them).

The thread waits as long as nothing reads those streams (such as a pager that is not scrolled), and the actors wait with it once
their pipes are full. Only `Output.close` gives up: after a second in which nothing was read.
"""

from __future__ import annotations

import codecs
import os
import select
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Self

from crossfade.engines.writing import fd_of, has_room, num_unread, pieces, write, write_beside

MAX_LINE_LETTERS = 1 << 16  # a longer line is shown in pieces

_CHUNK_BYTES = 1 << 16

_PATIENCE_S = 1.0
"""How long `Output.close` waits for the reader of a stream to read anything. Each byte read starts the time anew."""

_NUM_NAMED = 8  # for how many actors the closing message says how much was not shown


class _GivenUp(Exception):
    """Ends the thread after `Output.close` has given up: the thread must not touch the `Output` any more."""


class Lines:
    """Puts what comes out of a pipe together to lines with a prefix. Text only, no files."""

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
    actor: str
    fd: int
    stream: str  # "stdout" or "stderr"
    lines: Lines
    unshown: deque[str] = field(default_factory=deque)  # pieces of output that are not written yet


class Pipes:
    """The two pipes of an actor that is about to be started. A context manager; both are closed unless `follow` was called."""

    def __init__(self, output: Output | None) -> None:
        self._output = output
        self._read_fds: tuple[int, ...] = ()
        self._undo = ExitStack()
        # the write ends of stdout and stderr, or (None, None): the actor inherits the driver's.
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
        """Shows what a process prints from now on. A duplicate of the pidfd, which is readable once it has ended, is kept."""
        if self._output is not None:
            end_fd = os.dup(pidfd)  # done first, since it may raise
            self._undo.pop_all()
            for fd in self.for_child:
                if fd is not None:
                    os.close(fd)
            lines = [Lines(f"({actor} pid={pid}) ") for _ in range(2)]
            streams = [
                _Stream(actor, fd, name, each)
                for fd, name, each in zip(self._read_fds, ("stdout", "stderr"), lines, strict=True)
            ]
            self._output.add(end_fd, streams)

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
        self._stream = ""  # the stream that is being written to
        self._num_shown = 0  # pieces
        self._has_given_up = False
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
        with suppress(_GivenUp):
            self._follow()

    def _follow(self) -> None:
        while not self._is_ending:
            for fd, _ in self._poller.poll():
                self._look(fd)
        self._take_new()
        for stream in list(self._streams.values()):
            self._drain(stream)

    def _look(self, fd: int) -> None:
        if fd == self._wake_fd:
            self._wake()
        elif fd in self._ends:
            for stream in self._forget(fd):
                if stream.fd in self._streams:
                    self._drain(stream)
        elif fd in self._streams:
            self._read(self._streams[fd])

    def _wake(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)
        self._take_new()

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
            self._show(stream, stream.lines.feed(data))
        else:
            self._close(stream)

    def _drain(self, stream: _Stream) -> None:
        """Shows all that is in the pipe now, a last line without its end too, also if others still write."""
        for text in self._left(stream):
            self._show(stream, text)

    @staticmethod
    def _left(stream: _Stream) -> Iterator[str]:
        left_bytes = num_unread(stream.fd)
        while left_bytes > 0:
            data = os.read(stream.fd, min(left_bytes, _CHUNK_BYTES))
            yield stream.lines.feed(data)
            left_bytes -= len(data) or left_bytes
        yield stream.lines.flush()

    def _close(self, stream: _Stream) -> None:
        self._show(stream, stream.lines.flush())
        self._poller.unregister(stream.fd)
        del self._streams[stream.fd]
        os.close(stream.fd)

    def _show(self, stream: _Stream, text: str) -> None:
        """Writes to ``sys.stdout`` or ``sys.stderr``, whatever these are now, as fast as the stream takes it."""
        stream.unshown.extend(pieces(text))
        self._stream = stream.stream
        while stream.unshown:
            self._await_room()
            write(stream.unshown[0], stream.stream)
            if self._has_given_up:
                raise _GivenUp
            stream.unshown.popleft()
            self._num_shown += 1

    def _await_room(self) -> None:
        """Waits until a piece can be written at once. (If the thread blocked in the middle of a write, other threads and the end of
        the interpreter would have to wait for ``sys.stdout``.)
        """
        fd = fd_of(self._stream)
        if fd < 0:
            return
        poller = select.poll()
        poller.register(fd, select.POLLOUT)
        poller.register(self._wake_fd, select.POLLIN)
        while all(ready != fd for ready, _ in poller.poll()):
            if self._has_given_up:
                raise _GivenUp
            self._wake()

    def close(self) -> None:
        """Shows what is left and ends the thread. Idempotent. Gives up after a second in which the stream's reader read nothing."""
        with self._starting:
            self._is_ending = True
            if self._is_starting:  # in a signal's handler, in the middle of `add`: that closes it
                return
            thread = self._thread
        self._wake_up()
        if thread is not None and thread is not threading.current_thread() and not self._has_ended(thread):
            self._has_given_up = True
            self._wake_up()
            thread.join(_PATIENCE_S)  # a thread that is still writing then touches nothing here afterwards
            self._tell_unshown()
        self._thread = None
        self._close_fds()

    def _wake_up(self) -> None:
        if self._wake_fd >= 0:  # a signal's handler may have closed it
            os.eventfd_write(self._wake_fd, 1)

    def _has_ended(self, thread: threading.Thread) -> bool:
        """Waits for the thread to end. False after a second in which the stream's reader has read nothing."""
        while thread.is_alive():
            before = self._progress()
            thread.join(_PATIENCE_S)
            if thread.is_alive() and self._progress() == before:
                return False
        return True

    def _progress(self) -> tuple[int, int]:
        """Returns counts that change whenever something is read: pieces written, and bytes left in the pipe, if it is one."""
        with suppress(OSError, ValueError):  # the stream is no pipe, or has no descriptor
            return self._num_shown, num_unread(fd_of(self._stream))
        return self._num_shown, 0

    def _tell_unshown(self) -> None:
        """Says on stderr what was not shown, if stderr takes it at once."""
        self._take_new()
        texts: dict[str, str] = {}
        for stream in self._streams.values():
            text = "".join((*stream.unshown, *self._left(stream)))
            texts[stream.actor] = texts.get(stream.actor, "") + text
        told = [f"{text.count(chr(10))} lines ({len(text.encode())} bytes) of {a}" for a, text in texts.items() if text]
        more = f" and of {len(told) - _NUM_NAMED} other actors" if len(told) > _NUM_NAMED else ""
        what = ", ".join(told[:_NUM_NAMED]) + more
        if told and has_room("stderr"):
            write_beside(f"crossfade: nobody reads {self._stream}, so this was not shown: {what}\n", "stderr")

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
