"""What is enqueued for the transfers with one other rank.

::

    short       sender's current stream    copy into a cell in memory of the host | set ready    then `Announced`
                receiver's current stream  (wait ready) | copy out of it    in `Work.wait`; its host sets done, or the stream does
    posted      sender's push stream    (wait ready) | copy into the receiver's tensor | set done    then `Pushed`
    landed      sender's push stream    copy into a cell of the receiver's | set done                then `Pushed`
                receiver's current stream  (wait done) | copy out of it, in `Work.wait`, which need not wait for `Pushed`
    announced   receiver's pull stream  (wait ready) | copy out of the sender's memory | set done    (then `Pulled`)
    lent        sender's current stream, or one of ours behind it    set ready    then `Announced`; pulled as above
    staged      sender's push stream    for each piece: copy into pinned memory of the host, and beside it (ahead: in it) set ready
                receiver's pull stream  for each piece: (wait ready, beside it) | copy out of it, and behind the last one set done

So whoever comes second enqueues the copy, a large value is copied once, and no stream waits for what is not enqueued (PL-5). The
sender's memory is its tensor (*lent*: the sender waits for ``done`` before it changes it), or a cell into which the sender's stream
has copied it: so it is with all but long values, whose sender then has nothing to wait for, and with memory that cannot be
exported. Of long values that are lent at the same time several streams say that they are there (`Side.stream_for_signal`).
Where GPUs cannot reach each other, cells lie in memory of the host, and values go up and down in pieces
(`device.staged_layout`). A short value goes this way in any case, in one piece: a copy between two GPUs takes longer to begin.

Where streams wait *ahead*, for values whose sends have not begun, PL-5 does not hold: what is enqueued behind such a wait may be
long in coming. So no stream of ours waits for another rank there, but for the stream behind which it copies: values up to a length
are pushed into cells, which take no wait to be written; longer ones are lent, and not posted, and a few streams wait for them
(`p2p.pull_streams`); what else has been announced and has not come stays where it lies, until it has, or until the program's own
stream waits for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy

from crossfade.device.events import PooledEvent
from crossfade.device.signals import Counter
from crossfade.device.streams import Role
from crossfade.errors import ChannelClosed
from crossfade.marks import marked
from crossfade.p2p.carrier import Carrier, Letters, Offer
from crossfade.p2p.cells import Cell, Place
from crossfade.p2p.letters import Exported, Forgotten, Pulled, Window
from crossfade.p2p.memory import SHORT_BYTES
from crossfade.p2p.transfer import OpenWindow, Receive, Send, Taken, Transfer
from crossfade.p2p.under_way import UnderWay
from crossfade.p2p.windows import Ends


class Copies(Carrier):
    """The copies between this rank's memory and another one's. ``ends``: by whether they are of host memory.

    A method that enqueues raises a `DeviceError` if a driver refused, or the other rank's memory cannot be opened.
    """

    death: Exception | None
    num_pushed: int
    num_pulled: int
    num_lent: int
    num_copied_first: int
    num_ahead: int
    num_bytes: int

    def __init__(self, ends: Mapping[bool, Ends], letters: Letters) -> None:
        super().__init__()
        self._ends = ends
        self._windows = [each.windows for each in ends.values()]
        self._letters = letters
        self._told: set[int] = set()  # memory that the other rank knows of
        self._landings: dict[Receive, None] = {}
        # Those that are to be pulled once they have come, and whether their sender waits for that.
        self._to_come: dict[Receive, bool] = {}
        self._under_way = UnderWay()
        self._taken = Taken()

    def push(self, send: Send, window: Window) -> None:
        stream = send.side.stream_beside(Role.PUSH, send.stream)
        self._copy(send, window, send.ready(), stream, is_into=True)
        self.num_pushed += 1

    def accept(self, receive: Receive, number: int, window: Window) -> None:
        if receive.size_bytes <= SHORT_BYTES:
            self._keep(receive, window)
        else:
            self._pull(receive, number, window, is_waited_for=window.is_lent)

    def pull(self, receive: Receive, number: int, window: Window) -> None:
        self._pull(receive, number, window, is_waited_for=True)

    def _pull(self, receive: Receive, number: int, window: Window, *, is_waited_for: bool) -> None:
        """``is_waited_for``: its sender waits for that, or needs the window."""
        side = receive.side
        if side.landed_bytes and not self._has_come(receive, window):
            waiting = self._pull_stream(receive, number, window)
            if waiting is not None:
                self._land(receive, window, receive.free(), waiting)
                return
            self._keep(receive, window)
            self._to_come[receive] = is_waited_for
            return
        stream = side.stream_beside(Role.DOWN, receive.stream)
        self._copy(receive, window, receive.free(), stream, is_into=False)
        self._tell_of_pull(receive, window)

    def _pull_stream(self, receive: Receive, number: int, window: Window) -> int | None:
        """A stream of ours that may wait for a value; None if it is to stay where it lies until it has come."""
        side = receive.side
        if not window.stream or receive.size_bytes <= side.landed_bytes:
            return None
        if not receive.is_free_known() and side.driver.is_capturing(receive.stream):
            return None
        key = receive.rank, window.stream, receive.stream
        return side.pull_streams.take(key, number, receive.number, receive.is_copied)

    def _keep(self, receive: Receive, window: Window | OpenWindow) -> None:
        """The value stays where it lies."""
        receive.landing = window
        self._landings[receive] = None

    def _has_come(self, receive: Receive, window: Window | OpenWindow) -> bool:
        """Whether the value lies where it is to be copied from."""
        ends = self._ends[receive.side.is_host]
        word = ends.theirs.ready if isinstance(window, Window) else ends.windows.counters.done
        return word(window.word).has(window.uses)

    def _tell_of_pull(self, receive: Receive, window: Window) -> None:
        self.num_pulled += 1
        if window.is_lent:
            self._letters.put(Pulled(window.word, window.uses, receive.side.is_host))

    def land(self, receive: Receive) -> None:
        window, side = receive.landing, receive.side
        if window is not None:
            stream = side.join()
            after = receive.free() if stream != receive.stream else None
            self._land(receive, window, after, stream)

    def land_beside(self, receive: Receive, *, may_wait: bool) -> None:
        window, side = receive.landing, receive.side
        if window is None or (side.landed_bytes and not may_wait and not self._has_come(receive, window)):
            return
        if receive.is_free_known() or not side.driver.is_capturing(receive.stream):
            self._land(receive, window, receive.free(), side.stream_beside(Role.DOWN, receive.stream))

    def land_ahead(self, receive: Receive) -> None:
        window, side = receive.window, receive.side
        if window is not None and window.cell is not None:
            stream = side.join()
            receive.ahead = self._ends[side.is_host].windows.counters.done(window.word)
            self._land(receive, window, receive.free() if stream != receive.stream else None, stream)
            self.num_ahead += 1

    @marked("copy")
    def _land(self, receive: Receive, landing: Window | OpenWindow, after: PooledEvent | None, stream: int) -> None:
        """The completion of a copy out of the sender's memory takes no event where ``done``, which is set behind it, tells."""
        side = receive.side
        ends = self._ends[side.is_host]
        receive.landing = None
        self._landings.pop(receive, None)
        self._to_come.pop(receive, None)
        cell = landing.cell if isinstance(landing, OpenWindow) else None
        is_there = self._has_come(receive, landing)
        if self.death is not None and not is_there:
            receive.fail(copy(self.death))
            return
        counters = ends.windows.counters if cell is not None else ends.theirs
        if isinstance(landing, Window):
            source = ends.memories.address(landing.memory, landing.offset, receive.size_bytes)
            come = counters.ready(landing.word)
        else:
            assert cell is not None, "else it was pushed into the tensor"
            source, come = cell.address, counters.done(landing.word)
        if after is not None:
            after.hold(stream)
        pieces = [(0, receive.size_bytes)] if is_there else ends.shared.pieces(receive.size_bytes)
        for step, (offset, length) in enumerate(pieces, landing.uses - len(pieces) + 1):
            if not is_there:
                come.wait(stream, step)
            side.driver.copy(receive.address + offset, source + offset, length, stream)
        done = counters.done(landing.word)
        is_by_host = False
        if isinstance(landing, Window) and landing.is_prompt:
            done.set(stream, landing.uses)
            receive.finish_at(done, landing.uses, stream)
        else:
            receive.finish_behind(stream)
            is_by_host = isinstance(landing, Window)
        if isinstance(landing, Window):
            self._tell_of_pull(receive, landing)
            self.num_bytes += receive.size_bytes
        self._under_way.add(receive, done if is_by_host else None, landing.uses)
        if self.death is not None and not is_there:
            receive.error = copy(self.death)

    def landings(self) -> list[Receive]:
        return list(self._landings)

    @property
    def has_landings(self) -> bool:
        return bool(self._landings)

    def landings_to_come(self) -> Sequence[Receive]:
        return tuple(self._to_come)

    @property
    def is_waited_for(self) -> bool:
        return any(self._to_come.values())

    @marked("copy")
    def _copy(self, transfer: Transfer, window: Window, after: PooledEvent, stream: int, *, is_into: bool) -> None:
        side = transfer.side
        ends = self._ends[side.is_host]
        own, there = transfer.address, ends.memories.address(window.memory, window.offset, transfer.size_bytes)
        target, source = (there, own) if is_into else (own, there)
        ready, done = ends.theirs.ready(window.word), ends.theirs.done(window.word)
        after.hold(stream)
        pieces = ends.shared.pieces(transfer.size_bytes)
        for step, (offset, length) in enumerate(pieces, window.uses - len(pieces) + 1):
            side.await_step(ready, step, stream, is_first=not offset)
            side.driver.copy(target + offset, source + offset, length, stream)
            if is_into or step == window.uses:
                done.set(stream, step)
        self.num_bytes += transfer.size_bytes
        transfer.finish_behind(stream)
        self._begin_copy(transfer)

    def place_of(self, receive: Receive) -> Place | None:
        ends = self._ends[receive.side.is_host]
        if receive.size_bytes <= SHORT_BYTES or not ends.windows.has_free():
            return None
        landed_bytes = receive.side.landed_bytes
        if landed_bytes:
            if receive.size_bytes <= landed_bytes:
                receive.cell = ends.take_cell(ends.shared.landing, receive.size_bytes, is_urgent=False)
            return None if receive.cell is None else receive.cell.place
        return ends.shared.exports.find(receive.address, receive.size_bytes)

    def post(self, receive: Receive, place: Place) -> Window:
        ends = self._ends[receive.side.is_host]
        windows = ends.windows
        self._tell_of(place)
        window = receive.window = windows.open(len(ends.shared.pieces(receive.size_bytes)), cell=receive.cell)
        ready = windows.counters.ready(window.word)
        if receive.cell is None:
            ready.set(receive.stream, window.uses)
        else:  # nothing uses the cell
            receive.cell, window.receive = None, receive
            ready.set_from_host(window.uses)
        return window.letter(place, is_lent=True)

    def unplace(self, receive: Receive) -> None:
        if receive.cell is not None:
            receive.cell.release()
            receive.cell = None

    def hold(self, receive: Receive) -> None:
        if receive.tensor is not None:
            receive.free()

    def expect(self, number: int, receive: Receive) -> None:
        receive.free()

    def offer(self, send: Send, number: int, *, is_urgent: bool) -> Offer | None:
        """See `Carrier`. What is urgent or staged is copied on a stream of ours, behind the value's event; else it goes on the
        current stream.
        """
        side, size_bytes = send.side, send.size_bytes
        ends = self._ends[side.is_host]
        windows = ends.windows
        shared = ends.short if size_bytes <= SHORT_BYTES else ends.shared
        cell: Cell | None = None
        place: Place | None = None
        if windows.has_free(is_urgent=is_urgent):
            if size_bytes >= side.lent_bytes:
                place = shared.exports.find(send.address, size_bytes)
            if place is None:
                cell = ends.take_cell(shared.cells, size_bytes, is_urgent=is_urgent)
                if cell is not None:
                    place = cell.place
        if place is None:
            send.ready()  # it goes later, behind what its stream has been given until now
            return None
        self._tell_of(place)
        is_beside = is_urgent or (shared.is_staged and size_bytes > SHORT_BYTES)
        stream = send.stream
        if is_beside:
            # What is requested comes in the other rank's order.
            stream = side.stream_beside(Role.PUSH, stream, self if is_urgent else None)
            send.ready().hold(stream)
        pieces = shared.pieces(size_bytes)
        window = windows.open(len(pieces), number, send, cell)
        ready = windows.counters.ready(window.word)
        if len(pieces) == 1:
            if cell is not None:
                side.driver.copy(cell.address, send.address, size_bytes, stream)
            elif side.takes_in_order and windows.num_lent > 1:
                stream = side.stream_for_signal(stream)
            ready.set(stream, window.uses)
        else:
            self._push_up(send, cell, pieces, window, ready, stream)
        if cell is None:
            self.num_lent += 1
        else:
            self.num_copied_first += 1
            if is_beside:
                send.finish_behind(stream)
                self._begin_copy(send)
            else:  # in the order of the stream on which the value was made
                send.finish()
        is_short = size_bytes <= SHORT_BYTES and not side.is_host
        is_prompt = is_urgent or not is_short or windows.are_few_free or not shared.cells.is_roomy
        made_by = 0 if is_urgent else side.stream_number(send.stream)
        return Offer(window.letter(place, is_lent=cell is None, is_prompt=is_prompt, stream=made_by), window)

    @staticmethod
    def _push_up(
        send: Send,
        cell: Cell | None,
        pieces: Sequence[tuple[int, int]],
        window: OpenWindow,
        ready: Counter,
        stream: int,
    ) -> None:
        """Copies a value piece by piece into a cell, and tells of each."""
        side = send.side
        assert cell is not None, "what is lent is in one piece"
        for step, (offset, length) in enumerate(pieces, window.uses - len(pieces) + 1):
            side.driver.copy(cell.address + offset, send.address + offset, length, stream)
            side.set_step(ready, step, stream)

    def announced(self, number: int) -> OpenWindow | None:
        found = (ends.windows.announced(number) for ends in self._ends.values())
        return next((window for window in found if window is not None), None)

    def finish(self, transfer: Transfer, window: OpenWindow) -> None:
        if isinstance(transfer, Receive) and window.receive is transfer:
            transfer.ahead = None
            if not transfer.is_enqueued:
                self._keep(transfer, window)
            return
        done = self._ends[transfer.side.is_host].windows.counters.done(window.word)
        if isinstance(transfer, Send) and transfer.side.takes_in_order:
            transfer.turn = self._taken.next_turn()
            transfer.taken = self._taken  # before any thread waits for it
        transfer.finish_at(done, window.uses)
        self._begin_copy(transfer)

    def _begin_copy(self, transfer: Transfer) -> None:
        """The copy is enqueued."""
        self._under_way.add(transfer)
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
        self._under_way.collect()
        for windows in self._windows:
            windows.collect()

    @property
    def are_under_way(self) -> bool:
        return bool(self._under_way)

    def suspect(self, death: Exception) -> None:
        self.death = death
        for transfer in self._under_way:
            if not transfer.is_copied():
                transfer.error = copy(death)
                if isinstance(transfer, Receive) and transfer.ahead is not None:
                    self.lost = self.lost or death

    def signals(self) -> list[Counter]:
        return [signal for ends in self._ends.values() for signal in ends.signals()]

    def close(self) -> None:
        for receive in self.landings():
            receive.landing = None
            receive.fail(ChannelClosed("the communicator was closed before the value was taken"))
        self._landings.clear()
        self._to_come.clear()
        self._under_way.clear()
        for ends in self._ends.values():
            ends.close()
