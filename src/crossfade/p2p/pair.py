"""This rank's side of the transfers with one other rank: letters in, letters out, and what has met.

A value for which there is no window yet (`Copies.offer`) is announced without one; when its receive has begun (`Requested`) there
is one for it in any case, as soon as an earlier one has closed.
"""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy

from crossfade.errors import ChannelBroken, ChannelError, DeviceError
from crossfade.host.processes import is_ending
from crossfade.p2p.carrier import Carrier, Letters, Mark
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
    Read,
    Refused,
    Requested,
    Window,
)
from crossfade.p2p.matching import Incoming, Outgoing
from crossfade.p2p.pending import Pending
from crossfade.p2p.transfer import Arrival, OpenWindow, Receive, Send, Transfer

_NOTHING = Window(0, 0, 0, 0, is_lent=False)
_NUM_UNTOLD = 64  # announcements that are read before the other rank is told, which remembers them until then


class Pair:
    """The transfers with one rank, which may be this one. One thread at a time uses it. ``pid``: of its process, on this host.

    Either side closes by `leave`: it begins no transfer any more, and what it has announced can still be received until the other
    side has closed too. Then each says that it has made its last copy, and both have ended.
    """

    def __init__(
        self, name: str, pid: int | None, letters: Letters, carrier: Carrier, mark: Mark | None = None
    ) -> None:
        self.name = name
        self._mark = mark  # where either rank's streams may wait ahead
        self._is_marked = False  # until letters have room
        self._pid = pid
        self.ended: Exception | None = None  # why this side begins no transfer any more
        self._is_closed = False  # the other rank begins none any more
        self._has_left = self._is_left = False  # this rank, and the other one, has made its last copy
        self._letters = letters
        self.has_letters = letters.have_come
        self.carrier = carrier
        self._outgoing: Outgoing[Posted] = Outgoing()
        self._incoming: Incoming[Arrival, Receive] = Incoming()
        self._num_announced = 0
        self._pending = Pending()
        self._num_told = 0  # announcements that the other rank knows to have been read
        self._awaited: dict[int, Receive] = {}  # requested of the other rank, by number

    # Sending

    def begin_send(self) -> None:
        """This rank is about to `progress`, and then to `send`."""
        if self._mark is not None:
            self._is_marked = False
            self._mark.begin()

    def end_send(self) -> None:
        """Its letters can be read, or can be when they have room."""
        if self._mark is not None:
            self._is_marked = not self._letters.flush()
            if not self._is_marked:
                self._mark.end()

    def send(self, send: Send) -> None:
        """Begins a send."""
        self._check()
        if self._is_closed:
            raise self._has_closed()
        if (posted := self._outgoing.send(send.tag)) is not None:
            self._push(send, posted)
            return
        number = self._num_announced = self._num_announced + 1
        try:
            window = self._offer(send, number, is_urgent=False)
        except DeviceError as error:
            self._break(send, error)
            return
        if window is None:
            self._pending.put(number, send)
        self._letters.put(Announced(send.tag, send.size_bytes, send.side.is_host, send.dtype, send.shape, window))

    def _push(self, send: Send, posted: Posted) -> None:
        """The receive waits already: the value goes where it wants it."""
        is_host = send.side.is_host
        if (posted.size_bytes, posted.is_host) != (send.size_bytes, is_host):
            self._letters.put(Refused(0, 1, send.tag, send.size_bytes, is_host))
            send.fail(send.misfit(posted.size_bytes, posted.is_host))
            return
        try:
            self.carrier.push(send, posted.window)
        except DeviceError as error:
            self._break(send, error)
            return
        self._letters.put(Pushed(send.tag))

    def _offer(self, send: Send, number: int, *, is_urgent: bool) -> Window | None:
        """Makes the value reachable; None if that has to wait."""
        if not send.size_bytes:
            send.finish()
            return _NOTHING
        if (offer := self.carrier.offer(send, number, is_urgent=is_urgent)) is None:
            return None
        window = offer.opened
        if window is not None and offer.window.is_lent:
            self._pending.lend(send, window, is_requested=is_urgent)
        return offer.window

    # Receiving

    def receive(self, receive: Receive) -> None:
        """Begins a receive."""
        self._check()
        is_there = self._incoming.has(receive.tag)
        if self._is_closed and not is_there:
            raise self._has_closed()
        place = None if is_there else self.carrier.place_of(receive)
        arrival, is_posted = self._incoming.receive(receive.tag, receive, is_postable=place is not None)
        if arrival is not None:
            self._meet(receive, arrival)
            return
        self.carrier.hold(receive)
        if is_posted and place is not None:
            try:
                window = self.carrier.post(receive, place)
            except DeviceError as error:
                self._break(receive, error)
                return
            num_read = self._num_told = self._incoming.num_read
            self._letters.put(Posted(receive.tag, receive.size_bytes, receive.side.is_host, num_read, window))
        elif place is not None:  # it stands behind one that is not posted
            self.carrier.unplace(receive)

    def pushes_next(self) -> bool:
        """Whether the other rank, once its letters are read, is certain to push into what is posted, whatever this host does."""
        if self._mark is None or self.ended is not None or not self._letters.flush():
            return False
        return not self._mark.is_other_sending()

    @property
    def is_waited_for(self) -> bool:
        """Whether the other rank waits, or may come to wait, for this one's host."""
        if self._pending.has_any_without_window or self._awaited or self.carrier.is_waited_for:
            return True
        waiting = self._incoming.waiting() if self._incoming.num_unposted else []
        return any(receive.window is None and receive.size_bytes > receive.side.landed_bytes for receive in waiting)

    def land_ahead(self, receive: Receive) -> None:
        """Lets the current stream wait for a posted value that has not been sent yet."""
        try:
            self.carrier.land_ahead(receive)
        except DeviceError as error:
            self._break(receive, error)

    def has_value(self, tag: int) -> bool:
        """Whether a value with a tag has come that no receive has met."""
        return self._incoming.has(tag)

    def withdraw(self, receive: Receive, *, is_given_up: bool) -> bool:
        """Takes back a receive without a tensor; False if a value has come for it, which is for the next one if it is given up."""
        arrival = receive.arrival if is_given_up else None
        if arrival is not None and (following := self._incoming.put_back(receive.tag, arrival)) is not None:
            self._meet(following, arrival)
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
            self._letters.put(Refused(number, 0, receive.tag, receive.size_bytes, is_host))
            receive.fail(receive.misfit(value.size_bytes, value.is_host))
        elif not value.size_bytes:
            receive.finish()
        elif value.window is None:
            self._awaited[number] = receive
            self.carrier.expect(number, receive)
            self._letters.put(Requested(number))
        else:
            try:
                self.carrier.accept(receive, number, value.window)
            except DeviceError as error:
                self._break(receive, error)

    def land(self, receive: Receive) -> None:
        """Copies a value that waits where it lies on the current stream."""
        try:
            self.carrier.land(receive)
        except DeviceError as error:
            self._break(receive, error)

    def land_all(self, *, may_wait: bool = True) -> None:
        """Copies all such values, on streams of ours."""
        self._land_beside(self.carrier.landings(), may_wait=may_wait)

    def _land_beside(self, receives: Iterable[Receive], *, may_wait: bool) -> None:
        for receive in receives:
            try:
                self.carrier.land_beside(receive, may_wait=may_wait)
            except DeviceError as error:
                self._break(receive, error)

    def _pull(self, receive: Receive, number: int, window: Window) -> None:
        try:
            self.carrier.pull(receive, number, window)
        except DeviceError as error:
            self._break(receive, error)

    def _break(self, transfer: Transfer, error: DeviceError) -> None:
        """What a device refuses ends the pair, on both sides: the other rank counts on it."""
        broken = ChannelBroken(f"a transfer with {self.name} could not be enqueued: {error}")
        if self.carrier.death is None:
            self._letters.put(Closed())
            self.on_death(ChannelBroken(f"{self.name} died") if self._is_ending() else broken)
        transfer.fail(copy(self.carrier.death or broken))

    # Letters

    def progress(self) -> bool:
        """Handles what the other rank has said, and what waits for room. Whether a letter came."""
        has_come = False
        while (letter := self._letters.take()) is not None:
            has_come = True
            if self.carrier.death is None:
                self._on_letter(letter)
        if self._letters.flush() and self._is_marked:
            self.end_send()
        self.carrier.collect()
        self._land_beside(self.carrier.landings_to_come(), may_wait=False)
        failure = self.carrier.failure()
        if failure is not None and self.carrier.death is None:
            self.on_death(failure)
        wanted = self._pending.wanted
        while wanted and self._serve(*wanted[0]):
            wanted.popleft()
        return has_come

    def _serve(self, number: int, send: Send) -> bool:
        """Gives a value that was requested a window; False if there is none."""
        try:
            window = self._offer(send, number, is_urgent=True)
        except DeviceError as error:
            self._break(send, error)
            return False
        if window is not None:
            self._letters.put(Here(number, window))
        return window is not None

    def _on_letter(self, letter: Letter) -> None:
        match letter:
            case Announced():
                arrival = Arrival(self._incoming.num_read + 1, letter)
                receive = self._incoming.on_announced(letter.tag, arrival)
                if receive is not None:
                    self._meet(receive, arrival)
                if arrival.number - self._num_told >= _NUM_UNTOLD:
                    self._num_told = arrival.number
                    self._letters.put(Read(arrival.number))
            case Read(num_read):
                self._outgoing.on_read(num_read)
            case Pulled():
                self._finish(*self._pending.give_back(letter)[:2])
            case Posted():
                self._outgoing.on_posted(letter.tag, letter.num_read, letter)
            case Pushed(tag):
                self._finish(*self._posted(tag))
            case Requested(number):
                self._pending.request(number)
            case Here(number, window):
                self._pull(self._awaited.pop(number), number, window)
            case Exported():
                self.carrier.on_exported(letter)
            case Forgotten(memory):
                self.carrier.on_forgotten(memory)
            case Refused():
                self._on_refused(letter)
            case Closed():
                self._is_closed = True
                self._fail([*self._incoming.withdraw(), *self._pending.take_unmet()], self._has_closed())
            case Left():
                self._is_left = True

    def _finish(self, transfer: Transfer, window: OpenWindow) -> None:
        try:
            self.carrier.finish(transfer, window)
        except DeviceError as error:
            self._break(transfer, error)

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
        elif (unserved := self._pending.take(refused.announced)) is not None:
            transfer = unserved
        elif (known := self.carrier.announced(refused.announced)) is not None and known.send is not None:
            transfer = known.send
            self._pending.refuse(known.send, known)
        else:  # a value without bytes, of which nothing is kept
            return
        self._fail([transfer], transfer.misfit(refused.size_bytes, refused.is_host))

    # The end

    def _check(self) -> None:
        if self.ended is not None:
            raise copy(self.ended)

    @property
    def is_quiet(self) -> bool:
        """Whether the other rank waits for nothing that this process's host still has to do."""
        is_busy = self._pending.has_any_without_window or self._awaited or self.carrier.has_landings
        return not (is_busy or self._incoming.num_unposted) and self._letters.flush()

    def is_dying(self) -> bool:
        """Whether the other rank's process is on its way out, which its descriptor tells later."""
        return self.carrier.death is None and self._is_ending()

    def _is_ending(self) -> bool:
        return self._pid is not None and is_ending(self._pid)

    def on_death(self, death: Exception) -> None:
        """The other rank has died: nothing begins any more, and what needs its host fails."""
        if self.carrier.death is None:
            self.carrier.suspect(death)
        self.ended = self.ended or death
        self._letters.drop()
        self.land_all()  # what has come all the same
        self._fail([*self._incoming.withdraw(), *self._awaited.values(), *self._pending.take_all()], death)
        self._awaited.clear()

    def _fail(self, transfers: Iterable[Transfer], error: Exception) -> None:
        for transfer in transfers:
            if isinstance(transfer, Receive) and transfer.ahead is not None:
                self.carrier.lost = self.carrier.lost or self.carrier.death or error  # before the stream is let go
            transfer.fail(copy(error))

    def give_up(self, error: Exception) -> None:
        """A stream has waited ahead for too long: all that waits fails, and the other rank is to send no more."""
        self.ended = self.ended or error
        self.land_all()  # whose senders hear of it before they hear of the end
        self._letters.put(Closed())
        self._fail(self._incoming.waiting(), error)

    def _has_closed(self) -> ChannelBroken:
        return ChannelBroken(f"{self.name} has closed its communicator", hint="close when all transfers are done")

    def leave(self, why: Exception) -> None:
        """This side begins no transfer any more, and its receives that have met nothing fail."""
        self.ended = self.ended or why
        self._fail(self._incoming.waiting(), why)
        self.land_all()
        self._letters.put(Closed())

    def has_ended(self) -> bool:
        """After `leave`: whether neither rank copies anything any more, or the other one is dead."""
        if self.carrier.death is not None:
            return True
        self.progress()
        self.land_all()
        has_copies = self._awaited or self._pending.wanted or self.carrier.has_landings or self.carrier.are_under_way
        if self._is_closed and not (self._has_left or has_copies):
            self._has_left = True
            self._letters.put(Left())
        return self._has_left and self._is_left and self._letters.flush()
