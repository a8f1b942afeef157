"""Values that are lent at the same time, on the fake machine: streams say that they are there and wait until they are taken, beside
each other; in any order of hosts and devices nothing races, and nothing waits for what it does not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("torch", reason="crossfade.p2p")

from crossfade.device.events import PooledEvent
from crossfade.device.signals import WORD_BYTES, Counter, HostBoard
from crossfade.host.memory import Memory
from crossfade.p2p.transfer import Send, Taken
from crossfade.testing.fake import Machine, sample
from crossfade.testing.fake.machine import Program, Range
from tests.helpers.builds import interpreted_only
from tests.helpers.fake_ranks import LONG, SHORT, Case, Rank, Setting, open_ranks
from tests.unit.test_p2p_fake import Step, World, value

LENDING = World([Step(LONG, 0), Step(SHORT, 0), Step(LONG, 1, is_early=True), Step(LONG, 1)])


def test_nothing_races_where_values_are_lent() -> None:
    verdict = sample(LENDING, range(60))
    assert verdict.is_ok, verdict


def exchanging(number: int, rank: Rank) -> Program:
    """Lends five values to the other rank at once, and takes that one's in reverse."""
    other = 1 - number
    sent, taken = ([rank.tensor(LONG) for _ in range(5)] for _ in range(2))
    seen: list[list[bytes]] = [[] for _ in taken]
    sends: list[Send] = []
    for tag, tensor in enumerate(sent):
        rank.make(tensor, value(10 * number + tag, LONG))
        sends.append(rank.send(tensor, other, tag))
        yield None
    for tag in reversed(range(5)):
        yield from rank.wait(rank.receive(taken[tag], other, tag))
        rank.driver.kernel(rank.compute, "use", reads=(Range(taken[tag].address, LONG),), seen=seen[tag])
    for send in sends:
        yield from rank.wait(send)
    for tensor in sent:  # which it may change now
        rank.make(tensor, b"x" * LONG)
    yield from rank.leave()
    assert seen == [[value(10 * other + tag, LONG)] for tag in range(5)]
    rank.free(*sent, *taken)


def exchange(num_queues: int | None = None) -> Case:
    return Case(Setting(num_queues=num_queues), partial(exchanging, 0), partial(exchanging, 1))


@pytest.mark.parametrize("num_queues", [None, 1, 2, 3])
def test_nothing_races_or_hangs_where_many_values_are_lent_at_once(num_queues: int | None) -> None:
    """Of whose words several streams say that they are there, and another one waits until they are taken."""
    verdict = sample(exchange(num_queues), range(60))
    assert verdict.is_ok, verdict


class Meeting:
    """Ranks of which two meet on their streams once, as in a collective of somebody else's: a word that the one sets and the other
    waits for, which may be enqueued first.
    """

    def __init__(self, *programs: Callable[[Rank, Counter], Program], num_queues: int | None = None) -> None:
        self.programs = programs
        self.how = Setting(num_queues=num_queues)

    def __call__(self, machine: Machine) -> dict[str, Program]:
        machine.is_strict = False
        ranks = open_ranks(machine, len(self.programs), self.how)
        memory = Memory.create("a meeting", WORD_BYTES)
        boards = [HostBoard(rank.driver, memory, 1, "a meeting") for rank in ranks]
        memory.close()
        return {
            rank.name: self.run(program, rank, board)
            for program, rank, board in zip(self.programs, ranks, boards, strict=True)
        }

    def run(self, program: Callable[[Rank, Counter], Program], rank: Rank, board: HostBoard) -> Program:
        yield from program(rank, board.counter(0, "meeting"))
        board.close()


def lend(rank: Rank, num: int, other: int, first: int) -> Iterator[tuple[Any, Send]]:
    """Makes values on the current stream, and sends them to a rank with tags from a first one on."""
    for tag in range(first, first + num):
        tensor = rank.tensor(LONG)
        rank.make(tensor, value(tag, LONG))
        yield tensor, rank.send(tensor, other, tag)


