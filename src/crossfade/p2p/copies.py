"""What is enqueued for the transfers with one other rank.

::

    posted      sender's push stream    (wait ready) | copy into the receiver's tensor | set done    then `Pushed`
    announced   receiver's pull stream  (wait ready) | copy out of the sender's memory | set done    (then `Pulled`)
    staged      sender's push stream    for each piece: copy into pinned memory of the host, and beside it set ready
                receiver's pull stream  for each piece: (wait ready, beside it) | copy out of it, and behind the last one set done

So whoever comes second enqueues the copy, a large value is copied once, and no stream waits for what is not enqueued (PL-5). The
sender's memory is its tensor (*lent*: the sender waits for ``done`` before it changes it), or a cell into which the sender's stream
has copied it: so it is with short values, whose sender then has nothing to wait for, and with memory that cannot be exported. Where
GPUs cannot reach each other, cells lie in memory of the host, and values go up and down in pieces (`device.staged_layout`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from copy import copy

from crossfade.device.events import PooledEvent
from crossfade.device.signals import Counter
from crossfade.marks import marked
from crossfade.p2p.carrier import Carrier, Letters, Offer
from crossfade.p2p.letters import Exported, Forgotten, Window
from crossfade.p2p.memory import Cell, OpenedMemories, Place, Shared
from crossfade.p2p.transfer import Receive, Send, Transfer
from crossfade.p2p.windows import Counters, OpenWindow, Windows

LENT_BYTES = 256 << 10
"""A value of at least this length is read where it lies, if its memory can be exported; a shorter one is copied first."""


class Ends:
    """Both ranks' windows, this one's memory that the other one reaches, and that one's, of one kind."""

    def __init__(self, shared: Shared, own: Counters, theirs: Counters, memories: OpenedMemories) -> None:
        self.shared = shared
        self.windows = Windows(own)
        self.theirs = theirs
        self.memories = memories

    def signals(self) -> list[Counter]:
        """What the other rank sets and streams here may wait for. Any thread may ask."""
        return [*self.windows.counters.all(), *self.theirs.all()]

    def close(self) -> None:
        self.windows.give_up()
        self.memories.close()
        self.windows.counters.close()
        self.theirs.close()


