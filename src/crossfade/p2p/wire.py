"""A stream of letters and values each way between two ranks on different hosts.

A value travels right behind the letter `Here`, which its receiver has asked for: so it knows by then where the value goes, and
nothing has to be matched a second time. Each direction has a thread, which works on while the program is busy.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from crossfade.errors import ChannelBroken
from crossfade.host.tcp import Stream
from crossfade.p2p.letters import Here, Left, Letter, pack, unpack

_LAST_S = 10.0
"""How long letters may take that are on their way when both ranks have ended."""


class Load(NamedTuple):
    """A value that is sent. Both functions are called in a thread of the wire."""

    value: memoryview  # bytes of the host
    wait: Callable[[], object]  # returns when the value may be read
    on_sent: Callable[[], object]


class Wire:
    """The letters to one rank of another host, and from it (see `crossfade.p2p.carrier.Letters`), and values.

    Args:
        stream: to the other rank.
        name: of the other rank, for errors.
        on_change: called in a thread of the wire when a letter or an end has come.
        enter_thread: called first in such a thread.
    """

    def __init__(
        self,
        stream: Stream,
        name: str,
        on_change: Callable[[], object],
        enter_thread: Callable[[], object],
    ) -> None:
        self.failure: Exception | None = None  # why nothing comes or goes any more
        self._stream = stream
        self._name = name
        self._on_change = on_change
        self._enter_thread = enter_thread
        self._landings: dict[int, memoryview] = {}  # bytes of the host, by number of the value
        self._letters: deque[Letter] = deque()
        self._loads: dict[int, Load] = {}
        self._parcels: SimpleQueue[tuple[Letter, Load | None] | None] = SimpleQueue()
        self._has_left = False  # the other rank sends nothing any more
        self._threads = [
            threading.Thread(target=self._run, args=(work,), name="crossfade-p2p-wire", daemon=True)
            for work in (Wire._bring_in, Wire._send_out)
        ]
        for thread in self._threads:
            thread.start()

    def have_come(self) -> bool:
        return bool(self._letters) or self.failure is not None

    def take(self) -> Letter | None:
        return self._letters.popleft() if self._letters else None

    def put(self, letter: Letter) -> None:
        load = self._loads.pop(letter.number, None) if isinstance(letter, Here) else None
        self._parcels.put((letter, load))

    def load(self, number: int, load: Load) -> None:
        """The value that the letter `Here` with this number brings along."""
        self._loads[number] = load

    def flush(self) -> bool:
        """A thread sees to it."""
        return True

    def drop(self) -> None:
        self._parcels.put(None)

    def expect(self, number: int, landing: memoryview) -> None:
        """A value that is about to be requested goes into these bytes. They are complete when its `Here` is taken."""
        self._landings[number] = landing

    def _run(self, work: Callable[[Wire], None]) -> None:
        try:
            self._enter_thread()
            work(self)
        except Exception as error:  # also of a device, whose copy was to be sent
            self._fail(str(error) or "its connection was closed")
        self._on_change()

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or ChannelBroken(f"{self._name} died, or cannot be reached any more: {reason}")
        self._stream.end()
        self.drop()

    def _bring_in(self) -> None:
        while not self._has_left:
            letter = unpack(self._stream.receive())
            if isinstance(letter, Here):
                self._stream.receive_plain(self._landings.pop(letter.number))
            self._letters.append(letter)
            self._has_left = isinstance(letter, Left)
            self._on_change()

    def _send_out(self) -> None:
        letter: Letter | None = None
        while not isinstance(letter, Left) and (parcel := self._parcels.get()) is not None:
            letter, load = parcel
            self._stream.send(pack(letter))
            if load is not None:
                load.wait()
                self._stream.send_plain(load.value)
                load.on_sent()
                self._on_change()

    def close(self) -> None:
        """Ends the threads; what was put is sent before, if the other rank has come to its end, too. Idempotent."""
        self.drop()
        for thread in reversed(self._threads):
            thread.join(_LAST_S if self._has_left else 0)
            if thread.is_alive():
                self._stream.end()
                thread.join()
        self._stream.close()
        self._landings.clear()
        self._loads.clear()
        self._parcels = SimpleQueue()
