"""Transfers between two ranks' GPUs on the fake machine: in any order of hosts and devices nothing races, and what is received was
sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="crossfade.p2p")

from crossfade.device.signals import Counter
from crossfade.errors import ChannelClosed
from crossfade.host.memory import Memory
from crossfade.p2p.board import BoardLayout
from crossfade.p2p.copies import SHORT_BYTES, Copies, Ends
from crossfade.p2p.letters import Letter
from crossfade.p2p.memory import OpenedMemories, Side
from crossfade.p2p.pair import Pair
from crossfade.p2p.transfer import Receive, Send, Transfer
from crossfade.p2p.windows import Counters
from crossfade.testing.fake import FakeDriver, FakeLink, Machine, Until, sample
from crossfade.testing.fake.machine import Program, Range

SHORT, MIDDLE, LONG = 64, SHORT_BYTES + 64, SHORT_BYTES + 4096
LENT_BYTES = LONG  # a value of at least so many is lent; longer ones, where streams wait ahead
LENT = LONG + 4096


class Post:
    """Letters between the two hosts."""

    def __init__(self, inbox: FakeLink, outbox: FakeLink) -> None:
        self.inbox, self.outbox = inbox, outbox

    def have_come(self) -> bool:
        has_come: bool = self.inbox.has_record()
        return has_come

    def take(self) -> Letter | None:
        letter: Letter | None = self.inbox.take() if self.inbox.has_record() else None
        return letter

    def put(self, letter: Letter) -> None:
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


class Rank:
    """One rank: its GPU with two streams of the program's, and its pair with the other rank. ``is_ahead``: streams wait ahead."""

    def __init__(
        self,
        machine: Machine,
        number: int,
        boards: list[Memory],
        post: Post,
        buffer_bytes: int,
        *,
        is_ahead: bool = False,
        num_queues: int | None = None,
    ) -> None:
        self.is_ahead = is_ahead
        self.name = f"rank {number}"
        driver: Any = FakeDriver(machine, self.name, num_queues=num_queues)
        self.driver: FakeDriver = driver
        self.compute, self.other = (self.driver.create_stream(name) for name in ("compute", "other"))
        self.current = self.compute
        self.side = Side(driver, count(), buffer_bytes, landed_bytes=LONG if is_ahead else 0)
        self.side.current_stream = lambda: self.current
        self.side.lent_bytes = LENT_BYTES + is_ahead
        layout = BoardLayout(2)
        self.post = post
        self.received: list[Receive] = []
        self.has_closed = False  # nothing of the other rank's is opened here any more
        self.peer = self
        own = Counters(driver, boards[number], layout.words_for(1 - number, is_host=False), f"windows of {self.name}")
        theirs = Counters(driver, boards[1 - number], layout.words_for(number, is_host=False), "the other's windows")
        memories = OpenedMemories((self.side.direct, self.side.staged), "the other rank", is_own=False)
        self.carrier = Copies({False: Ends(self.side.direct, self.side.short, own, theirs, memories)}, self.post)
        mark: Any = NoMark() if is_ahead else None
        self.pair = Pair("the other rank", None, self.post, self.carrier, mark)

    def tensor(self, size_bytes: int) -> Any:
        address = self.driver.allocate(size_bytes, f"a tensor of {self.name}")
        return SimpleNamespace(nbytes=size_bytes, data_ptr=lambda: address, address=address)

    def send(self, tensor: Any, tag: int) -> Send:
        send = Send(self.side, tag, 0, tensor, (tensor.nbytes,), 0, self.current)
        self.pair.send(send)
        return send

    def receive(self, tensor: Any, tag: int) -> Receive:
        receive = Receive(self.side, tag, 0, tensor, self.current)
        self.pair.receive(receive)
        self.received.append(receive)
        return receive

    def wait(self, transfer: Transfer) -> Program:
        """What `Work.wait` does; a host that waits yields."""
        while not transfer.is_settled:
            self.pair.progress()
            if self.is_ahead and isinstance(transfer, Receive):
                self.pair.land_ahead(transfer)
            if not transfer.is_settled:
                yield Until(f"a letter for {self.name}", self.post.inbox.has_record)
        assert transfer.error is None, transfer.error
        if isinstance(transfer, Receive):
            self.pair.land(transfer)
        transfer.join()

    def leave(self) -> Program:
        while any(receive.ahead for receive in self.received):
            self.pair.progress()
            yield None
        self.pair.leave(ChannelClosed("closed"))
        streams = [self.compute, self.other, *self.side.streams.all()]
        while not self.pair.has_ended():
            yield None
        for stream in (*streams, *self.side.streams.all()):
            yield self.driver.until_idle(stream)
            assert self.driver.is_idle(stream)
        self.carrier.close()
        self.has_closed = True
        yield Until("the other rank to close", lambda: self.peer.has_closed)
        self.side.close()


