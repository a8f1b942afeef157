"""One rank's side of a pair where devices are quicker than letters: a window has closed, and its word serves another one, before
the letter of it is read.
"""

from __future__ import annotations

from crossfade.errors import ChannelBroken, ChannelClosed, DeviceError
from crossfade.p2p.carrier import Carrier, Offer
from crossfade.p2p.letters import Announced, Closed, Here, Left, Posted, Pulled, Pushed, Read, Requested, Window
from crossfade.p2p.pair import Pair
from crossfade.p2p.transfer import OpenWindow, Receive, Send, Transfer
from tests.helpers.p2p_mail import BYTES, Mail, a_receive, a_send


class OneWord(Carrier):
    """Its windows have one word, in turns."""

    def __init__(self, *, is_lent: bool) -> None:
        super().__init__()
        self.is_lent = is_lent
        self.is_full = False
        self.uses = 0
        self.finished: list[Transfer] = []
        self.pushed: list[Send] = []

    def offer(self, send: Send, number: int, *, is_urgent: bool) -> Offer | None:
        if self.is_full and not is_urgent:
            return None
        self.uses += 1
        return Offer(Window(0, 0, 0, self.uses, self.is_lent), OpenWindow(0, self.uses, number, send))

    def finish(self, transfer: Transfer, window: OpenWindow) -> None:
        self.finished.append(transfer)
        transfer.finish()

    def push(self, send: Send, window: Window) -> None:
        self.pushed.append(send)

    def pull(self, receive: Receive, number: int, window: Window) -> None:
        receive.finish()


def opened(*, is_lent: bool) -> tuple[Pair, Mail, OneWord]:
    mail, carrier = Mail(), OneWord(is_lent=is_lent)
    return Pair("rank 1", None, mail, carrier), mail, carrier


def test_a_word_that_serves_another_value_when_the_letter_of_the_first_is_read() -> None:
    pair, mail, carrier = opened(is_lent=True)
    first, second = a_send(), a_send()
    pair.send(first)
    pair.send(second)
    mail.inbox.append(Pulled(0, 1, is_host=False))
    pair.progress()
    assert carrier.finished == [first]
    mail.inbox.append(Pulled(0, 2, is_host=False))
    pair.progress()
    assert carrier.finished == [first, second]


class Refusing(OneWord):
    """Its device refuses what is to be enqueued once a lent value is taken."""

    def finish(self, transfer: Transfer, window: OpenWindow) -> None:
        raise DeviceError("out of memory")


def test_a_device_that_refuses_once_a_value_is_taken_ends_the_pair_with_the_reason() -> None:
    mail = Mail()
    pair = Pair("rank 1", None, mail, Refusing(is_lent=True))
    pair.send(send := a_send())
    mail.inbox.append(Pulled(0, 1, is_host=False))
    pair.progress()
    assert isinstance(send.error, ChannelBroken)
    assert "could not be enqueued: out of memory" in str(send.error)
    assert pair.ended is not None
    assert any(isinstance(letter, Closed) for letter in mail.written)


def test_a_value_was_copied_before_the_letter_of_the_receive_that_it_met_is_read() -> None:
    pair, mail, carrier = opened(is_lent=False)
    mail.inbox.append(
        Posted(0, BYTES, False, 0, Window(0, 0, 0, 1, is_lent=True))
    )  # on its way when the value is announced
    pair.send(a_send())
    pair.progress()
    pair.send(a_send())
    assert not carrier.pushed, "the receive had met the first value"
    assert [type(letter) for letter in mail.written] == [Announced, Announced]
    mail.inbox.append(Posted(0, BYTES, False, 2, Window(0, 0, 0, 2, is_lent=True)))
    pair.progress()
    pair.send(third := a_send())
    assert carrier.pushed == [third]
    assert isinstance(mail.written[-1], Pushed)


def test_what_announcements_are_remembered_is_bounded_though_no_receive_is_posted() -> None:
    sender, from_sender, _ = opened(is_lent=False)
    receiver, to_receiver, _ = opened(is_lent=False)
    most = 0
    for _ in range(1000):
        sender.send(a_send())
        to_receiver.inbox.append(from_sender.written.pop())
        receiver.receive(a_receive())
        receiver.progress()
        from_sender.inbox.extend(letter for letter in to_receiver.written if isinstance(letter, Read))
        to_receiver.written.clear()
        sender.progress()
        most = max(most, len(sender._outgoing._unread))
    assert 0 < most <= 64


def test_a_value_that_was_requested_is_still_served_when_the_other_rank_closes_at_once() -> None:
    pair, mail, carrier = opened(is_lent=False)
    carrier.is_full = True
    pair.send(met := a_send())
    pair.send(unmet := a_send())
    mail.inbox.extend([Requested(1), Closed()])
    pair.progress()
    assert isinstance(mail.written[-1], Here)
    assert met.error is None
    assert "has closed its communicator" in str(unmet.error)
    pair.leave(ChannelClosed("closed"))
    mail.inbox.append(Left())
    assert pair.has_ended()


def test_a_value_that_was_lent_at_request_is_pulled_after_the_other_rank_has_closed() -> None:
    pair, mail, carrier = opened(is_lent=True)
    carrier.is_full = True
    pair.send(send := a_send())
    mail.inbox.append(Requested(1))
    pair.progress()
    mail.inbox.append(Closed())  # while the answer is on its way
    pair.progress()
    assert send.error is None
    mail.inbox.append(Pulled(0, 1, is_host=False))
    pair.progress()
    assert carrier.finished == [send]
