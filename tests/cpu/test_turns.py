"""Several writers that push into one reader: who goes first, who waits how long, and who is never made to."""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.device.watchdog import release  # noqa: E402
from crossfade.edges.turns import Progress, TurnRules  # noqa: E402
from crossfade.graph.nodes import InputNode, MultiOutputNode  # noqa: E402
from crossfade.plan.turns import LARGE_BYTES, LINK_GBS, predecessors  # noqa: E402
from tests.helpers.small_graphs import actor, compiled  # noqa: E402
from tests.helpers.turn_parties import Parties, call, fan_in, open_parties  # noqa: E402

torch.set_num_threads(1)

ALONE_S = LARGE_BYTES / (LINK_GBS * 1e9)
"""How long a push of a value that is just large is held at most."""


def large(fill: int = 1) -> Any:
    return torch.full((LARGE_BYTES,), fill, dtype=torch.uint8)


def take(parties: Parties, channel: str) -> Any:
    parties.serve()
    return parties["R"].readers[channel].try_read()


def warm(parties: Parties) -> None:
    """One execution, so that there are slots."""
    for index in range(3):
        assert parties.try_write(f"n{index}", large())
    parties.run()
    for index in range(3):
        take(parties, f"n{index}")
    parties.run()
    parties.log.clear()


@pytest.fixture
def parties() -> Iterator[Parties]:
    with open_parties(fan_in()) as parties:
        warm(parties)
        yield parties


def copied(parties: Parties) -> list[str]:
    return [who for who, size_bytes in parties.log if size_bytes >= LARGE_BYTES]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_pushes_that_are_enqueued_go_in_the_order_of_first_use(order: tuple[int, ...], overlap: bool) -> None:
    """Whichever device is ready first. (All are enqueued while the devices are behind.)"""
    with open_parties(fan_in(overlap=overlap)) as parties:
        warm(parties)
        for name in ("S0", "S1", "S2"):
            parties[name].hold()
        for index in range(3):
            assert parties.try_write(f"n{index}", large(index))
        for index in order:
            parties[f"S{index}"].let_go()
            parties.run()
            assert copied(parties) == [f"S{i}" for i in range(len(copied(parties)))]
        assert copied(parties) == ["S0", "S1", "S2"]
        assert [take(parties, f"n{index}")[0].item() for index in range(3)] == [0, 1, 2]
        assert all(not party.wakes for party in parties.values())


def test_a_push_is_held_for_no_longer_than_it_takes_by_itself(parties: Parties) -> None:
    second, value = parties["S1"], large(7)
    assert not parties.try_write("n1", value)
    assert second.wakes[-1] == pytest.approx(ALONE_S)
    parties.now_s += 0.75 * ALONE_S
    assert not parties.try_write("n1", value)
    assert second.wakes[-1] == pytest.approx(0.25 * ALONE_S)
    parties.now_s += 0.3 * ALONE_S
    assert parties.try_write("n1", value)
    parties.run()
    assert copied(parties) == ["S1"]  # and did not wait for what is not enqueued
    assert take(parties, "n1")[0].item() == 7
    num_wakes = len(second.wakes)
    assert parties.try_write("n0", large())  # late: nobody waits for the one after it
    assert parties.try_write("n2", large())
    assert len(second.wakes) == num_wakes


def test_each_value_is_held_for_itself(parties: Parties) -> None:
    for number in range(2):
        value = large(number)
        assert not parties.try_write("n1", value)
        parties.now_s += 1.0
        assert parties.try_write("n1", value)


def test_the_predecessor_rings_who_holds_a_push_and_nobody_else(parties: Parties) -> None:
    bell = parties["S1"].bell
    os.eventfd_read(bell.event_fd)  # offers of slots
    bell.flags[0] = 1  # it sleeps
    assert parties.try_write("n0", large())
    with pytest.raises(BlockingIOError):
        os.eventfd_read(bell.event_fd)
    assert parties.try_write("n1", large())
    value = large()
    assert not parties.try_write("n1", value)
    assert parties.try_write("n0", large())
    assert os.eventfd_read(bell.event_fd) == 1
    assert parties.try_write("n1", value)


