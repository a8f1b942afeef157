"""This rank's side of the transfers with one other rank: what is enqueued when a send and a receive have met.

::

    posted      sender's push stream    (wait ready) | copy into the receiver's tensor | set done    then `Pushed`
    announced   receiver's pull stream  wait ready   | copy out of the sender's memory | set done    (then `Pulled`)

So whoever comes second enqueues the copy, a large value is copied once, and no stream waits for what is not enqueued (PL-5). The
sender's memory is its tensor (*lent*: the sender waits for ``done`` before it changes it), or a cell into which the sender's stream
has copied it: so it is with short values, whose sender then has nothing to wait for, and with memory that cannot be exported.
Where so many cells are in use that there is none for a value, its announcement comes without a window; once the receive has begun
(`Requested`) there is one for it in any case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from copy import copy
from functools import partial

from crossfade.device.events import PooledEvent
from crossfade.device.signals import Counter
from crossfade.errors import ChannelBroken, ChannelError, DeviceError
from crossfade.host.processes import is_ending
from crossfade.p2p.board import Inbox, Outbox
from crossfade.p2p.letters import (
    Announced,
    Closed,
    Exported,
    Forgotten,
    Here,
    Left,
    Letter,
    Posted,
    Pulled,
    Pushed,
    Refused,
    Requested,
    Window,
)
from crossfade.p2p.matching import Incoming, Outgoing
from crossfade.p2p.memory import Cell, OpenedMemories, Place, Side
from crossfade.p2p.transfer import Arrival, Receive, Send, Transfer
from crossfade.p2p.windows import Counters, OpenWindow, Windows

__all__ = ["LENT_BYTES", "Ends", "Pair"]

LENT_BYTES = 256 << 10
"""A value of at least this length is read where it lies, if its memory can be exported; a shorter one is copied first."""

_NOTHING = Window(0, 0, 0, 0, is_lent=False)


class Ends:
    """Both ranks' windows, and the other one's memory, of one kind."""

    def __init__(self, side: Side, own: Counters, theirs: Counters, memories: OpenedMemories) -> None:
        self.side = side
        self.windows = Windows(own)
        self.theirs = theirs
        self.memories = memories

    def signals(self) -> list[Counter]:
        """What the other rank sets and streams here may wait for. Any thread may ask."""
        return [*self.windows.counters.all(), *self.theirs.all()]

    def close(self) -> None:
        self.memories.close()
        self.windows.counters.close()
        self.theirs.close()


class Pair:
    """The transfers with one rank, which may be this one. One thread at a time uses it. ``ends``: of the host, and of a GPU.

    Either side closes by `leave`: it begins no transfer any more, and what it has announced can still be received until the other
    side has closed too. Then each says that it has made its last copy, and both have ended.
    """

    def __init__(self, name: str, pid: int, inbox: Inbox, outbox: Outbox, ends: Mapping[bool, Ends]) -> None:
        self.name = name
        self._pid = pid
        self.ended: Exception | None = None  # why this side begins no transfer any more
        self.death: Exception | None = None  # of the other rank
        self._is_closed = False  # the other rank begins none any more
        self._has_left = self._is_left = False  # this rank, and the other one, has made its last copy
        self._inbox = inbox
        self._outbox = outbox
        self._ends = ends
        self._outgoing: Outgoing[Posted] = Outgoing()
        self._incoming: Incoming[Arrival, Receive] = Incoming()
        self._told: set[int] = set()  # memory that the other rank knows of
        self._num_announced = 0
        self._unserved: dict[int, Send] = {}  # announced without a window, by number
        self._wanted: deque[tuple[int, Send]] = deque()  # requested of these
        self._lent: dict[tuple[bool, int], tuple[Send, OpenWindow]] = {}  # by kind and word
        self._announced: dict[int, tuple[Send, OpenWindow]] = {}  # those with a window, by number
        self._awaited: dict[int, Receive] = {}  # requested of the other rank, by number
        self._under_way: deque[Transfer] = deque()  # only devices are left to wait for; they use the tensors' memory

    # Sending

    def send(self, send: Send) -> None:
        """Begins a send."""
        self._check()
        if self._is_closed:
            raise self._has_closed()
        posted = self._outgoing.send(send.tag)
        if posted is not None:
            self._push(send, posted)
            return
        self._num_announced += 1
        number = self._num_announced
        window = self._lend_or_copy(send, number, is_urgent=False)
        if window is None:
            self._unserved[number] = send
        is_host = send.side.is_host
        self._outbox.put(Announced(send.tag, send.size_bytes, is_host, send.dtype, send.shape, window))

    def _push(self, send: Send, posted: Posted) -> None:
        """The receive waits already: the value goes where it wants it."""
        is_host = send.side.is_host
        if (posted.size_bytes, posted.is_host) != (send.size_bytes, is_host):
            self._outbox.put(Refused(0, 1, send.tag, send.size_bytes, is_host))
            send.fail(_do_not_fit(send, posted.size_bytes, posted.is_host))
            return
        ends, window = self._ends[is_host], posted.window
        side, counters = ends.side, ends.theirs
        target = self._reach(ends, window, send)
        if target is None:
            return
        stream = side.push_stream
        send.ready.hold(stream)
        if not counters.ready(window.word).has(window.uses):
            counters.ready(window.word).wait(stream, window.uses)
        side.driver.copy(target, _address(send), send.size_bytes, stream)
        counters.done(window.word).set(stream, window.uses)
        event = side.events.at(stream)
        self._finish(send, event=event)
        self._outbox.put(Pushed(send.tag))

    def _finish(
        self, transfer: Transfer, *, event: PooledEvent | None = None, counter: tuple[Counter, int] | None = None
    ) -> None:
        transfer.finish(event=event, counter=counter)
        self._under_way.append(transfer)
        if self.death is not None:
            transfer.error = copy(self.death)

    def _lend_or_copy(self, send: Send, number: int, *, is_urgent: bool) -> Window | None:
        """Makes the value reachable; None if that has to wait. What is not urgent is copied on the current stream."""
        if not send.size_bytes:
            send.finish()
            return _NOTHING
        side = send.side
        windows = self._ends[side.is_host].windows
        if not windows.has_free:
            return None
        source = _address(send)
        place = side.exports.find(source, send.size_bytes) if send.size_bytes >= LENT_BYTES else None
        cell: Cell | None = None
        if place is None:
            cell = self._take_cell(side, send.size_bytes, is_urgent=is_urgent)
            if cell is None:
                return None
            place = side.exports.find(cell.address, send.size_bytes)
            assert place is not None, "a pool's memory can be exported"
        self._tell_of(place)
        stream = side.push_stream if is_urgent else side.current_stream()
        if is_urgent:
            send.ready.hold(stream)
        if cell is not None:
            side.driver.copy(cell.address, source, send.size_bytes, stream)
        window = windows.open(partial(self._on_read, number, cell))
        windows.counters.ready(window.word).set(stream, window.uses)
        self._announced[number] = send, window
        if cell is None:
            self._lent[side.is_host, window.word] = send, window
        elif is_urgent:
            self._finish(send, event=side.events.at(stream))
        else:  # in the order of the stream on which the value was made
            send.finish()
        return Window(place.exported.memory, place.offset, window.word, window.uses, is_lent=cell is None)

    def _take_cell(self, side: Side, size_bytes: int, *, is_urgent: bool) -> Cell | None:
        cell = side.cells.take(size_bytes, is_urgent=False)
        if cell is None:
            self._ends[side.is_host].windows.collect(is_thorough=True)
            cell = side.cells.take(size_bytes, is_urgent=is_urgent)
        return cell

    def _on_read(self, number: int, cell: Cell | None) -> None:
        """The other rank has done with the window of an announcement."""
        self._outgoing.on_read(number)
        self._announced.pop(number, None)
        if cell is not None:
            cell.release()

    def _tell_of(self, place: Place) -> None:
        if place.exported.memory not in self._told:
            self._told.add(place.exported.memory)
            self._outbox.put(place.exported)

    def forget(self, memory: int) -> None:
        """Memory of this rank is not there any more."""
        if memory in self._told:
            self._told.remove(memory)
            self._outbox.put(Forgotten(memory))

    # Receiving

    def receive(self, receive: Receive) -> None:
        """Begins a receive."""
        self._check()
        ends = self._ends[receive.side.is_host]
        place = receive.place
        is_postable = place is not None and receive.size_bytes > 0 and ends.windows.has_free
        arrival, is_posted = self._incoming.receive(receive.tag, receive, is_postable=is_postable)
        if arrival is not None:
            self._meet(receive, arrival)
        elif self._is_closed:
            self._incoming.withdraw()
            raise self._has_closed()
        elif is_posted and place is not None:
            self._tell_of(place)
            window = receive.window = ends.windows.open(_nothing)
            ends.windows.counters.ready(window.word).set(receive.side.current_stream(), window.uses)
            where = Window(place.exported.memory, place.offset, window.word, window.uses, is_lent=True)
            num_read = self._incoming.num_read
            self._outbox.put(Posted(receive.tag, receive.size_bytes, receive.side.is_host, num_read, where))

    def withdraw(self, receive: Receive) -> bool:
        """Takes back a receive without a tensor; False if a value has come for it."""
        return self._incoming.cancel(receive.tag, receive)

    def _meet(self, receive: Receive, arrival: Arrival) -> None:
        if receive.window is not None:  # the letter of the post came too late for this
            receive.window.is_void = True
            receive.window = None
        if receive.error is not None:  # this side has closed in the meantime
            return
        if receive.tensor is None:
            receive.arrival = arrival
        else:
            self.accept(receive, arrival)

    def accept(self, receive: Receive, arrival: Arrival) -> None:
        """Takes an announced value into the receive's tensor, which it has by now."""
        number, value = arrival
        is_host = receive.side.is_host
        if (value.size_bytes, value.is_host) != (receive.size_bytes, is_host):
            self._outbox.put(Refused(number, 0, receive.tag, receive.size_bytes, is_host))
            receive.fail(_do_not_fit(receive, value.size_bytes, value.is_host))
        elif not value.size_bytes:
            receive.finish()
        elif value.window is None:
            self._awaited[number] = receive
            self._outbox.put(Requested(number))
        else:
            self._pull(receive, value.window)

    def _pull(self, receive: Receive, window: Window) -> None:
        ends = self._ends[receive.side.is_host]
        side, counters = ends.side, ends.theirs
        source = self._reach(ends, window, receive)
        if source is None:
            return
        stream = side.pull_stream
        if receive.free is not None:
            receive.free.hold(stream)
        if not counters.ready(window.word).has(window.uses):
            counters.ready(window.word).wait(stream, window.uses)
        side.driver.copy(_address(receive), source, receive.size_bytes, stream)
        counters.done(window.word).set(stream, window.uses)
        self._finish(receive, event=side.events.at(stream))
        if window.is_lent:
            self._outbox.put(Pulled(window.word, receive.side.is_host))

    def _reach(self, ends: Ends, window: Window, transfer: Transfer) -> int | None:
        """Where the other rank's window is here; None if its memory cannot be opened, which breaks the pair."""
        try:
            return ends.memories.address(window.memory, window.offset, transfer.size_bytes)
        except DeviceError as error:
            broken = ChannelBroken(f"the memory of {self.name} cannot be opened: {error}")
            self._outbox.put(Closed())
            self.on_death(ChannelBroken(f"{self.name} died") if is_ending(self._pid) else broken)
            transfer.fail(copy(self.death or broken))
            return None

    def _collect(self) -> None:
        """Releases tensors that no device uses any more."""
        while self._under_way and self._under_way[0].is_copied():
            self._under_way.popleft().tensor = None

    # Letters

    def progress(self) -> bool:
        """Handles what the other rank has said, and what waits for room. Whether a letter came."""
        has_come = False
        while (letter := self._inbox.take()) is not None:
            has_come = True
            if self.death is None:
                self._on_letter(letter)
        self._outbox.flush()
        self._collect()
        for ends in self._ends.values():
            ends.windows.collect()
        while self._wanted and self.death is None:
            number, send = self._wanted[0]
            window = self._lend_or_copy(send, number, is_urgent=True)
            if window is None:
                break
            self._wanted.popleft()
            self._outbox.put(Here(number, window))
        return has_come

    def _on_letter(self, letter: Letter) -> None:
        match letter:
            case Announced():
                arrival = Arrival(self._incoming.num_read + 1, letter)
                receive = self._incoming.on_announced(letter.tag, arrival)
                if receive is not None:
                    self._meet(receive, arrival)
            case Pulled():
                self._on_pulled(letter)
            case Posted():
                self._outgoing.on_posted(letter.tag, letter.num_read, letter)
            case Pushed(tag):
                self._on_pushed(tag)
            case Requested(number):
                self._wanted.append((number, self._unserved.pop(number)))
            case Here(number, window):
                self._pull(self._awaited.pop(number), window)
            case Exported():
                self._ends[letter.is_host].memories.on_exported(letter)
            case Forgotten(memory):
                for ends in self._ends.values():
                    ends.memories.on_forgotten(memory)
            case Refused():
                self._on_refused(letter)
            case Closed():
                self._is_closed = True
                self._fail([*self._incoming.withdraw(), *self._take_unmet()], self._has_closed())
            case Left():
                self._is_left = True

    def _on_pulled(self, pulled: Pulled) -> None:
        send, window = self._lent.pop((pulled.is_host, pulled.word))
        self._finish(send, counter=(self._ends[pulled.is_host].windows.counters.done(window.word), window.uses))

    def _on_pushed(self, tag: int) -> None:
        receive, window = self._posted(tag)
        done = self._ends[receive.side.is_host].windows.counters.done(window.word)
        self._finish(receive, counter=(done, window.uses))

    def _posted(self, tag: int) -> tuple[Receive, OpenWindow]:
        """The oldest posted receive with a tag, which is posted no more."""
        receive = self._incoming.on_pushed(tag)
        if receive is None or receive.window is None:
            raise ChannelError(f"{self.name} has pushed a value that nobody waits for: this is a bug in crossfade")
        window, receive.window = receive.window, None
        return receive, window

    def _on_refused(self, refused: Refused) -> None:
        transfer: Transfer
        if refused.posted:
            transfer, window = self._posted(refused.tag)
            window.is_void = True
        elif (unserved := self._unserved.pop(refused.announced, None)) is not None:
            transfer = unserved
        elif (known := self._announced.get(refused.announced)) is not None:
            transfer, window = known
            window.is_void = True
            self._lent.pop((transfer.side.is_host, window.word), None)
        else:  # a value without bytes, of which nothing is kept
            return
        transfer.fail(_do_not_fit(transfer, refused.size_bytes, refused.is_host))

    # The end

    def _check(self) -> None:
        if self.ended is not None:
            raise copy(self.ended)

    @property
    def is_quiet(self) -> bool:
        """Whether the other rank waits for nothing that this process's host still has to do."""
        return (
            not (self._unserved or self._wanted or self._incoming.is_waiting or self._awaited) and self._outbox.flush()
        )

    def signals(self) -> list[Counter]:
        """What the other rank sets and streams here may wait for. Any thread may ask."""
        return [signal for ends in self._ends.values() for signal in ends.signals()]

    def on_death(self, death: Exception) -> None:
        """The other rank has died: nothing begins any more, and what needs its host fails."""
        if self.death is None:
            self.suspect(death)
        self.ended = self.ended or death
        self._outbox.drop()
        self._fail([*self._incoming.withdraw(), *self._awaited.values(), *self._take_unmet()], death)
        self._awaited.clear()

    def suspect(self, death: Exception) -> None:
        """The other rank has died, and streams that wait for it are about to be released: what they copy then is not valid. Called
        in another thread, and waits for none: the program's may be waiting for the device.
        """
        self.death = death
        for transfer in tuple(self._under_way):
            if not transfer.is_copied():
                transfer.error = copy(death)

    def _take_unmet(self) -> list[Transfer]:
        """The sends that have met no receive, and will meet none any more."""
        sends: list[Transfer] = [*self._unserved.values(), *(send for _, send in self._wanted)]
        sends += [send for send, _ in self._lent.values()]
        self._unserved.clear()
        self._wanted.clear()
        self._lent.clear()
        return sends

    def _fail(self, transfers: Iterable[Transfer], error: Exception) -> None:
        for transfer in transfers:
            transfer.fail(copy(error))

    def _has_closed(self) -> ChannelBroken:
        return ChannelBroken(f"{self.name} has closed its communicator", hint="close when all transfers are done")

    def leave(self, why: Exception) -> None:
        """This side begins no transfer any more, and its receives that have met nothing fail."""
        self.ended = self.ended or why
        self._fail(self._incoming.waiting(), why)
        self._outbox.put(Closed())

    def has_ended(self) -> bool:
        """After `leave`: whether neither rank copies anything any more, or the other one is dead."""
        if self.death is not None:
            return True
        self.progress()
        if self._is_closed and not (self._has_left or self._awaited or self._under_way):
            self._has_left = True
            self._outbox.put(Left())
        return self._has_left and self._is_left and self._outbox.flush()

    def close(self) -> None:
        """Gives everything back; nothing may be under way."""
        for ends in self._ends.values():
            ends.windows.give_up()
            ends.close()


def _address(transfer: Transfer) -> int:
    assert transfer.tensor is not None, "a transfer that is not settled has its tensor"
    return transfer.tensor.data_ptr()


def _nothing() -> None: ...


def _do_not_fit(transfer: Transfer, other_bytes: int, is_other_host: bool) -> ChannelError:
    own, other = (("the host's memory" if is_host else "a GPU") for is_host in (transfer.side.is_host, is_other_host))
    where = f", the one in {own}, the other in {other}" if own != other else ""
    return ChannelError(
        f"{transfer} met a transfer of {other_bytes} bytes{where}: nothing was copied",
        hint="the k-th send and the k-th receive with one tag need tensors of one length, on the same kind of device",
    )
