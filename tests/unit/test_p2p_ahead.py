"""Streams that wait for a posted receive before its send has begun: when they may, and what becomes of them."""

from __future__ import annotations

import mmap
import os
import random
import time
from typing import Any

import pytest

pytest.importorskip("torch", reason="crossfade.p2p")

from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError, ChannelTimeout
from crossfade.host.memory import Memory
from crossfade.p2p.board import Alarm, BoardLayout, NearLetters, SendMark, format_board
from crossfade.p2p.carrier import Carrier, Offer
from crossfade.p2p.cells import Place
from crossfade.p2p.letters import Announced, Closed, Exported, Posted, Refused, Window
from crossfade.p2p.pair import Pair
from crossfade.p2p.pairs import Pairs
from crossfade.p2p.transfer import OpenWindow, Receive, Send, Transfer
from tests.helpers.p2p_mail import BYTES, Mail, a_receive, a_send

PLACE = Place(Exported(0, BYTES, False, False, b""), 0)


class Word:
    """A counter, of which only the release matters."""

    def __init__(self) -> None:
        self.is_released = False

    def release(self) -> None:
        self.is_released = True


class Posting(Carrier):
    """All receives are posted; nothing is copied. ``known``: the sends that were pushed, and those that were announced."""

    def __init__(self) -> None:
        super().__init__()
        self.has_room = True
        self.pushed: list[Send] = []
        self.pulled: list[Receive] = []
        self.words: dict[Receive, Word] = {}

    def push(self, send: Send, window: Window) -> None:
        self.pushed.append(send)
        send.finish()

    def offer(self, send: Send, number: int, *, is_urgent: bool) -> Offer | None:
        if not self.has_room:
            return None
        send.finish()
        return Offer(Window(0, 0, 0, 1, is_lent=False), None)

    def place_of(self, receive: Receive) -> Place | None:
        return PLACE

    def post(self, receive: Receive, place: Place) -> Window:
        receive.window = OpenWindow(0, 1)
        return Window(0, 0, 0, 1, is_lent=True)

    def pull(self, receive: Receive, number: int, window: Window) -> None:
        self.pulled.append(receive)
        receive.finish()

    def land_ahead(self, receive: Receive) -> None:
        word: Any = Word()
        receive.ahead = self.words[receive] = word
        receive.finish()

    def finish(self, transfer: Transfer, window: OpenWindow) -> None:
        if isinstance(transfer, Receive):
            transfer.ahead = None
        transfer.finish()


class MarkedMail(Mail):
    """And what this rank told of its own sending; ``is_up``: the other rank's mark."""

    def __init__(self) -> None:
        super().__init__()
        self.is_up = False
        self.events: list[str] = []

    def begin(self) -> None:
        self.events.append("begin")

    def end(self) -> None:
        self.events.append("end")

    def is_other_sending(self) -> bool:
        return self.is_up


def opened() -> tuple[Pair, MarkedMail, Posting]:
    mail, carrier = MarkedMail(), Posting()
    return Pair("rank 1", None, mail, carrier, mail), mail, carrier


def goes_ahead(pair: Pair, receive: Receive) -> bool:
    """As `Pairs.land_ahead`, of one pair."""
    if not pair.pushes_next():
        return False
    pair.progress()
    if not (receive.is_settled or pair.is_waited_for):
        pair.land_ahead(receive)
    return receive.is_settled


def waiting() -> tuple[Pair, MarkedMail, Receive, Word]:
    """A pair with a receive for which a stream waits ahead."""
    pair, mail, carrier = opened()
    receive = a_receive()
    pair.receive(receive)
    assert goes_ahead(pair, receive)
    return pair, mail, receive, carrier.words[receive]


@pytest.mark.parametrize("why", ["the other rank is sending", "letters have no room", "a value of ours is waited for"])
def test_a_host_waits_where_the_other_rank_may_not_push(why: str) -> None:
    pair, mail, carrier = opened()
    carrier.has_room = why[0] != "a"
    pair.send(a_send())
    receive = a_receive()
    pair.receive(receive)
    mail.is_up, mail.is_full = why[0] == "t", why[0] == "l"
    assert not goes_ahead(pair, receive)


def test_a_value_that_was_announced_at_the_same_moment_is_pulled() -> None:
    pair, mail, carrier = opened()
    sender, from_sender, _ = opened()
    receive = a_receive()
    pair.receive(receive)
    sender.send(a_send())
    mail.inbox.extend(from_sender.written)
    assert goes_ahead(pair, receive)
    assert carrier.pulled == [receive]
    assert not carrier.words


def test_the_mark_is_up_while_letters_have_no_room() -> None:
    pair, mail, _ = opened()
    for is_full in (False, True):
        mail.is_full = is_full
        pair.begin_send()
        pair.send(a_send())
        pair.end_send()
    assert mail.events == ["begin", "end", "begin"]
    pair.progress()
    assert mail.events == ["begin", "end", "begin"]
    mail.is_full = False
    pair.begin_send()
    pair.progress()  # in the middle of another send it stays up
    assert mail.events[3:] == ["begin"]
    pair.end_send()
    assert mail.events[3:] == ["begin", "end"]