@pytest.mark.parametrize("value", [None, 5, "tensor"])
def test_values_without_large_tensors_neither_wait_nor_are_waited_for(parties: Parties, value: Any) -> None:
    small = torch.ones(LARGE_BYTES - 1, dtype=torch.uint8) if value == "tensor" else value
    assert parties.try_write("n1", small)  # before its predecessor
    parties["S0"].hold()
    assert parties.try_write("n0", small)
    assert parties.try_write("n0", large())
    assert parties.try_write("n2", large())  # of the execution in which n1 was small
    assert parties.try_write("n1", large())  # of the next one, in which n0 is large
    parties.run()
    assert copied(parties) == ["S2"]
    parties["S0"].let_go()
    parties.run()
    assert copied(parties) == ["S2", "S0", "S1"]


def test_a_predecessor_that_is_further_is_waited_for_no_longer_than_for_its_value(parties: Parties) -> None:
    """It may push the next value as soon as it has a slot; its counter says both."""
    parties["S0"].hold()
    for number in range(2):
        assert parties.try_write("n0", large(number))
    assert parties.try_write("n1", large())
    parties.run()
    assert copied(parties) == []
    driver, push = parties["S0"].driver, parties["S0"].home.push_stream
    while copied(parties) != ["S0", "S1"]:
        assert copied(parties) in ([], ["S0"])
        driver.step(push)
        parties.run()


def test_the_counter_of_a_dead_writer_is_among_what_is_let_go(parties: Parties) -> None:
    parties["S0"].hold()
    assert parties.try_write("n0", large())
    assert parties.try_write("n1", large())
    parties.run()
    assert copied(parties) == []
    waited_for = [signal for signal in parties["S1"].ends.signals("S0") if not signal.is_set()]
    assert [signal.label for signal in waited_for] == ["pushed of n0 to R"]
    assert all(signal.is_set() for name in ("S2", "R") for signal in parties["S1"].ends.signals(name))
    report = release(
        parties["S1"].driver, "S0", lambda: parties["S1"].ends.signals("S0"), [parties["S1"].home.push_stream]
    )
    assert report.is_free
    assert report.waited_for == ("pushed of n0 to R",)
    assert copied(parties) == ["S1"]


def test_a_value_for_several_readers_goes_first_where_it_is_its_turn() -> None:
    """The lanes share a stream: what waits must not hold up what need not."""
    inp = InputNode()
    first, both = call(actor("S0"), "make", inp), call(actor("S1"), "make", inp)
    output: Any = MultiOutputNode([call(actor("R"), "take", first, both), call(actor("Q"), "take", both)])
    plan = compiled(output, overlap=False)
    assert predecessors(plan) == {("n1", "R"): "n0"}
    with open_parties(plan) as parties:
        for number in range(2):
            parties["S0"].hold() if number else None
            assert parties.try_write("n0", large())
            assert parties.try_write("n1", large())
            parties.run()
            if number:
                assert copied(parties) == ["S1"]
                parties["S0"].let_go()
                parties.run()
                assert copied(parties) == ["S1", "S0", "S1"]
            for name, channel in (("R", "n0"), ("R", "n1"), ("Q", "n1")):
                parties.serve()
                parties[name].readers[channel].try_read()
            parties.run()
            parties.log.clear()


def test_where_nobody_else_pushes_there_are_no_turns() -> None:
    with open_parties(fan_in(1)) as parties:
        carrier: Any = parties["S0"].writers["n0"].carrier
        assert carrier.turns is None


class _Counter:
    def __init__(self) -> None:
        self.value = 0

    def has(self, number: int) -> bool:
        return (self.value - number) & 0xFFFF_FFFF < 0x8000_0000


def test_numbers_wrap_around() -> None:
    board, counter = mmap.mmap(-1, 64), _Counter()
    writer, after = (Progress(board, 0, counter) for _ in range(2))  # type: ignore[arg-type]
    first = (1 << 32) - 3
    counter.value = first - 1
    writer.tell(first - 1, is_large=False)
    for number in range(first, first + 40):
        assert after.is_behind(number)
        assert writer.take_wanted()
        assert not after.is_coming(number)
        writer.tell(number, is_large=number % 2 == 0)
        assert not after.is_behind(number)
        assert after.is_behind(number + 1)
        assert after.is_coming(number) == (number % 2 == 0)
        counter.value = number & 0xFFFF_FFFF
        assert not after.is_coming(number)
    counter.value = first - 1
    assert [number - first for number in range(first, first + 40) if after.is_coming(number)] == list(range(9, 40, 2))
    assert TurnRules(1, 350.0).longest_hold_s(200_000_000) == pytest.approx(0.571e-3, rel=0.01)