class Step(NamedTuple):
    """A value's way: what is different from one to the next."""

    size_bytes: int
    tag: int
    is_early: bool = False  # the receive has begun before the program goes on
    on_other: bool = False  # the receiver waits on another stream
    is_dropped: bool = False  # nobody waits: the attendant sees to it


def value(number: int, size_bytes: int) -> bytes:
    return bytes([number + 1]) * size_bytes


def sending(rank: Rank, steps: list[Step]) -> Program:
    tensors = {size_bytes: rank.tensor(size_bytes) for size_bytes in {step.size_bytes for step in steps}}
    for number, step in enumerate(steps):
        tensor = tensors[step.size_bytes]
        data = value(number, step.size_bytes)
        rank.driver.kernel(rank.compute, f"make {number}", writes=((tensor.address, data),))
        rank.pair.progress()
        send = rank.send(tensor, step.tag)
        yield None
        yield from rank.wait(send)  # the tensor is made anew behind it
    yield from rank.leave()
    for tensor in tensors.values():
        rank.driver.free(tensor.address)


def receiving(rank: Rank, steps: list[Step], seen: list[list[bytes]]) -> Program:
    tensors = [rank.tensor(step.size_bytes) for step in steps]
    early: deque[tuple[Step, Any, Receive, list[bytes]]] = deque()

    def use(step: Step, tensor: Any, receive: Receive, got: list[bytes]) -> Iterator[Until | None]:
        rank.current = rank.other if step.on_other else rank.compute
        if step.is_dropped:
            while not receive.is_enqueued:
                rank.pair.progress()
                rank.pair.land_all()
                yield None
        yield from rank.wait(receive)
        rank.driver.kernel(rank.current, "use", reads=(Range(tensor.address, step.size_bytes),), seen=got)
        rank.current = rank.compute

    for step, tensor, got in zip(steps, tensors, seen, strict=True):
        rank.driver.kernel(rank.compute, "use before", writes=((tensor.address, b"x" * step.size_bytes),))
        rank.pair.progress()
        begun = step, tensor, rank.receive(tensor, step.tag), got
        yield None
        if step.is_early:
            early.append(begun)
        else:
            yield from use(*begun)
    while early:
        yield from use(*early.popleft())
    yield from rank.leave()
    for tensor in tensors:
        rank.driver.free(tensor.address)


