"""Transfers on the fake machine where streams wait for receives before their sends have begun: in any order of hosts and devices
nothing races, and nothing hangs.
"""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="crossfade.p2p")

from crossfade.errors import ChannelBroken
from crossfade.p2p import windows
from crossfade.p2p.transfer import Receive
from crossfade.testing.fake import Machine, sample
from crossfade.testing.fake.machine import Program, Range
from tests.helpers.fake_ranks import LENT, LONG, MIDDLE, PLENTY, SHORT, Case, Rank, Setting, open_ranks
from tests.unit.test_p2p_fake import Step, World, value

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


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("name", AHEAD)
def test_nothing_races_where_streams_wait_ahead(name: str, is_staged: bool) -> None:
    world = AHEAD[name].staged(is_staged=is_staged)
    verdict = sample(world, range(30 if is_staged else 60), is_strict=False)
    assert verdict.is_ok, verdict
    assert world.num_ahead or name == "dropped"


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


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("num_queues", [1, 2, 8])
def test_a_pipeline_whose_streams_share_hardware_queues_comes_to_its_end(num_queues: int, is_staged: bool) -> None:
    """Streams wait ahead, and what they wait for is never behind them in a queue."""
    world = Case(Setting(is_ahead=True, num_queues=num_queues, is_staged=is_staged), first, second)
    verdict = sample(world, range(30 if is_staged else 80), is_strict=False)
    assert verdict.is_ok, verdict
    assert world.num_ahead


def crossed(size_bytes: int, other_bytes: int, num_looks: int, *, is_staged: bool) -> Case:
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

    return Case(Setting(is_ahead=True, buffer_bytes=room, is_staged=is_staged), ahead, behind)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("num_looks", [1, 6])
@pytest.mark.parametrize("other_bytes", [SHORT, MIDDLE, LENT])
@pytest.mark.parametrize("size_bytes", [LONG, LENT])
def test_no_copy_of_ours_stands_in_front_of_another_one(
    size_bytes: int, other_bytes: int, num_looks: int, is_staged: bool
) -> None:
    """A pull of a value that is behind another rank's wait ahead would hold up the pull of the value that ends this wait."""
    verdict = sample(
        crossed(size_bytes, other_bytes, num_looks, is_staged=is_staged),
        range(15 if is_staged else 40),
        is_strict=False,
    )
    assert verdict.is_ok, verdict


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_stream_does_not_wait_ahead_while_a_third_rank_waits_for_this_host(is_staged: bool) -> None:
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

    how = Setting(is_ahead=True, buffer_bytes=[65536, PLENTY], is_staged=is_staged)
    verdict = sample(Case(how, zero, one, two), range(30), is_strict=False)
    assert verdict.is_ok, verdict


def closes_early(rank: Rank) -> Program:
    tensor = rank.tensor(LENT)
    receive = rank.receive(tensor, 0, 0)
    while not receive.is_settled:
        rank.look()
        yield None
    yield from rank.leave()
    rank.free(tensor)


def lends(rank: Rank) -> Program:
    tensor = rank.tensor(LENT)
    rank.make(tensor, value(1, LENT))
    send = rank.send(tensor, 1, 0)
    yield None
    yield from rank.leave()
    assert send.error is None, "its receive has met it"
    rank.free(tensor)


@pytest.mark.parametrize("is_ahead", [False, True])
def test_a_rank_that_closes_copies_what_is_lent_to_it_first(is_ahead: bool) -> None:
    verdict = sample(Case(Setting(is_ahead), lends, closes_early), range(40), is_strict=False)
    assert verdict.is_ok, verdict


@pytest.mark.parametrize("is_staged", [False, True])
def test_a_pull_for_one_stream_does_not_stand_behind_that_for_another_one(is_staged: bool) -> None:
    """The first one's tensor is free behind a wait ahead; the second one's value ends that wait."""

    def zero(rank: Rank) -> Program:
        first, third, x, v = (rank.tensor(LONG) for _ in range(4))
        rank.make(first, value(1, LONG))
        rank.make(third, value(3, LONG))
        sends = [rank.send(first, 1, 1), rank.send(third, 1, 3)]
        yield from rank.wait(rank.receive(x, 1, 5))
        rank.make(v, value(2, LONG), x)
        for send in (rank.send(v, 1, 2), *sends):
            yield from rank.wait(send)
        yield from rank.leave()
        rank.free(first, third, x, v)

    def one(rank: Rank) -> Program:
        first, third, x, v = (rank.tensor(LONG) for _ in range(4))
        for _ in range(25):
            rank.look()
            yield None
        yield from rank.wait(rank.receive(v, 0, 2))
        early = rank.receive(first, 0, 1)
        rank.current = rank.other
        yield from rank.wait(rank.receive(third, 0, 3))
        rank.make(x, value(4, LONG), third)
        yield from rank.wait(rank.send(x, 0, 5))
        rank.current = rank.compute
        yield from rank.wait(early)
        yield from rank.leave()
        rank.free(first, third, x, v)

    verdict = sample(Case(Setting(is_ahead=True, is_staged=is_staged), zero, one), range(20), is_strict=False)
    assert verdict.is_ok, verdict


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_requested_values_give_their_windows_back(
    is_ahead: bool, is_staged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More values in reverse than there are windows."""
    monkeypatch.setattr(windows, "NUM_WINDOWS", 6)
    monkeypatch.setattr(windows, "_NUM_KEPT", 2)

    def zero(rank: Rank) -> Program:
        tensors = [rank.tensor(SHORT) for _ in range(12)]
        for number, tensor in enumerate(tensors):
            rank.make(tensor, value(number, SHORT))
        sends = [rank.send(tensor, 1, number) for number, tensor in enumerate(tensors)]
        yield None
        for send in sends:
            yield from rank.wait(send, polls=True)
        yield from rank.leave()
        rank.free(*tensors)

    def one(rank: Rank) -> Program:
        tensors = [rank.tensor(SHORT) for _ in range(12)]
        receives = [rank.receive(tensor, 0, number) for number, tensor in enumerate(tensors)]
        yield None
        for receive in reversed(receives):
            yield from rank.wait(receive, polls=True)
        yield from rank.leave()
        rank.free(*tensors)

    verdict = sample(Case(Setting(is_ahead, is_staged=is_staged), zero, one), range(10), is_strict=False)
    assert verdict.is_ok, verdict


def test_a_death_is_told_by_every_call_before_the_stream_is_let_go() -> None:
    machine = Machine(is_strict=False)
    rank = open_ranks(machine, 2, Setting(is_ahead=True))[1]
    receive = rank.receive(rank.tensor(LONG), 0, 0)
    for _ in rank.wait(receive):
        raise AssertionError("it waits ahead")
    rank.pairs.each[0].carrier.suspect(ChannelBroken("rank 0 died"))
    with pytest.raises(ChannelBroken, match="rank 0 died"):
        rank.pairs.check()