def test_a_value_that_is_found_to_be_wanted_of_this_host_keeps_it_waiting() -> None:
    """An announcement without a window, read in the last look, has this rank ask for the value."""
    pair, mail, _ = opened()
    other, receive = a_receive(tag=1), a_receive()
    pair.receive(other)
    pair.receive(receive)
    mail.inbox.append(Announced(1, BYTES, False, 0, (BYTES,), None))
    assert not goes_ahead(pair, receive)


@pytest.mark.parametrize("how", ["refused", "closed", "left", "died"])
def test_a_stream_is_let_go_when_its_value_does_not_come(how: str) -> None:
    pair, mail, receive, word = waiting()
    kind: type[Exception] = ChannelError
    match how:
        case "refused":
            mail.inbox.append(Refused(0, 1, 0, 7, is_host=False))
            pair.progress()
        case "closed":
            mail.inbox.append(Closed())
            pair.progress()
            kind = ChannelBroken
        case "left":
            pair.leave(ChannelClosed("closed"))
            kind = ChannelClosed
        case _:
            pair.on_death(ChannelBroken("rank 1 died"))
            kind = ChannelBroken
    assert word.is_released
    assert isinstance(receive.error, kind)
    assert isinstance(pair.carrier.lost, kind), "the program has waited for it already: the next call tells"


def test_a_stream_that_waits_too_long_is_let_go() -> None:
    pair, mail, carrier = opened()
    pairs = Pairs([pair, pair], [], 60.0, lambda what, limit_s: ChannelTimeout(f"{what} after {limit_s:g} s"))
    first, second, posted = a_receive(), a_receive(), a_receive()
    pairs.use([1])
    for receive in (first, second, posted):
        pair.receive(receive)
    assert pairs.land_ahead(first)
    assert pairs.land_ahead(second)
    assert pairs.awaited() == f"waits on its GPU for {first}"
    pairs.check()
    pairs._ahead[0] = time.monotonic(), first  # its time is over
    pairs.look()
    assert all(carrier.words[receive].is_released for receive in (first, second)), "no value comes any more"
    assert str(first.error).startswith(f"{first} after 60 s")
    assert isinstance(posted.error, ChannelTimeout)
    assert not pairs.awaited()
    assert isinstance(mail.written[-1], Closed), "the other rank must not push any more"
    assert not pairs.land_ahead(posted) or posted.error is not None
    with pytest.raises(ChannelTimeout):
        pair.receive(a_receive())
    with pytest.raises(ChannelTimeout):
        pairs.check()
    pairs.forget()
    with pytest.raises(ChannelTimeout):
        pairs.check()


def rows(boards: list[mmap.mmap], layout: BoardLayout, rank: int) -> tuple[mmap.mmap, int, mmap.mmap, int]:
    return boards[rank], layout.letters_of(1 - rank), boards[1 - rank], layout.letters_of(rank)


@pytest.mark.timeout(120)
def test_what_a_stream_may_wait_for_is_pushed_whatever_both_hosts_do_at_once() -> None:
    """Two processes, thousands of sends against receives: none that is waited for ahead is announced. The sender waits where it is
    four values ahead: on a machine that is busy it would else have sent all of them before the other process runs.
    """
    num, layout = 4000, BoardLayout(2)
    num_settled = mmap.mmap(-1, 4)
    memories = [Memory.create("board", layout.size_bytes) for _ in range(2)]
    boards = [format_board(memory, layout) for memory in memories]

    def open_pair(rank: int) -> tuple[Pair, Posting]:
        row = rows(boards, layout, rank)
        carrier = Posting()
        return Pair("the other", None, NearLetters(*row, Alarm(boards[1 - rank])), carrier, SendMark(*row)), carrier

    child = os.fork()
    if child == 0:
        try:
            draw = random.Random(1)
            pair, _ = open_pair(1)
            for number in range(num):
                while number - int.from_bytes(num_settled[:4], "little") > 4:
                    pair.progress()
                pair.begin_send()
                pair.progress()
                pair.send(a_send())
                pair.end_send()
                for _ in range(draw.randrange(60)):
                    pair.progress()
            while not pair.is_quiet:
                pair.progress()
        finally:
            os._exit(0)
    draw = random.Random(2)
    pair, carrier = open_pair(0)
    deadline = time.monotonic() + 100
    for number in range(num):
        num_settled[:4] = number.to_bytes(4, "little")
        receive = a_receive()
        pair.receive(receive)
        goes_ahead(pair, receive)
        while receive.ahead is not None or not receive.is_settled:
            pair.progress()
            assert receive.window is None or not receive.window.is_void or receive.ahead is None
            assert time.monotonic() < deadline
        for _ in range(draw.randrange(20)):
            pair.progress()
    num_settled[:4] = num.to_bytes(4, "little")
    os.waitpid(child, 0)
    assert not set(carrier.pulled) & set(carrier.words), "a stream waits for a push that never comes"
    assert carrier.words
    assert carrier.pulled
    for memory in memories:
        memory.close()


def test_posts_are_letters_before_the_mark_is_looked_at() -> None:
    pair, mail, _ = opened()
    pair.receive(a_receive())
    assert [type(letter) for letter in mail.written] == [Posted]