class World:
    """Both ranks' programs; the receiver takes the values in the order of ``order``."""

    def __init__(
        self,
        steps: list[Step],
        order: list[int] | None = None,
        buffer_bytes: int = 1 << 30,
        *,
        is_ahead: bool = False,
    ) -> None:
        self.is_ahead = is_ahead
        self.num_ahead = 0  # of all runs
        self.steps = steps
        self.order = order or list(range(len(steps)))
        self.buffer_bytes = buffer_bytes

    def __call__(self, machine: Machine) -> dict[str, Program]:
        boards = [Memory.create("board", BoardLayout(2).size_bytes) for _ in range(2)]
        there, back = FakeLink(machine, "rank 0", "rank 1"), FakeLink(machine, "rank 1", "rank 0")
        posts = [Post(back, there), Post(there, back)]
        ranks = [
            Rank(machine, number, boards, posts[number], self.buffer_bytes, is_ahead=self.is_ahead)
            for number in range(2)
        ]
        ranks[0].peer, ranks[1].peer = ranks[1], ranks[0]
        for board in boards:
            board.close()
        seen: list[list[bytes]] = [[] for _ in self.steps]
        machine.at_end.append(lambda: self.check(seen, ranks[1].carrier.num_ahead))
        steps = [self.steps[k] for k in self.order]
        return {"rank 0": sending(ranks[0], self.steps), "rank 1": receiving(ranks[1], steps, seen)}

    def check(self, seen: list[list[bytes]], num_ahead: int) -> None:
        self.num_ahead += num_ahead
        expected = [[value(k, self.steps[k].size_bytes)] for k in self.order]
        assert seen == expected


