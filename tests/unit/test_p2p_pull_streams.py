"""Streams of ours that wait for long values: what each may take, and that no order of hosts and devices makes them hang."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

import pytest

pytest.importorskip("torch", reason="crossfade.p2p")

from crossfade.errors import ChannelBroken
from crossfade.p2p.pull_streams import Budget, PullStreams
from crossfade.testing.fake import Machine, sample
from crossfade.testing.fake.machine import Program, Range
from tests.helpers.fake_ranks import LENT, LONG, Case, Rank, Setting, open_ranks

A, B, C = (1, 1, 7), (1, 2, 7), (2, 1, 7)
"""Whose values: the rank that makes them, its stream, and the stream that gives the tensors."""


class Copied:
    def __init__(self) -> None:
        self.is_over = False

    def __call__(self) -> bool:
        return self.is_over


def test_a_stream_takes_what_is_behind_all_that_it_has_in_both_orders() -> None:
    streams = PullStreams(lambda number: 100 + number, Budget(8))
    copied = Copied()
    assert streams.take(A, 5, 5, copied) == 100
    assert streams.take(A, 6, 8, copied) == 100
    assert streams.take(A, 7, 7, copied) is None  # the tensor was given before
    assert streams.take(A, 4, 9, copied) is None  # the value was made before
    assert streams.take(A, 7, 9, copied) == 100
    copied.is_over = True
    assert streams.take(A, 1, 1, Copied()) == 100  # nothing is left to wait for


def test_there_are_few_and_they_serve_others_once_they_have_nothing_left() -> None:
    streams = PullStreams(lambda number: 100 + number, Budget(8))
    copied = {key: Copied() for key in (A, B)}
    assert [streams.take(key, 1, 1, each) for key, each in copied.items()] == [100, 101]
    assert streams.take(C, 2, 2, Copied()) is None
    copied[B].is_over = True
    assert streams.take(C, 2, 2, Copied()) == 101
    assert streams.take(B, 3, 3, Copied()) is None


@pytest.mark.parametrize(("num_queues", "num"), [(1, 0), (6, 0), (7, 1), (8, 2), (32, 2)])
def test_hardware_queues_are_left_for_others(num_queues: int, num: int) -> None:
    budget = Budget(num_queues)
    assert [budget.take() for _ in range(4)] == [True] * num + [False] * (4 - num)


def test_communicators_share_a_budget_and_give_back_what_they_had() -> None:
    budget = Budget(8)
    first, second = (PullStreams(lambda number: number, budget) for _ in range(2))
    assert first.take(A, 1, 1, Copied()) is not None
    assert second.take(A, 1, 1, Copied()) is not None
    assert first.take(B, 1, 1, Copied()) is None
    assert second.take(B, 1, 1, Copied()) is None
    second.close()
    second.close()
    assert first.take(B, 1, 1, Copied()) is not None
    assert first.take(C, 1, 1, Copied()) is None


class Value(NamedTuple):
    """One value: from which rank to which, whose streams (0, 1), and when which of its ends does what."""

    source: int
    target: int
    made_on: int
    given_on: int
    used_on: int
    size_bytes: int
    times: tuple[float, float, float]  # of the receive, the send, the wait


def random_values(seed: int) -> list[Value]:
    """Values of which each is waited for once it has been sent, so that the program comes to its end."""
    rng = Random(seed)
    values = []
    for _ in range(rng.randint(3, 6)):
        source = rng.randrange(2)
        received, sent = rng.random(), rng.random()
        times = received, sent, rng.uniform(max(received, sent), 1.1)
        made_on, given_on, used_on = (rng.randrange(2) for _ in range(3))
        size_bytes = rng.choice([LENT, LENT, LENT, LONG])
        values.append(Value(source, 1 - source, made_on, given_on, used_on, size_bytes, times))
    return values


def program_of(values: list[Value], number: int) -> Any:
    """What a rank does: its ends of all values, in the order of their times."""

    def run(rank: Rank) -> Program:
        tensors = [rank.tensor(value.size_bytes) for value in values]
        seen: list[list[bytes]] = [[] for _ in values]
        begun: dict[int, Any] = {}
        streams = rank.compute, rank.other
        steps = []
        for place, value in enumerate(values):
            ends = (value.target, value.source, value.target)
            steps += [
                (time, what, place)
                for what, (time, end) in enumerate(zip(value.times, ends, strict=True))
                if end == number
            ]
        for _, what, place in sorted(steps):
            value, tensor = values[place], tensors[place]
            rank.current = streams[(value.given_on, value.made_on, value.used_on)[what]]
            if what == 0:
                begun[place] = rank.receive(tensor, value.source, place)
            elif what == 1:
                rank.make(tensor, bytes([place + 1]) * value.size_bytes)
                begun[place] = rank.send(tensor, value.target, place)
            else:
                yield from rank.wait(begun[place])
                reads = (Range(tensor.address, value.size_bytes),)
                rank.driver.kernel(rank.current, "use", reads=reads, seen=seen[place])
            yield None
        rank.current = rank.compute
        for place, value in enumerate(values):
            if value.source == number:
                yield from rank.wait(begun[place])
        yield from rank.leave()
        wanted = [
            [bytes([place + 1]) * value.size_bytes] if value.target == number else []
            for place, value in enumerate(values)
        ]
        assert seen == wanted
        rank.free(*tensors)

    return run


class Script:
    """A rank's program, step by step. ``sizes``: of its values, which have names; ``steps``: what, which value, on which stream."""

    def __init__(self, other: int, sizes: dict[str, int], *steps: tuple[str, str, int]) -> None:
        self.other, self.sizes, self.steps = other, sizes, steps

    def __call__(self, rank: Rank) -> Program:
        tensors = {name: rank.tensor(size_bytes) for name, size_bytes in self.sizes.items()}
        tags = {name: tag for tag, name in enumerate(self.sizes)}
        begun: dict[str, Any] = {}
        for what, name, stream in self.steps:
            rank.current = (rank.compute, rank.other)[stream]
            if what == "receive":
                begun[name] = rank.receive(tensors[name], self.other, tags[name])
            elif what == "send":
                rank.make(tensors[name], name.encode() * self.sizes[name])
                begun[name] = rank.send(tensors[name], self.other, tags[name])
            else:
                yield from rank.wait(begun[name])
            yield None
        rank.current = rank.compute
        for name in begun:
            yield from rank.wait(begun[name])
        yield from rank.leave()
        rank.free(*tensors.values())