class Copies(Carrier):
    """The copies between this rank's memory and another one's. ``ends``: by whether they are of host memory.

    A method that enqueues raises a `DeviceError` if a driver refused, or the other rank's memory cannot be opened.
    """

    def __init__(self, ends: Mapping[bool, Ends], letters: Letters) -> None:
        super().__init__()
        self._ends = ends
        self._letters = letters
        self._told: set[int] = set()  # memory that the other rank knows of
        self._under_way: deque[Transfer] = deque()  # only devices are left to wait for; they use the tensors' memory

    def push(self, send: Send, window: Window) -> None:
        self._copy(send, window, send.ready, send.side.push_stream, is_into=True)
        self.num_pushed += 1

    def pull(self, receive: Receive, number: int, window: Window) -> None:
        self._copy(receive, window, receive.free, receive.side.pull_stream, is_into=False)
        self.num_pulled += 1

    @marked("copy")
    def _copy(
        self, transfer: Transfer, window: Window, after: PooledEvent | None, stream: int, *, is_into: bool
    ) -> None:
        side = transfer.side
        ends = self._ends[side.is_host]
        own, there = transfer.address, ends.memories.address(window.memory, window.offset, transfer.size_bytes)
        target, source = (there, own) if is_into else (own, there)
        ready, done = ends.theirs.ready(window.word), ends.theirs.done(window.word)
        if after is not None:
            after.hold(stream)
        pieces = ends.shared.pieces(transfer.size_bytes)
        for step, (offset, length) in enumerate(pieces, window.uses - len(pieces) + 1):
            side.await_step(ready, step, stream, is_first=not offset)
            side.driver.copy(target + offset, source + offset, length, stream)
        done.set(stream, window.uses)
        self.num_bytes += transfer.size_bytes
        self._finish(transfer, event=side.events.at(stream))

    def place_of(self, receive: Receive) -> Place | None:
        ends = self._ends[receive.side.is_host]
        if not (receive.size_bytes and ends.windows.has_free()):
            return None
        return ends.shared.exports.find(receive.address, receive.size_bytes)

    def post(self, receive: Receive, place: Place) -> Window:
        windows = self._ends[receive.side.is_host].windows
        self._tell_of(place)
        window = receive.window = windows.open(_nothing)
        windows.counters.ready(window.word).set(receive.side.current_stream(), window.uses)
        return _as_letter(place, window, is_lent=True)

    def offer(
        self, send: Send, number: int, on_closed: Callable[[Cell | None], Callable[[], None]], *, is_urgent: bool
    ) -> Offer | None:
        """See `Carrier`. What is urgent or staged is copied on a stream of ours, behind the value's event; else it goes on the
        current stream.
        """
        side, ends = send.side, self._ends[send.side.is_host]
        exports, windows = ends.shared.exports, ends.windows
        if not windows.has_free(is_urgent=is_urgent):
            return None
        place = exports.find(send.address, send.size_bytes) if send.size_bytes >= LENT_BYTES else None
        cell: Cell | None = None
        if place is None:
            cell = self._take_cell(ends, send.size_bytes, is_urgent=is_urgent)
            if cell is None:
                return None
            place = exports.find(cell.address, send.size_bytes)
            assert place is not None, "a pool's memory can be exported"
        self._tell_of(place)
        is_beside = is_urgent or ends.shared.is_staged
        stream = side.push_stream if is_beside else side.current_stream()
        if is_beside:
            send.ready.hold(stream)
        self.num_lent += cell is None
        self.num_copied_first += cell is not None
        pieces = ends.shared.pieces(send.size_bytes)
        window = windows.open(on_closed(cell), len(pieces))
        for step, (offset, length) in enumerate(pieces, window.uses - len(pieces) + 1):
            if cell is not None:
                side.driver.copy(cell.address + offset, send.address + offset, length, stream)
            side.set_step(windows.counters.ready(window.word), step, stream, is_alone=len(pieces) == 1)
        if cell is not None and is_beside:
            self._finish(send, event=side.events.at(stream))
        elif cell is not None:  # in the order of the stream on which the value was made
            send.finish()
        return Offer(_as_letter(place, window, is_lent=cell is None), window)

    @staticmethod
    def _take_cell(ends: Ends, size_bytes: int, *, is_urgent: bool) -> Cell | None:
        cells = ends.shared.cells
        cell = cells.take(size_bytes, is_urgent=False)
        if cell is None:
            ends.windows.collect(is_thorough=True)
            cell = cells.take(size_bytes, is_urgent=is_urgent)
        return cell

    def finish(self, transfer: Transfer, window: OpenWindow) -> None:
        done = self._ends[transfer.side.is_host].windows.counters.done(window.word)
        self._finish(transfer, counter=(done, window.uses))

    def _finish(
        self, transfer: Transfer, *, event: PooledEvent | None = None, counter: tuple[Counter, int] | None = None
    ) -> None:
        transfer.finish(event=event, counter=counter)
        self._under_way.append(transfer)
        if self.death is not None:
            transfer.error = copy(self.death)

    def _tell_of(self, place: Place) -> None:
        if place.exported.memory not in self._told:
            self._told.add(place.exported.memory)
            self._letters.put(place.exported)

    def on_exported(self, exported: Exported) -> None:
        self._ends[exported.is_host].memories.on_exported(exported)

    def on_forgotten(self, memory: int) -> None:
        for ends in self._ends.values():
            ends.memories.on_forgotten(memory)

    def forget(self, memory: int) -> None:
        if memory in self._told:
            self._told.remove(memory)
            self._letters.put(Forgotten(memory))

    def collect(self) -> None:
        """Releases tensors that no device uses any more, and windows that both sides have done with."""
        while self._under_way and self._under_way[0].is_copied():
            self._under_way.popleft().tensor = None
        for ends in self._ends.values():
            ends.windows.collect()

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    def suspect(self, death: Exception) -> None:
        self.death = death
        for transfer in tuple(self._under_way):
            if not transfer.is_copied():
                transfer.error = copy(death)

    def signals(self) -> list[Counter]:
        return [signal for ends in self._ends.values() for signal in ends.signals()]

    def close(self) -> None:
        for ends in self._ends.values():
            ends.close()


def _as_letter(place: Place, window: OpenWindow, *, is_lent: bool) -> Window:
    return Window(place.exported.memory, place.offset, window.word, window.uses, is_lent)


def _nothing() -> None: ...
