"""Ranks of `crossfade.p2p` on the fake machine: a GPU each, and hosts that tell each other by letters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

from crossfade.device.staged_layout import StagedLayout
from crossfade.errors import ChannelClosed, ChannelTimeout
from crossfade.host.memory import Memory
from crossfade.p2p.board import BoardLayout
from crossfade.p2p.copies import Copies
from crossfade.p2p.letters import Letter
from crossfade.p2p.memory import SHORT_BYTES, OpenedMemories, Side
from crossfade.p2p.pair import Pair
from crossfade.p2p.pairs import Pairs
from crossfade.p2p.pull_streams import Budget
from crossfade.p2p.transfer import Receive, Send, Transfer
from crossfade.p2p.windows import Counters, Ends
from crossfade.testing.fake import FakeDriver, FakeLink, Machine, Until
from crossfade.testing.fake.machine import Program, Range

SHORT, MIDDLE, LONG = 64, SHORT_BYTES + 64, SHORT_BYTES + 4096
LENT = LONG + 4096
"""A value of this length is lent in any case; where streams do not wait ahead, a long one as well."""
PLENTY = 1 << 30


class Post:
    """Letters between two hosts."""

    def __init__(self, inbox: FakeLink, outbox: FakeLink) -> None:
        self.inbox, self.outbox = inbox, outbox
        self.said: list[Letter] = []
        self.have_come = inbox.has_record

    def take(self) -> Letter | None:
        letter: Letter | None = self.inbox.take() if self.inbox.has_record() else None
        return letter

    def put(self, letter: Letter) -> None:
        self.said.append(letter)
        self.outbox.send(letter)

    def flush(self) -> bool:
        return True

    def drop(self) -> None: ...


class NoMark:
    """Says that no rank is in the middle of a send: on the fake machine a host's call is one step."""

    def begin(self) -> None: ...

    def end(self) -> None: ...

    def is_other_sending(self) -> bool:
        return False


class Setting(NamedTuple):
    """How ranks are opened. ``is_ahead``: streams wait ahead; ``num_queues``: hardware queues of a GPU, None for one a stream;
    ``is_staged``: GPUs do not reach each other.
    """

    is_ahead: bool = False
    buffer_bytes: Sequence[int] = (PLENTY,)  # of each rank, the last one for those that are left
    num_queues: int | None = None
    is_staged: bool = False