WORLDS = {
    "short": World([Step(SHORT, 0), Step(SHORT, 0), Step(SHORT, 1)]),
    "short, begun early": World([Step(SHORT, 0, is_early=True), Step(SHORT, 0), Step(SHORT, 1, is_early=True)]),
    "short, on another stream": World([Step(SHORT, 0, on_other=True), Step(SHORT, 0), Step(SHORT, 0, on_other=True)]),
    "short, dropped": World([Step(SHORT, 0, is_early=True, is_dropped=True), Step(SHORT, 0, is_dropped=True)]),
    "short, in reverse": World([Step(SHORT, 0), Step(SHORT, 1), Step(SHORT, 2)], [2, 1, 0]),
    "copied first": World([Step(MIDDLE, 0), Step(MIDDLE, 0, is_early=True), Step(SHORT, 1)]),
    "all lengths": World(
        [Step(SHORT, 0), Step(MIDDLE, 1), Step(SHORT, 0, is_early=True), Step(MIDDLE, 1, on_other=True)]
    ),
    "without room": World(
        [Step(MIDDLE, 0, True), *(Step(SHORT, tag, True) for tag in (1, 2, 3))], [3, 2, 1, 0], buffer_bytes=1
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_nothing_races(name: str) -> None:
    verdict = sample(WORLDS[name], range(60))
    assert verdict.is_ok, verdict


LENDING = World([Step(LONG, 0), Step(SHORT, 0), Step(LONG, 1, is_early=True), Step(LONG, 1)])


def test_nothing_races_where_values_are_lent() -> None:
    verdict = sample(LENDING, range(60))
    assert verdict.is_ok, verdict


@pytest.mark.parametrize("name", WORLDS)
def test_a_missing_wait_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So these worlds would show a race."""
    monkeypatch.setattr(Counter, "wait", lambda self, stream, value: None)
    assert sample(WORLDS[name], range(20)).kind == "race"


AHEAD = {
    "in order": World([Step(MIDDLE, 0), Step(LONG, 0), Step(MIDDLE, 0), Step(LONG, 0)], is_ahead=True),
    "begun early": World([Step(LONG, tag, is_early=True) for tag in (0, 1, 0, 1)], is_ahead=True),
    "in reverse": World([Step(LONG, tag) for tag in range(4)], [3, 2, 1, 0], is_ahead=True),
    "on another stream": World(
        [Step(MIDDLE, 0, on_other=True), Step(LONG, 1, is_early=True), Step(LONG, 0, on_other=True)], is_ahead=True
    ),
    "dropped": World([Step(MIDDLE, 0, is_dropped=True), Step(LONG, 0, True, is_dropped=True)], is_ahead=True),
    "with short ones": World(
        [Step(MIDDLE, 0, True), *(Step(SHORT, 1, True) for _ in range(2)), Step(LONG, 0, True)], is_ahead=True
    ),
    "with lent ones": World([Step(LONG, 0), Step(LENT, 0), Step(LONG, 1, True), Step(LENT, 1)], is_ahead=True),
    "without room": World([Step(LONG, tag, True) for tag in (1, 2, 3)], [2, 1, 0], buffer_bytes=1, is_ahead=True),
}


@pytest.mark.parametrize("name", AHEAD)
def test_nothing_races_where_streams_wait_ahead(name: str) -> None:
    verdict = sample(AHEAD[name], range(60), is_strict=False)
    assert verdict.is_ok, verdict
    assert AHEAD[name].num_ahead or name == "dropped"


class Pipeline(World):
    """Both ranks send and receive in turns, as the first two stages of a pipeline do, each on few hardware queues."""

    def __init__(self, num_steps: int, num_queues: int) -> None:
        super().__init__([Step(LONG, 0)] * num_steps, is_ahead=True)
        self.num_queues = num_queues

    def __call__(self, machine: Machine) -> dict[str, Program]:
        boards = [Memory.create("board", BoardLayout(2).size_bytes) for _ in range(2)]
        there, back = FakeLink(machine, "rank 0", "rank 1"), FakeLink(machine, "rank 1", "rank 0")
        posts = [Post(back, there), Post(there, back)]
        ranks = [
            Rank(machine, number, boards, posts[number], 1 << 30, is_ahead=True, num_queues=self.num_queues)
            for number in range(2)
        ]
        ranks[0].peer, ranks[1].peer = ranks[1], ranks[0]
        for board in boards:
            board.close()
        seen: list[list[bytes]] = [[] for _ in self.steps]
        machine.at_end.append(lambda: self.check(seen, ranks[0].carrier.num_ahead + ranks[1].carrier.num_ahead))
        return {"rank 0": self.first(ranks[0], seen), "rank 1": self.second(ranks[1])}

    def first(self, rank: Rank, seen: list[list[bytes]]) -> Program:
        """Sends a value, and waits for the one before to come back."""
        size_bytes = LONG
        tensors = [rank.tensor(size_bytes) for _ in self.steps]
        answers = [rank.tensor(size_bytes) for _ in self.steps]

        def take(number: int, receive: Receive) -> Program:
            yield from rank.wait(receive)
            place = Range(answers[number].address, size_bytes)
            rank.driver.kernel(rank.compute, f"use {number}", reads=(place,), seen=seen[number])

        due: tuple[int, Receive] | None = None
        for number, tensor in enumerate(tensors):
            rank.driver.kernel(rank.compute, f"make {number}", writes=((tensor.address, value(number, size_bytes)),))
            receive = rank.receive(answers[number], 1)
            send = rank.send(tensor, 0)
            yield None
            yield from rank.wait(send)
            if due is not None:
                yield from take(*due)
            due = number, receive
        assert due is not None
        yield from take(*due)
        yield from rank.leave()
        for tensor in (*tensors, *answers):
            rank.driver.free(tensor.address)

    def second(self, rank: Rank) -> Program:
        """Sends back what it has received."""
        tensors = [rank.tensor(LONG) for _ in self.steps]
        for tensor in tensors:
            receive = rank.receive(tensor, 0)
            yield None
            yield from rank.wait(receive)
            yield from rank.wait(rank.send(tensor, 1))
        yield from rank.leave()
        for tensor in tensors:
            rank.driver.free(tensor.address)


@pytest.mark.parametrize("num_queues", [1, 2, 8])
def test_a_pipeline_whose_streams_share_hardware_queues_comes_to_its_end(num_queues: int) -> None:
    """Streams wait ahead, and what they wait for is never behind them in a queue."""
    world = Pipeline(4, num_queues)
    verdict = sample(world, range(80), is_strict=False)
    assert verdict.is_ok, verdict
    assert world.num_ahead
