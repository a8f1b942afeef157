"""Writes to ``sys.stdout`` and ``sys.stderr``, whatever these are now, in pieces that a pipe with room takes at once."""

from __future__ import annotations

import array
import fcntl
import os
import select
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import suppress

_PIECE_BYTES = select.PIPE_BUF  # how many bytes a pipe that is ready for writing takes without blocking

_LETTER_BYTES = 4  # the most bytes that one character takes

_FORK_WAIT_S = 1.0

_writing = threading.Lock()
"""Held while a thread writes. A fork waits up to a second for it, so a child inherits no half-written buffer and no held lock."""


def pieces(text: str) -> Iterator[str]:
    """Splits a text into pieces, after line ends where possible."""
    num_letters = _PIECE_BYTES if text.isascii() else _PIECE_BYTES // _LETTER_BYTES
    start = 0
    while start < len(text):
        end = start + num_letters
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end


def fd_of(stream: str) -> int:
    """Returns the descriptor behind ``sys.stdout`` or ``sys.stderr``; -1 if there is none."""
    with suppress(Exception):  # a program may have put any object there
        return int(getattr(sys, stream).fileno())
    return -1


def has_room(stream: str) -> bool:
    """Whether ``sys.stdout`` or ``sys.stderr`` takes a piece at once; True if that cannot be known."""
    fd = fd_of(stream)
    if fd < 0:
        return True
    poller = select.poll()
    poller.register(fd, select.POLLOUT)
    return bool(poller.poll(0))


def num_unread(fd: int) -> int:
    """Returns the number of bytes in a pipe that are not read yet."""
    count = array.array("i", [0])
    fcntl.ioctl(fd, termios.FIONREAD, count)
    return count[0]


def write(text: str, stream: str) -> None:
    """Writes to ``sys.stdout`` or ``sys.stderr``. Errors are ignored: there is no place to report them."""
    with _writing:
        write_beside(text, stream)


def write_beside(text: str, stream: str) -> None:
    """Writes as `write` does, but without its lock, for use while another thread is blocked writing to the other stream."""
    file = getattr(sys, stream)
    if text and file is not None:
        with suppress(Exception):
            try:
                file.write(text)
            except UnicodeEncodeError:
                encoding = file.encoding or "ascii"
                file.write(text.encode(encoding, "replace").decode(encoding))
            file.flush()


class _Forking:
    """Notes whether the thread that forks holds the lock."""

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