class Rank:
    """One rank: its GPU with two streams of the program's, and its pairs with all ranks."""

    def __init__(
        self, machine: Machine, number: int, boards: list[Memory], links: dict[tuple[int, int], FakeLink], how: Setting
    ) -> None:
        self.name = f"rank {number}"
        self.is_ahead = how.is_ahead
        driver: Any = FakeDriver(machine, self.name, num_queues=how.num_queues)
        self.driver: FakeDriver = driver
        self.compute, self.other = (self.driver.create_stream(name) for name in ("compute", "other"))
        self.current = self.compute
        buffer_bytes = how.buffer_bytes[min(number, len(how.buffer_bytes) - 1)]
        budget = Budget(how.num_queues or 32)
        landed_bytes = LONG if how.is_ahead else 0
        more: dict[str, Any] = {"landed_bytes": landed_bytes, "pull_budget": budget, "is_ahead": how.is_ahead}
        side = self.side = Side(driver, count(), buffer_bytes, **more)
        side.current_stream = lambda: self.current
        side.lent_bytes = LONG + how.is_ahead
        side.staged.layout = StagedLayout(chunk_bytes=SHORT_BYTES)  # more than one piece for all but short values
        self.posts = [Post(links[other, number], links[number, other]) for other in range(len(boards))]
        self.received: list[Receive] = []
        self.all = [self]
        self.is_done = False  # with what another rank's program waits for
        self.has_closed = False  # nothing of the other ranks' is opened here any more
        layout = BoardLayout(len(boards))
        each = []
        for other, post in enumerate(self.posts):
            words = layout.words_for(other, is_host=False)
            own = theirs = Counters(driver, boards[number], words, f"windows of {self.name} for {other}")
            if other != number:
                words = layout.words_for(number, is_host=False)
                theirs = Counters(driver, boards[other], words, f"windows of rank {other} for {number}")
            memories = OpenedMemories((side.direct, side.staged), f"rank {other}", is_own=other == number)
            shared = side.staged if how.is_staged and other != number else side.direct
            ends = {False: Ends(shared, side.short, own, theirs, memories)}
            mark = NoMark() if how.is_ahead and other != number else None
            each.append(Pair(f"rank {other}", None, post, Copies(ends, post), mark))
        self.pairs = Pairs(each, [side], 1e9, lambda what, _: ChannelTimeout(what))

    @property
    def num_ahead(self) -> int:
        return sum(pair.carrier.num_ahead for pair in self.pairs.each)

    def tensor(self, size_bytes: int) -> Any:
        address = self.driver.allocate(size_bytes, f"a tensor of {self.name}")
        return SimpleNamespace(nbytes=size_bytes, data_ptr=lambda: address, address=address)

    def make(self, tensor: Any, data: bytes, *after: Any) -> None:
        """A kernel on the current stream that reads some tensors and writes one."""
        reads = tuple(Range(each.address, each.nbytes) for each in after)
        self.driver.kernel(self.current, "make", reads=reads, seen=[], writes=((tensor.address, data),))

    def look(self) -> bool:
        return self.pairs.look()

    def land_all(self) -> None:
        for pair in self.pairs.each:
            pair.land_all()

    def send(self, tensor: Any, rank: int, tag: int) -> Send:
        self.pairs.use([rank])
        self.look()
        send = Send(self.side, tag, rank, tensor, (tensor.nbytes,), 0, self.current)
        self.pairs.each[rank].send(send)
        return send

    def receive(self, tensor: Any, rank: int, tag: int) -> Receive:
        self.pairs.use([rank])
        self.look()
        receive = Receive(self.side, tag, rank, tensor, self.current)
        self.pairs.each[rank].receive(receive)
        self.received.append(receive)
        return receive

    def has_letters(self) -> bool:
        return any(post.inbox.has_record() for post in self.posts)

    def wait(self, transfer: Transfer, *, polls: bool = False) -> Program:
        """What `Work.wait` does; a host that waits yields. ``polls``: not only for letters, but also for what devices do."""
        while not transfer.is_settled:
            self.look()
            if self.is_ahead and isinstance(transfer, Receive):
                self.pairs.land_ahead(transfer)
            if not transfer.is_settled:
                is_quick = polls or self.pairs.has_landings_to_come()
                yield None if is_quick else Until(f"a letter for {self.name}", self.has_letters)
        assert transfer.error is None, transfer.error
        if not self.pairs.land(transfer):
            transfer.join()

    def leave(self) -> Program:
        """What `P2P.close` does."""
        while any(receive.ahead for receive in self.received):
            self.look()
            yield None
        for pair in self.pairs.each:
            pair.leave(ChannelClosed("closed"))
        streams = [self.compute, self.other, *self.side.streams.all()]
        while not all([pair.has_ended() for pair in self.pairs.each]):
            yield None
        for stream in (*streams, *self.side.streams.all()):
            yield self.driver.until_idle(stream)
            assert self.driver.is_idle(stream)
        for pair in self.pairs.each:
            pair.carrier.close()
        self.has_closed = True
        yield Until("the other ranks to close", lambda: all(rank.has_closed for rank in self.all))
        self.side.close()

    def free(self, *tensors: Any) -> None:
        for tensor in tensors:
            self.driver.free(tensor.address)


def open_ranks(machine: Machine, num_ranks: int, how: Setting) -> list[Rank]:
    """The ranks of one run."""
    boards = [Memory.create("board", BoardLayout(num_ranks).size_bytes) for _ in range(num_ranks)]
    numbers = range(num_ranks)
    links = {(a, b): FakeLink(machine, f"rank {a}", f"rank {b}") for a in numbers for b in numbers}
    ranks = [Rank(machine, number, boards, links, how) for number in numbers]
    for rank in ranks:
        rank.all = ranks
    for board in boards:
        board.close()
    return ranks


class Case:
    """A world of ranks that each run a function."""

    def __init__(self, how: Setting, *programs: Callable[[Rank], Program]) -> None:
        self.how, self.programs = how, programs
        self.num_ahead = 0  # of all runs

    def __call__(self, machine: Machine) -> dict[str, Program]:
        ranks = open_ranks(machine, len(self.programs), self.how)
        machine.at_end.append(lambda: self._count(ranks))
        return {rank.name: program(rank) for rank, program in zip(ranks, self.programs, strict=True)}

    def _count(self, ranks: Sequence[Rank]) -> None:
        self.num_ahead += sum(rank.num_ahead for rank in ranks)
