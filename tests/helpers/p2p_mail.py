"""Letters, sends and receives of one rank's side of a pair, whose other rank is the test."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any

from crossfade.p2p.letters import Letter
from crossfade.p2p.transfer import Receive, Send

BYTES = 1024


class Mail:
    """Letters to this rank, and those that it has written."""

    def __init__(self) -> None:
        self.inbox: deque[Letter] = deque()
        self.written: list[Letter] = []
        self.is_full = False

    def have_come(self) -> bool:
        return bool(self.inbox)

    def take(self) -> Letter | None:
        return self.inbox.popleft() if self.inbox else None

    def put(self, letter: Letter) -> None:
        self.written.append(letter)

    def flush(self) -> bool:
        return not self.is_full

    def drop(self) -> None:
        self.inbox.clear()


def _side() -> Any:
    return SimpleNamespace(is_host=False)


def _tensor() -> Any:
    return SimpleNamespace(nbytes=BYTES)


def a_send(tag: int = 0) -> Send:
    return Send(_side(), tag, 1, _tensor(), (BYTES,), 0, 0)


def a_receive(tag: int = 0) -> Receive:
    return Receive(_side(), tag, 1, _tensor(), 0)