ONE, OTHER = 0, 1
SIZES = {"A": LENT, "B": LENT, "V": LONG, "W": LONG}
CROSSED = {
    "made on two streams": (
        Script(1, SIZES, ("receive", "V", ONE), ("wait", "V", ONE), ("send", "A", ONE), ("send", "B", OTHER)),
        Script(0, SIZES, ("receive", "A", ONE), ("receive", "B", ONE), ("wait", "B", OTHER), ("send", "V", OTHER)),
    ),
    "given on two streams": (
        Script(
            1,
            SIZES,
            ("receive", "W", OTHER),
            ("send", "A", ONE),
            ("send", "B", ONE),
            ("wait", "W", OTHER),
            ("send", "V", OTHER),
        ),
        Script(
            0,
            SIZES,
            ("receive", "V", ONE),
            ("wait", "V", ONE),
            ("receive", "A", ONE),
            ("receive", "B", OTHER),
            ("wait", "B", OTHER),
            ("send", "W", OTHER),
        ),
    ),
    "made in another order": (
        Script(1, SIZES, ("receive", "V", ONE), ("send", "A", ONE), ("wait", "V", ONE), ("send", "B", ONE)),
        Script(0, SIZES, ("receive", "B", ONE), ("receive", "A", ONE), ("wait", "A", ONE), ("send", "V", ONE)),
    ),
}
"""What would hang if one stream took both A and B: what A waits for comes only once B has been used."""


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("num_queues", [None, 12])
@pytest.mark.parametrize("name", CROSSED)
def test_a_value_does_not_wait_for_one_that_waits_for_it(name: str, num_queues: int | None, is_staged: bool) -> None:
    how = Setting(is_ahead=True, is_staged=is_staged, num_queues=num_queues)
    verdict = sample(Case(how, *CROSSED[name]), range(40), is_strict=False)
    assert verdict.is_ok, verdict


def test_a_pull_that_waits_keeps_no_tensor_of_others() -> None:
    kept: list[bool] = []

    def zero(rank: Rank) -> Program:
        late, answer, other = rank.tensor(LENT), rank.tensor(LONG), rank.tensor(LENT)
        rank.current = rank.other
        yield from rank.wait(rank.receive(answer, 1, 0))
        rank.make(late, b"v" * LENT)
        send = rank.send(late, 1, 1)
        rank.current = rank.compute
        yield from rank.wait(rank.receive(other, 1, 2))
        yield from rank.wait(send)
        yield from rank.leave()
        rank.free(late, answer, other)

    def one(rank: Rank) -> Program:
        late, answer, other = rank.tensor(LENT), rank.tensor(LONG), rank.tensor(LENT)
        pull = rank.receive(late, 0, 1)
        while not pull.is_settled:
            rank.look()
            yield None
        rank.current = rank.other
        rank.make(other, b"x" * LENT)
        send = rank.send(other, 0, 2)
        while not (send.is_enqueued and send.is_copied()):
            rank.look()
            yield None
        rank.look()
        assert pull.is_enqueued
        assert not pull.is_copied()
        kept.append(send.tensor is not None)
        rank.make(answer, b"w" * LONG)
        yield from rank.wait(rank.send(answer, 0, 0))
        rank.current = rank.compute
        yield from rank.wait(pull)
        yield from rank.wait(send)
        yield from rank.leave()
        rank.free(late, answer, other)

    verdict = sample(Case(Setting(is_ahead=True), zero, one), range(20), is_strict=False)
    assert verdict.is_ok, verdict
    assert kept == [False] * 20


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_no_program_of_long_values_hangs(seed: int, is_staged: bool) -> None:
    values = random_values(seed)
    world = Case(Setting(is_ahead=True, is_staged=is_staged), *(program_of(values, number) for number in range(2)))
    verdict = sample(world, range(6), is_strict=False)
    assert verdict.is_ok, verdict


def test_a_death_is_told_by_the_receive_whose_pull_waits_and_the_watchdog_knows_its_stream() -> None:
    ranks = open_ranks(Machine(is_strict=False), 2, Setting(is_ahead=True))
    sender, receiver = ranks
    late = sender.tensor(LENT)
    sender.make(late, b"v" * LENT)
    sender.send(late, 1, 0)  # no device has done anything yet
    receive = receiver.receive(receiver.tensor(LENT), 0, 0)
    receiver.look()
    assert receive.is_enqueued
    assert receive.copy_stream in receiver.side.awaiting
    assert receive.copy_stream != receiver.compute
    receiver.pairs.each[0].carrier.suspect(ChannelBroken("rank 0 died"))
    assert "rank 0 died" in str(receive.error)
