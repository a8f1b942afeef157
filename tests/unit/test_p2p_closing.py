"""Two ranks' sides of a pair, with letters on their way in both directions: whenever either closes, both come to an end, and what
was received was sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from crossfade.errors import ChannelBroken, ChannelClosed
from crossfade.p2p.carrier import Carrier, Offer
from crossfade.p2p.cells import Place
from crossfade.p2p.letters import Exported, Letter, Pulled, Window
from crossfade.p2p.pair import Pair
from crossfade.p2p.transfer import OpenWindow, Receive, Send, Transfer

BYTES = 1024


class Post:
    """The letters of one rank. What it has put is read by the other one once it has come."""

    def __init__(self) -> None:
        self.inbox: deque[Letter] = deque()
        self.num_here = 0  # of these
        self.other: Post = self

    def have_come(self) -> bool:
        return self.num_here > 0

    def take(self) -> Letter | None:
        if not self.num_here:
            return None
        self.num_here -= 1
        return self.inbox.popleft()

    def put(self, letter: Letter) -> None:
        self.other.inbox.append(letter)

    def flush(self) -> bool:
        return True

    def drop(self) -> None:
        self.inbox.clear()


class Copied(Carrier):
    """Copies that are made at once. ``met``: tag, number of the send, number of the receive."""

    def __init__(
        self,
        met: list[tuple[int, int, int]],
        letters: Post,
        is_full: bool,
        is_lending: bool,
        can_be_posted: bool,
        is_lazy: bool,
    ) -> None:
        super().__init__()
        self.letters = letters
        self.is_lazy = is_lazy  # values stay where they lie until they are landed
        self.other: Copied = self
        self.is_full, self.is_lending, self.can_be_posted = is_full, is_lending, can_be_posted
        self._met = met
        self._uses = 0
        self._offered: dict[int, tuple[Send, OpenWindow]] = {}
        self._posted: dict[int, Receive] = {}
        self._landings: list[Receive] = []

    def _open(self, number: int = 0, send: Send | None = None) -> OpenWindow:
        self._uses += 1
        return OpenWindow(0, self._uses, number, send)

    def offer(self, send: Send, number: int, *, is_urgent: bool) -> Offer | None:
        if self.is_full and not is_urgent:
            return None
        window = self._open(number, send)
        self._offered[window.uses] = send, window
        if not self.is_lending:
            send.finish()
        return Offer(Window(0, 0, 0, window.uses, self.is_lending), window)

    def pull(self, receive: Receive, number: int, window: Window) -> None:
        send, _ = self.other._offered.pop(window.uses)
        self._note(send, receive)
        if window.is_lent:
            self.letters.put(Pulled(window.word, window.uses, is_host=False))

    def accept(self, receive: Receive, number: int, window: Window) -> None:
        if self.is_lazy and not window.is_lent:
            receive.landing = window
            self._landings.append(receive)
        else:
            self.pull(receive, number, window)

    def land_beside(self, receive: Receive, *, may_wait: bool) -> None:
        window, receive.landing = receive.landing, None
        assert isinstance(window, Window)
        self._landings.remove(receive)
        self.pull(receive, 0, window)

    def landings(self) -> list[Receive]:
        return list(self._landings)

    @property
    def has_landings(self) -> bool:
        return bool(self._landings)

    def place_of(self, receive: Receive) -> Place | None:
        return Place(Exported(0, BYTES, False, False, b""), 0) if self.can_be_posted else None

    def post(self, receive: Receive, place: Place) -> Window:
        receive.window = self._open()
        self._posted[receive.window.uses] = receive
        return Window(0, 0, 0, receive.window.uses, is_lent=True)

    def push(self, send: Send, window: Window) -> None:
        send.finish()
        self._note(send, self.other._posted.pop(window.uses))

    def finish(self, transfer: Transfer, window: OpenWindow) -> None:
        transfer.finish()

    def _note(self, send: Send, receive: Receive) -> None:
        receive.finish()
        self._met.append((send.tag, send.rank, receive.rank))
        assert send.error is None, "it was received"


class Side:
    """One of the two ranks. In place of the other rank, a transfer has its number among those with its tag."""

    def __init__(self, met: list[tuple[int, int, int]], flags: Sequence[bool]) -> None:
        self.post = Post()
        self.carrier = Copied(met, self.post, *flags)
        self.pair = Pair("the other rank", None, self.post, self.carrier)
        self.has_left = False
        self.transfers: list[Transfer] = []
        self._nums: dict[tuple[type[Transfer], int], int] = {}

    def _number(self, kind: type[Transfer], tag: int) -> int:
        number = self._nums.get((kind, tag), 0)
        self._nums[kind, tag] = number + 1
        return number

    def do(self, what: str, tag: int) -> None:
        side: Any = SimpleNamespace(is_host=False)
        tensor: Any = SimpleNamespace(nbytes=BYTES)
        if what == "letters":
            self.post.num_here = min(len(self.post.inbox), self.post.num_here + tag + 1)
            self.pair.progress()
        elif what == "land":
            self.pair.land_all()
        elif what == "leave":
            self.leave()
        elif not self.has_left and self.pair.ended is None:
            kind = Send if what == "send" else Receive
            number = self._number(kind, tag)
            transfer: Any
            if kind is Send:
                transfer, begin = Send(side, tag, number, tensor, (BYTES,), 0, 0), self.pair.send
            else:
                transfer, begin = Receive(side, tag, number, tensor, 0), self.pair.receive  # type: ignore[assignment]
            self.transfers.append(transfer)
            try:
                begin(transfer)
            except ChannelBroken as error:  # the other rank has closed
                transfer.fail(error)

    def leave(self) -> None:
        if not self.has_left:
            self.has_left = True
            self.pair.leave(ChannelClosed("closed"))

    def has_ended(self) -> bool:
        self.post.num_here = len(self.post.inbox)
        return self.pair.has_ended()


_STEP = st.one_of(
    st.tuples(st.sampled_from(["send", "receive"]), st.integers(0, 1)),
    st.tuples(st.just("letters"), st.integers(0, 3)),
    st.tuples(st.sampled_from(["leave", "land"]), st.just(0)),
)
_FLAGS = st.tuples(*[st.booleans()] * 4)


@settings(max_examples=800, deadline=None)
@given(_FLAGS, _FLAGS, st.lists(st.tuples(st.booleans(), _STEP), max_size=40))
def test_both_sides_end_and_what_was_received_was_sent(
    flags: tuple[bool, ...], others: tuple[bool, ...], steps: list[tuple[bool, tuple[str, int]]]
) -> None:
    met: list[tuple[int, int, int]] = []
    sides = first, second = Side(met, flags), Side(met, others)
    first.post.other, second.post.other = second.post, first.post
    first.carrier.other, second.carrier.other = second.carrier, first.carrier
    for which, (what, tag) in steps:
        sides[which].do(what, tag)
    for side in sides:
        side.leave()
    ended = [False, False]
    for _ in range(10):
        ended = [was or side.has_ended() for was, side in zip(ended, sides, strict=True)]
    assert all(ended)
    assert all(transfer.is_settled for side in sides for transfer in side.transfers)
    assert all(sent == received for _, sent, received in met), "the k-th with a tag meets the k-th"
