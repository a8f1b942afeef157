"""Signals that say several things before they are put back: steps, how lanes use them, and how they are let go when a peer dies."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from crossfade.device.signals import CLEAR, HostBoard
from crossfade.device.watchdog import DeathReport, Watchdog, release
from crossfade.peers.lane import Epoch, Lane
from crossfade.testing.fake import FakeDriver, Machine
from tests.helpers.running_driver import RunningDriver, run
from tests.helpers.waiting import until
from tests.helpers.worlds.kit import no_search_for_races, scratch
from tests.helpers.worlds.ranks import Call, Collective, PeerWorld

pytestmark = pytest.mark.usefixtures("no_search_for_races")

__all__ = ["no_search_for_races"]


@pytest.fixture
def board(driver: RunningDriver) -> HostBoard:
    return HostBoard(driver, scratch(), 4, "test")


def test_a_wait_for_a_step_holds_until_this_or_a_later_one_is_set(driver: RunningDriver, board: HostBoard) -> None:
    theirs, first, second = (driver.create_stream(name) for name in ("theirs", "first", "second"))
    signal = board.signal(0, "a signal")
    signal.wait_for_step(first, 1)
    signal.wait_for_step(second, 2)
    assert not driver.is_idle(first)
    signal.set(theirs)
    assert (driver.is_idle(first), driver.is_idle(second)) == (True, False)
    signal.set(theirs, 3)
    assert driver.is_idle(second)
    assert board.peek(0) == 3  # it stays set
    signal.wait_for_step(first, 1)
    signal.wait(first)
    assert driver.is_idle(first)
    assert board.peek(0) == CLEAR


def test_a_signal_is_set_when_nobody_can_wait_for_a_later_step(driver: RunningDriver, board: HostBoard) -> None:
    stream, signal = driver.create_stream("theirs"), board.signal(0, "a signal")
    assert signal.last == 1
    signal.set(stream, 1)
    run(driver.machine)
    assert signal.is_set()
    signal.expect(3)
    signal.expect(2)
    assert signal.last == 3
    assert not signal.is_set()
    assert not signal.is_missed(was_released=False)
    assert signal.is_missed(was_released=True)
    signal.release()
    assert board.peek(0) == 3
    assert signal.is_set()
    assert not signal.is_missed(was_released=True)


def test_a_waiter_for_the_second_step_is_released(driver: RunningDriver, board: HostBoard) -> None:
    """The peer has set the first step, and dies. A wait that takes nothing away leaves no trace in the report."""
    theirs, stream = driver.create_stream("theirs"), driver.create_stream("waits")
    signal, other = board.signal(0, "a signal"), board.signal(1, "another")
    signal.set(theirs)
    signal.wait_for_step(stream, 2)
    assert not driver.is_idle(stream)
    report = release(driver, "b", lambda: [signal, other], [stream])
    assert report.is_free
    assert report.waited_for == ()
    assert [board.peek(index) for index in (0, 1)] == [2, 1]


def test_a_wait_for_the_last_step_is_released_and_named(driver: RunningDriver, board: HostBoard) -> None:
    theirs, stream = driver.create_stream("theirs"), driver.create_stream("waits")
    signal, other = board.signal(0, "a signal"), board.signal(1, "another")
    signal.set(theirs)
    for step in (1, 2):
        signal.wait_for_step(stream, step)
    signal.expect(3)
    driver.wait_all_and_reset(stream, [signal.address, other.address], 3, CLEAR)
    other.expect(3)
    signal.wait(stream)  # the next call has one step
    report = release(driver, "b", lambda: [signal, other], [stream])
    assert report.is_free
    assert set(report.waited_for) == {"a signal", "another"}


def test_without_the_step_a_waiter_is_not_let_go(driver: RunningDriver, board: HostBoard) -> None:
    """Whoever waits past the signal has to say so with `expect`."""
    stream, signal = driver.create_stream("waits"), board.signal(0, "a signal")
    driver.wait_value(stream, signal.address, 2)
    assert not release(driver, "b", lambda: [signal], [stream], limit_s=0.05).is_free
    signal.expect(2)
    assert release(driver, "b", lambda: [signal], [stream]).is_free


@pytest.mark.timeout(20)
def test_steps_that_are_waited_for_after_a_death_are_let_go(
    driver: RunningDriver, board: HostBoard, killed: int
) -> None:
    """Also later ones than any that was waited for before."""
    stream, signal, watchdog = driver.create_stream("waits"), board.signal(0, "a signal"), Watchdog(driver)
    signal.wait_for_step(stream, 2)
    died, reports = threading.Event(), list[DeathReport]()

    def on_death(report: DeathReport) -> None:
        reports.append(report)
        died.set()

    watchdog.watch("worker 7", killed, lambda: [signal], [stream], on_death)
    assert died.wait(15)
    assert reports[0].is_free
    for step in (1, 3, 4):
        signal.wait_for_step(stream, step)
    until(lambda: driver.is_idle(stream), "the end of the stream")
    watchdog.close()


# Lanes


class Recorder:
    """A driver that notes what is enqueued with signals."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def write_value(self, stream: int, address: int, value: int) -> None:
        self.calls.append(("write", stream, address, value))

    def write_values(self, stream: int, addresses: Sequence[int], value: int) -> None:
        self.calls.append(("write all", stream, *addresses, value))

    def wait_value(self, stream: int, address: int, value: int) -> None:
        self.calls.append(("wait", stream, address, value))

    def wait_all_and_reset(self, stream: int, addresses: Sequence[int], value: int, reset: int) -> None:
        self.calls.append(("wait all and reset", stream, *addresses, value, reset))


