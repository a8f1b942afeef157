"""Transfers between two ranks' GPUs on the fake machine: in any order of hosts and devices nothing races, and what is received was
sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="crossfade.p2p")

from crossfade.device.signals import Counter
from crossfade.p2p.transfer import Receive
from crossfade.testing.fake import Machine, Until, sample
from crossfade.testing.fake.machine import Program, Range
from tests.helpers.fake_ranks import LENT, LONG, MIDDLE, PLENTY, SHORT, Case, Rank, Setting, open_ranks


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
        rank.look()
        send = rank.send(tensor, 1, step.tag)
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
                rank.look()
                rank.land_all()
                yield None
        yield from rank.wait(receive)
        rank.driver.kernel(rank.current, "use", reads=(Range(tensor.address, step.size_bytes),), seen=got)
        rank.current = rank.compute

    for step, tensor, got in zip(steps, tensors, seen, strict=True):
        rank.driver.kernel(rank.compute, "use before", writes=((tensor.address, b"x" * step.size_bytes),))
        rank.look()
        begun = step, tensor, rank.receive(tensor, 0, step.tag), got
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
        self, steps: list[Step], order: list[int] | None = None, buffer_bytes: int = PLENTY, *, is_ahead: bool = False
    ) -> None:
        self.steps = steps
        self.order = order or list(range(len(steps)))
        self.how = Setting(is_ahead, [buffer_bytes])
        self.num_ahead = 0  # of all runs

    def __call__(self, machine: Machine) -> dict[str, Program]:
        ranks = open_ranks(machine, 2, self.how)
        seen: list[list[bytes]] = [[] for _ in self.steps]
        machine.at_end.append(lambda: self.check(seen, ranks[1].num_ahead))
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


def first(rank: Rank) -> Program:
    """Sends values, and waits for the one before to come back."""
    tensors, answers = ([rank.tensor(LONG) for _ in range(4)] for _ in range(2))
    seen: list[list[bytes]] = [[] for _ in tensors]
    receives: list[Receive] = []

    def take(number: int) -> Program:
        yield from rank.wait(receives[number])
        rank.driver.kernel(rank.compute, "use", reads=(Range(answers[number].address, LONG),), seen=seen[number])

    for number, tensor in enumerate(tensors):
        rank.make(tensor, value(number, LONG))
        receives.append(rank.receive(answers[number], 1, 1))
        send = rank.send(tensor, 1, 0)
        yield None
        yield from rank.wait(send)
        if number:
            yield from take(number - 1)
    yield from take(len(tensors) - 1)
    yield from rank.leave()
    assert seen == [[value(number, LONG)] for number in range(len(tensors))]
    rank.free(*tensors, *answers)


def second(rank: Rank) -> Program:
    """Sends back what it has received."""
    tensors = [rank.tensor(LONG) for _ in range(4)]
    for tensor in tensors:
        receive = rank.receive(tensor, 0, 0)
        yield None
        yield from rank.wait(receive)
        yield from rank.wait(rank.send(tensor, 0, 1))
    yield from rank.leave()
    rank.free(*tensors)


@pytest.mark.parametrize("num_queues", [1, 2, 8])
def test_a_pipeline_whose_streams_share_hardware_queues_comes_to_its_end(num_queues: int) -> None:
    """Streams wait ahead, and what they wait for is never behind them in a queue."""
    world = Case(Setting(is_ahead=True, num_queues=num_queues), first, second)
    verdict = sample(world, range(80), is_strict=False)
    assert verdict.is_ok, verdict
    assert world.num_ahead


def crossed(size_bytes: int, other_bytes: int, num_looks: int) -> Case:
    """The second rank begins to receive what the first one sends last, behind what that waits for ahead."""
    room = [PLENTY, PLENTY] if size_bytes == LENT else [2 * 65536, PLENTY]

    def ahead(rank: Rank) -> Program:
        x, v, last = rank.tensor(other_bytes), rank.tensor(LONG), rank.tensor(size_bytes)
        rank.make(x, value(1, other_bytes))
        receive = rank.receive(v, 1, 5)
        send = rank.send(x, 1, 2)
        yield None
        yield from rank.wait(receive)
        rank.make(last, value(2, size_bytes), v)
        for each in (rank.send(last, 1, 1), send):
            yield None
            yield from rank.wait(each)
        yield from rank.leave()
        rank.free(x, v, last)

    def behind(rank: Rank) -> Program:
        x, v, last = rank.tensor(other_bytes), rank.tensor(LONG), rank.tensor(size_bytes)
        for _ in range(12):
            rank.look()
            yield None
        early = rank.receive(last, 0, 1)
        for _ in range(num_looks):
            rank.look()
            yield None
        receive = rank.receive(x, 0, 2)
        yield from rank.wait(receive)
        rank.make(v, value(3, LONG), x)
        yield from rank.wait(rank.send(v, 0, 5))
        yield from rank.wait(early)
        yield from rank.leave()
        rank.free(x, v, last)

    return Case(Setting(is_ahead=True, buffer_bytes=room), ahead, behind)


@pytest.mark.parametrize("num_looks", [1, 6])
@pytest.mark.parametrize("other_bytes", [SHORT, MIDDLE, LENT])
@pytest.mark.parametrize("size_bytes", [LONG, LENT])
def test_no_copy_of_ours_stands_in_front_of_another_one(size_bytes: int, other_bytes: int, num_looks: int) -> None:
    """A pull of a value that is behind another rank's wait ahead would hold up the pull of the value that ends this wait."""
    verdict = sample(crossed(size_bytes, other_bytes, num_looks), range(40), is_strict=False)
    assert verdict.is_ok, verdict


def test_a_stream_does_not_wait_ahead_while_a_third_rank_waits_for_this_host() -> None:
    """Rank 0 has no room for a value that rank 1 needs, so that rank 2 can send what rank 0 waits for."""

    def zero(rank: Rank) -> Program:
        v, kept, s, a = (rank.tensor(LONG) for _ in range(4))
        receive = rank.receive(v, 2, 5)
        rank.make(kept, value(0, LONG))
        first = rank.send(kept, 1, 9)  # takes all the room
        rank.make(s, value(1, LONG))
        unserved = rank.send(s, 1, 1)
        for _ in range(20):
            rank.look()
            yield None
        yield from rank.wait(receive)
        rank.make(a, value(2, LONG), v)
        for send in (rank.send(a, 2, 6), unserved, first):
            yield None
            yield from rank.wait(send)
        yield from rank.leave()
        rank.free(v, kept, s, a)

    def one(rank: Rank) -> Program:
        s, t, kept = (rank.tensor(LONG) for _ in range(3))
        for _ in range(60):
            rank.look()
            yield None
        yield from rank.wait(rank.receive(s, 0, 1))
        rank.make(t, value(3, LONG), s)
        yield from rank.wait(rank.send(t, 2, 7))
        yield from rank.wait(rank.receive(kept, 0, 9))
        yield from rank.leave()
        rank.free(s, t, kept)

    def two(rank: Rank) -> Program:
        t, v, a = (rank.tensor(LONG) for _ in range(3))
        receives = rank.receive(t, 1, 7), rank.receive(a, 0, 6)
        yield from rank.wait(receives[0])
        rank.make(v, value(4, LONG), t)
        yield from rank.wait(rank.send(v, 0, 5))
        yield from rank.wait(receives[1])
        yield from rank.leave()
        rank.free(t, v, a)

    verdict = sample(
        Case(Setting(is_ahead=True, buffer_bytes=[65536, PLENTY]), zero, one, two), range(30), is_strict=False
    )
    assert verdict.is_ok, verdict
