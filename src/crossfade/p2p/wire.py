"""A stream of letters and values each way between two ranks on different hosts, over gloo.

A value travels right behind the letter `Here`, which its receiver has asked for: so it knows by then where the value goes, and
nothing has to be matched a second time. Each direction has a thread, since gloo tells of an end only by a call that waits for it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import ChannelBroken
from crossfade.p2p.letters import LETTER_BYTES, Here, Left, Letter, pack, unpack

if TYPE_CHECKING:
    import torch

__all__ = ["Load", "Wire"]

_EVER = timedelta(days=365)
_AT_ONCE = timedelta(milliseconds=1)
_AGAIN_S = 0.05
_LAST_S = 10.0


class Load(NamedTuple):
    """A value that is sent. Both functions are called in a thread of the wire."""

    value: torch.Tensor  # bytes of the host
    wait: Callable[[], object]  # returns when the value may be read
    on_sent: Callable[[], object]


class Wire:
    """The letters to one rank of another host, and from it (see `crossfade.p2p.carrier.Letters`), and values.

    Args:
        gloo: torch's backend, of which nobody else sends or receives anything.
        rank: the other one, in that group.
        name: of the other rank, for errors.
        on_change: called in a thread of the wire when a letter or an end has come.
        enter_thread: called first in such a thread.
    """

    def __init__(
        self,
        gloo: Any,
        rank: int,
        name: str,
        on_change: Callable[[], object],
        enter_thread: Callable[[], object],
    ) -> None:
        self.failure: Exception | None = None  # why nothing comes or goes any more
        self._gloo = gloo
        self._rank = rank
        self._name = name
        self._on_change = on_change
        self._enter_thread = enter_thread
        self._landings: dict[int, torch.Tensor] = {}  # bytes of the host, by number of the value
        self._letters: deque[Letter] = deque()
        self._loads: dict[int, Load] = {}
        self._parcels: SimpleQueue[tuple[Letter, Load | None] | None] = SimpleQueue()
        self._works: dict[str, Any] = {}  # what each thread waits for
        self._has_left = False  # the other rank sends nothing any more
        self._threads = {
            way: threading.Thread(target=self._run, args=(way,), name=f"crossfade-p2p-{way}", daemon=True)
            for way in ("in", "out")
        }
        for thread in self._threads.values():
            thread.start()

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

    def expect(self, number: int, landing: torch.Tensor) -> None:
        """A value that is about to be requested goes into these bytes. They are complete when its `Here` is taken."""
        self._landings[number] = landing

    def _run(self, way: str) -> None:
        try:
            self._enter_thread()
            if way == "in":
                self._bring_in()
            else:
                self._send_out()
        except Exception as error:  # of whatever type torch gives it
            self.failure = ChannelBroken(f"{self._name} died, or cannot be reached any more: {error}")
            self._parcels.put(None)
        self._on_change()

    def _bring_in(self) -> None:
        row = torch_or_raise().zeros(LETTER_BYTES, dtype=torch_or_raise().uint8)
        letter: Letter | None = None
        while not isinstance(letter, Left):
            self._receive(row)
            data = bytes(row.tolist())
            letter = unpack(data[1 : 1 + data[0]])
            if isinstance(letter, Here):
                self._receive(self._landings.pop(letter.number))
            self._letters.append(letter)
            self._has_left = isinstance(letter, Left)
            self._on_change()

    def _send_out(self) -> None:
        while (parcel := self._parcels.get()) is not None:
            letter, load = parcel
            self._send(_row_of(letter))
            if load is not None:
                load.wait()
                self._send(load.value)
                load.on_sent()
                self._on_change()
            if isinstance(letter, Left):
                return

    def _receive(self, target: torch.Tensor) -> None:
        self._await("in", self._gloo.recv([target], self._rank, 0))

    def _send(self, source: torch.Tensor) -> None:
        self._await("out", self._gloo.send([source], self._rank, 0))

    def _await(self, way: str, work: Any) -> None:
        self._works[way] = work
        work.wait(_EVER)

    def close(self) -> None:
        """Ends the threads, when all has been sent if the other rank has come to its end, too. Idempotent."""
        self.drop()
        for way, thread in self._threads.items():
            thread.join(_LAST_S if self._has_left else 0)
            while thread.is_alive():
                if way in self._works:
                    with suppress(RuntimeError):  # a wait that takes too long closes the connection, for all that wait
                        self._works[way].wait(_AT_ONCE)
                thread.join(_AGAIN_S)


def _row_of(letter: Letter) -> torch.Tensor:
    data = pack(letter)
    row = bytearray(LETTER_BYTES)
    row[: 1 + len(data)] = len(data), *data
    made: torch.Tensor = torch_or_raise().frombuffer(row, dtype=torch_or_raise().uint8)
    return made
