"""A pair's sends that wait for something of the other rank's host."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from crossfade.p2p.letters import Pulled
from crossfade.p2p.transfer import OpenWindow, Send


class Lent(NamedTuple):
    """A send whose value is read where it lies, and which waits for `Pulled`."""

    send: Send
    window: OpenWindow
    is_requested: bool  # its receive has begun


class Pending:
    """Announced sends, until their values need nothing of the other rank's host any more."""

    def __init__(self) -> None:
        self._unserved: dict[int, Send] = {}  # announced without a window, by number
        self.wanted: deque[tuple[int, Send]] = deque()  # requested of these
        # By kind, word and uses: a device may have done with a window, and another one have its word, before the letter comes.
        self._lent: dict[tuple[bool, int, int], Lent] = {}

    def put(self, number: int, send: Send) -> None:
        """It is announced without a window."""
        self._unserved[number] = send

    def take(self, number: int) -> Send | None:
        """The send that was put with a number, and is put no more."""
        return self._unserved.pop(number, None)

    def request(self, number: int) -> None:
        """The receive of one that was put has begun."""
        self.wanted.append((number, self._unserved.pop(number)))

    def lend(self, send: Send, window: OpenWindow, *, is_requested: bool) -> None:
        """Its value lies in its own tensor."""
        self._lent[send.side.is_host, window.word, window.uses] = Lent(send, window, is_requested)

    def give_back(self, pulled: Pulled) -> Lent:
        """The copy out of one that was lent is enqueued."""
        return self._lent.pop((pulled.is_host, pulled.word, pulled.uses))

    def refuse(self, send: Send, window: OpenWindow) -> None:
        """Nobody copies out of a window: it may have been lent."""
        window.is_void = True
        self._lent.pop((send.side.is_host, window.word, window.uses), None)

    @property
    def has_any_without_window(self) -> bool:
        """Whether the other rank waits, or may come to wait, for this one's host to make a value reachable."""
        return bool(self._unserved or self.wanted)

    def take_unmet(self) -> list[Send]:
        """Those that have met no receive, and will meet none any more. Those that were requested have met one."""
        lent = {key: each for key, each in self._lent.items() if not each.is_requested}
        sends = [*self._unserved.values(), *(each.send for each in lent.values())]
        self._unserved.clear()
        for key in lent:
            del self._lent[key]
        return sends

    def take_all(self) -> list[Send]:
        """All: the other rank is gone."""
        sends = [*self.take_unmet(), *(send for _, send in self.wanted), *(each.send for each in self._lent.values())]
        self.wanted.clear()
        self._lent.clear()
        return sends
