"""Which send meets which receive: for all orders of calls and letters, the k-th with a tag meets the k-th with that tag."""

from __future__ import annotations

from collections import Counter, deque

from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.p2p.matching import Incoming, Outgoing


class Link:
    """A sender and a receiver, with letters on their way in both directions; what has met, as (tag, send, receive)."""

    def __init__(self) -> None:
        self.outgoing: Outgoing[tuple[int, int]] = Outgoing()
        self.incoming: Incoming[tuple[int, int], tuple[int, int]] = Incoming()
        self.to_receiver: deque[tuple[str, int, int]] = deque()
        self.to_sender: deque[tuple[int | None, int, int]] = deque()  # without a tag: what has been read
        self.num_sent: Counter[int] = Counter()
        self.num_received: Counter[int] = Counter()
        self.met: list[tuple[int, int, int]] = []
        self.pushed: deque[tuple[int, int]] = deque()

    def send(self, tag: int) -> None:
        number = self.num_sent[tag]
        self.num_sent[tag] += 1
        posted = self.outgoing.send(tag)
        if posted is None:
            self.to_receiver.append(("announced", tag, number))
        else:
            assert posted == (tag, number)
            self.to_receiver.append(("pushed", tag, number))

    def receive(self, tag: int, is_postable: bool) -> None:
        number = self.num_received[tag]
        self.num_received[tag] += 1
        value, is_posted = self.incoming.receive(tag, (tag, number), is_postable=is_postable)
        if value is not None:
            self.met.append((tag, value[1], number))
        elif is_posted:
            assert is_postable
            self.to_sender.append((tag, self.incoming.num_read, number))

    def take_at_receiver(self) -> None:
        kind, tag, number = self.to_receiver.popleft()
        found = self.incoming.on_announced(tag, (tag, number)) if kind == "announced" else self.incoming.on_pushed(tag)
        if found is not None:
            self.met.append((tag, number, found[1]))
        else:
            assert kind == "announced"

    def take_at_sender(self) -> None:
        tag, num_read, number = self.to_sender.popleft()
        if tag is None:
            self.outgoing.on_read(num_read)
        else:
            self.outgoing.on_posted(tag, num_read, (tag, number))

    def tell(self) -> None:
        self.to_sender.append((None, self.incoming.num_read, 0))


_STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 2)),
        st.tuples(st.sampled_from(["post", "receive"]), st.integers(0, 2)),
        st.tuples(st.sampled_from(["to receiver", "to sender", "tell"]), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=600, deadline=None)
@given(_STEPS)
def test_the_kth_send_with_a_tag_meets_the_kth_receive_with_it(steps: list[tuple[str, int]]) -> None:
    link = Link()
    for step, tag in steps:
        if step == "send":
            link.send(tag)
        elif step in ("post", "receive"):
            link.receive(tag, step == "post")
        elif step == "tell":
            link.tell()
        elif step == "to receiver" and link.to_receiver:
            link.take_at_receiver()
        elif step == "to sender" and link.to_sender:
            link.take_at_sender()
    for tag in range(3):  # what is missing on either side comes at last
        while link.num_sent[tag] < link.num_received[tag]:
            link.send(tag)
        while link.num_received[tag] < link.num_sent[tag]:
            link.receive(tag, is_postable=True)
    while link.to_receiver or link.to_sender:
        if link.to_receiver:
            link.take_at_receiver()
        if link.to_sender:
            link.take_at_sender()
    assert sorted(link.met) == [(tag, k, k) for tag in range(3) for k in range(link.num_sent[tag])]
    link.outgoing.on_read(link.incoming.num_read)
    assert link.outgoing.is_empty
    assert link.incoming.is_empty


def test_a_post_does_not_overtake_a_receive_that_is_not_posted() -> None:
    incoming: Incoming[int, str] = Incoming()
    assert incoming.receive(7, "first", is_postable=False) == (None, False)
    assert incoming.receive(7, "second", is_postable=True) == (None, False)
    assert incoming.on_announced(7, 1) == "first"
    assert incoming.on_announced(7, 2) == "second"


def test_a_receive_that_is_taken_back_meets_nothing() -> None:
    incoming: Incoming[int, str] = Incoming()
    incoming.receive(7, "first", is_postable=False)
    assert incoming.cancel(7, "first")
    assert not incoming.cancel(7, "first")
    assert incoming.on_announced(7, 1) is None
    assert incoming.receive(7, "second", is_postable=True) == (1, False)
    assert incoming.is_empty