@pytest.fixture
def lanes() -> list[Lane]:
    opened = PeerWorld([Call(Collective.BARRIER)], num_ranks=3).open(Machine(is_strict=False))
    return [own[0] for _, own, _ in opened]


def recorded(lane: Lane, monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    for name in ("write_value", "write_values", "wait_value", "wait_all_and_reset"):
        monkeypatch.setattr(lane.memory.driver, name, getattr(recorder, name))
    for signal in [*lane.incoming(), *(each for epoch in lane._epochs for each in epoch.outgoing.values())]:
        signal._write = recorder.write_value
    return recorder


def test_a_lane_announces_steps_and_waits_for_them(lanes: list[Lane], monkeypatch: pytest.MonkeyPatch) -> None:
    lane = lanes[0]
    recorder, epoch = recorded(lane, monkeypatch), lane.advance()
    to, from_ = ([row[peer].address for peer in (1, 2)] for row in (epoch.outgoing, epoch.incoming))
    lane.announce(epoch, [1, 2], 5, 2)
    lane.announce(epoch, [2], 5, 3)
    lane.await_step(epoch, [1, 2], 6, 1, 2)
    lane.await_step(epoch, [1, 2], 6, 2, 2)
    assert recorder.calls == [
        ("write all", 5, *to, 2),
        ("write", 5, to[1], 3),
        ("wait", 6, from_[0], 1),
        ("wait", 6, from_[1], 1),
        ("wait all and reset", 6, *from_, 2, CLEAR),
    ]
    assert [epoch.incoming[peer].last for peer in (1, 2)] == [2, 2]
    assert {signal.last for signal in lane.advance().incoming.values()} == {1}  # the other buffer's


def test_a_lane_of_one_rank_enqueues_no_empty_batch(lanes: list[Lane], monkeypatch: pytest.MonkeyPatch) -> None:
    lane = lanes[0]
    recorder, epoch = recorded(lane, monkeypatch), lane.advance()
    lane.announce(epoch, [], 5, 1)
    lane.await_step(epoch, [], 5, 1, 1)
    assert recorder.calls == []


def test_lanes_in_the_middle_of_steps_are_let_go_when_a_rank_dies(
    lanes: list[Lane], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 dies behind its first step of three, rank 2 behind its last; rank 0 waits for all of them, then for the next call."""
    lane = lanes[0]
    driver = lane.memory.driver
    assert isinstance(driver, FakeDriver)
    idle = FakeDriver.is_idle

    def run_and_look(self: FakeDriver, stream: int) -> bool:
        run(self.machine)
        return idle(self, stream)

    monkeypatch.setattr(FakeDriver, "is_idle", run_and_look)
    stream, epochs = driver.create_stream("waits"), [each.advance() for each in lanes]
    lanes[1].announce(epochs[1], [0], lanes[1].local, 1)
    for step in (1, 2, 3):
        lanes[2].announce(epochs[2], [0], lanes[2].local, step)
        lane.await_step(epochs[0], [1, 2], stream, step, 3)
    for other in (1, 2):
        epoch: Epoch = lanes[other].advance()
        if other == 2:
            lanes[2].announce(epoch, [0], lanes[2].local)
    lane.await_full(lane.advance(), [1, 2], stream)
    assert not driver.is_idle(stream)

    def of_the_dead() -> list[Any]:
        return [epoch.incoming[1] for epoch in lane._epochs]

    report = release(driver, "rank 1", of_the_dead, [stream])
    assert report.is_free
    assert set(report.waited_for) == {f"full from rank 1 to rank 0 (lane 0, buffer {number})" for number in (0, 1)}