def take(rank: Rank, num: int, first: int) -> Program:
    """Receives such values from rank 0 once they are announced."""
    tensors = [rank.tensor(LONG) for _ in range(num)]
    seen: list[list[bytes]] = [[] for _ in tensors]
    tags = range(first, first + num)
    while not all(rank.pairs.each[0].has_value(tag) for tag in tags):
        rank.pairs.use([0])
        rank.look()
        yield None
    for tag, tensor, got in zip(tags, tensors, seen, strict=True):
        yield from rank.wait(rank.receive(tensor, 0, tag))
        rank.driver.kernel(rank.current, "use", reads=(Range(tensor.address, LONG),), seen=got)
    yield from rank.leave()
    assert seen == [[value(tag, LONG)] for tag in tags]
    rank.free(*tensors)


def end(rank: Rank, sent: list[tuple[Any, Send]]) -> Program:
    for tensor, send in sent:
        yield from rank.wait(send)
        rank.make(tensor, b"x" * LONG)
    yield from rank.leave()
    rank.free(*(tensor for tensor, _ in sent))


@pytest.mark.parametrize(("num_late", "num_queues"), [(1, None), (1, 4), (3, 4), (3, 8), (7, 8)])
def test_ranks_that_are_late_hold_up_no_other_rank_s_values(num_late: int, num_queues: int | None) -> None:
    """They take their values behind a meeting with rank 0, which comes to it once the last rank has taken its own."""

    def sender(rank: Rank, meeting: Counter) -> Program:
        late: list[tuple[Any, Send]] = []
        for other in range(1, 1 + num_late):
            late += lend(rank, 2, other, 0)
            yield None
        quick = list(lend(rank, 2, 1 + num_late, 10))
        yield None
        for _, send in quick:
            yield from rank.wait(send)
        meeting.set(rank.compute, 1)
        yield from end(rank, late + quick)

    def late(rank: Rank, meeting: Counter) -> Program:
        meeting.wait(rank.compute, 1)
        yield from take(rank, 2, 0)

    def quick(rank: Rank, meeting: Counter) -> Program:
        yield from take(rank, 2, 10)

    world = Meeting(sender, *[late] * num_late, quick, num_queues=num_queues)
    verdict = sample(world, range(40 if num_late == 1 else 4))
    assert verdict.is_ok, verdict


def test_a_stream_that_waits_holds_up_no_other_stream_s_values() -> None:
    """One of rank 0's streams is at a meeting with rank 1, which comes to it once it has the other stream's values."""

    def sender(rank: Rank, meeting: Counter) -> Program:
        rank.current = rank.other
        meeting.wait(rank.other, 1)
        waiting = list(lend(rank, 2, 1, 0))
        rank.current = rank.compute
        yield None
        others = list(lend(rank, 4, 1, 10))
        yield None
        yield from end(rank, waiting + others)

    def receiver(rank: Rank, meeting: Counter) -> Program:
        tensors = [rank.tensor(LONG) for _ in range(4)]
        for tag, tensor in enumerate(tensors, 10):
            yield from rank.wait(rank.receive(tensor, 0, tag))
        meeting.set(rank.compute, 1)
        yield from take(rank, 2, 0)
        rank.free(*tensors)

    verdict = sample(Meeting(sender, receiver), range(40))
    assert verdict.is_ok, verdict


@pytest.mark.parametrize(("owner", "name"), [(Counter, "wait"), (PooledEvent, "hold")])
def test_a_missing_wait_is_found_where_many_values_are_lent(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: None)
    assert sample(exchange(), range(20)).kind == "race"


@interpreted_only("a method of a compiled class cannot be replaced")
def test_a_wait_that_is_left_out_without_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Taken, "is_awaited", lambda *_: True)
    assert sample(exchange(), range(20)).kind == "race"
