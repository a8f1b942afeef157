"""The fake machine finds planted faults beside those of test_device_proof.py, and names the operations."""

from __future__ import annotations

import pytest

from crossfade.device.memory import Pool
from crossfade.device.signals import HostBoard
from crossfade.testing.fake import FakeDriver, Fault, Machine, Until, explore, sample
from crossfade.testing.fake.explore import World
from crossfade.testing.fake.machine import Program, Range
from tests.helpers.worlds import rings, staged
from tests.helpers.worlds.kit import assert_sound_in_all_orders, scratch
from tests.helpers.worlds.rings import ReplayWorld, RingWorld, TwoWaitsWorld
from tests.helpers.worlds.staged import StagedWorld

SEEDS = range(30)

PLANTED: dict[str, tuple[World, str, tuple[str, ...]]] = {
    "a source that is not computed yet": (
        RingWorld(sender=rings.UncomputedSource),
        "race",
        ("copy", "reads", "written by 'make value 0"),
    ),
    "a source that is computed anew too early": (RingWorld(is_source_reused=True), "race", ("make value 1", "copy")),
    "missing credit": (
        RingWorld(receiver=rings.MissingCredit),
        "deadlock",
        ("sending host waits for a credit of ring a",),
    ),
    "waits on two streams": (TwoWaitsWorld(), "race", ("a signal", "process/first", "process/second")),
    "a chunk that is told of before it is there": (
        StagedWorld(sender=staged.StagedFlagBeforeData),
        "race",
        ("copy chunk 0 of staged", "written by"),
    ),
    "a chunk that is freed too early": (
        StagedWorld(receiver=staged.StagedTooEarly),
        "race",
        ("of staged on sender/up 0", "copy chunk"),
    ),
    "a chunk that is waited for too early": (
        StagedWorld(sender=staged.StagedTooEager),
        "PL-5",
        ("of staged", "wait for free"),
    ),
    "a replay that does not reset": (ReplayWorld(is_counting=True), "race", ("use the target", "copy bytes")),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found_and_named(name: str) -> None:
    world, kind, words = PLANTED[name]
    verdicts = [explore(world, most_runs=50), *(sample(world, [seed]) for seed in SEEDS)]
    assert not all(verdict.is_ok for verdict in verdicts)
    found = [verdict for verdict in verdicts if verdict.kind == kind]
    assert found, name
    for word in words:
        assert any(word in str(verdict) for verdict in found), (word, list(map(str, found)))


def test_captured_signals_that_reset_themselves_can_be_replayed() -> None:
    assert_sound_in_all_orders(ReplayWorld(num_replays=3))


def test_a_counter_may_be_waited_for_on_any_stream() -> None:
    assert_sound_in_all_orders(TwoWaitsWorld(is_counter=True))


@pytest.mark.parametrize("num_queues", [1, None])
def test_pl5_a_wait_in_front_of_its_producer(num_queues: int | None) -> None:
    """In one hardware queue it is a deadlock; with a queue for each stream it runs, and only PL-5 is against it."""

    def world(machine: Machine) -> dict[str, Program]:
        driver = FakeDriver(machine, "process", num_queues=num_queues)
        first, second = driver.create_stream("first"), driver.create_stream("second")
        signal = HostBoard(driver, scratch(), 1, "test").signal(0, "a signal")

        def host() -> Program:
            signal.wait(first)
            signal.set(second)
            yield driver.until_idle(first)

        return {"host": host()}

    strict, loose = explore(world), explore(world, is_strict=False)
    assert strict.kind == "PL-5"
    assert loose.is_ok is (num_queues is None)
    if num_queues == 1:
        assert loose.kind == "deadlock"
        assert (
            "'wait for a signal on process/first' holds queue 0 of process in front of 'set a signal to 1 on process/second'"
            in str(loose)
        )


def one_host(*, is_waiting: bool, is_closing: bool = True, is_freeing: bool = True) -> World:
    """A process that writes to another one's memory."""

    def world(machine: Machine) -> dict[str, Program]:
        owner, opener = FakeDriver(machine, "owner"), FakeDriver(machine, "opener")
        address = owner.allocate(64, "shared")
        opened = opener.open_handle(owner.export(address), "shared")
        stream = opener.create_stream("copies")

        def host() -> Program:
            opener.kernel(stream, "write", writes=((opened, b"x" * 8),))
            if is_waiting:
                yield opener.until_idle(stream)
                opener.is_idle(stream)
            if is_closing:
                opener.close_handle(opened)
            yield None

        def other() -> Program:
            yield Until("the opener to close", lambda: not machine.allocations[0].openers or not is_closing)
            machine.line("owner").clock.update(machine.line("opener").clock)
            if is_freeing:
                owner.free(address)

        return {"opener": host(), "owner": other()}

    return world


def test_use_after_free_and_leaks_are_found() -> None:
    assert explore(one_host(is_waiting=True)).is_ok
    found = explore(one_host(is_waiting=False))
    assert found.kind in ("race", "use after free")
    assert "shared" in str(found)
    opened = explore(one_host(is_waiting=True, is_closing=False))
    assert "while opener has it open" in str(opened)
    leaked = explore(one_host(is_waiting=True, is_freeing=False))
    assert leaked.kind == "leak"
    assert "owner has not freed shared" in str(leaked)


def test_luck_is_no_order() -> None:
    """Two streams in one hardware queue always run in one order; the race between them is reported all the same."""

    def world(machine: Machine) -> dict[str, Program]:
        driver = FakeDriver(machine, "process", num_queues=1)
        first, second = driver.create_stream("first"), driver.create_stream("second")
        address = driver.allocate(64, "memory")

        def host() -> Program:
            driver.kernel(first, "write", writes=((address, b"x" * 8),))
            driver.kernel(second, "read", reads=(Range(address, 8),))
            yield None

        return {"host": host()}

    found = explore(world)
    assert found.kind == "race"
    assert "'read on process/second' reads bytes 0 to 8 of memory, written by 'write on process/first'" in str(found)


def test_the_same_seed_gives_the_same_verdict() -> None:
    world = RingWorld(sender=rings.ReuseBeforeFree)
    assert [str(sample(world, [seed])) for seed in range(5)] == [str(sample(world, [seed])) for seed in range(5)]


def test_words_wrap_around_as_on_a_gpu() -> None:
    def world(machine: Machine) -> dict[str, Program]:
        driver = FakeDriver(machine, "process")
        stream = driver.create_stream("stream")
        counter = HostBoard(driver, scratch(), 1, "test").counter(0, "a counter")

        def host() -> Program:
            for value in ((1 << 31) - 1, (1 << 32) - 2, (1 << 32) + 1):
                counter.set(stream, value)
                counter.wait(stream, value - 3)
                yield driver.until_idle(stream)
                if not counter.has(value) or counter.has(value + 1):
                    raise Fault("wrong value", f"the counter is not {value}")

        return {"host": host()}

    verdict = explore(world)
    assert verdict.is_ok, verdict


def test_a_fault_in_a_program_ends_the_exploration() -> None:
    def world(machine: Machine) -> dict[str, Program]:
        def host() -> Program:
            yield None
            raise Fault("wrong value", "planted")

        return {"host": host()}

    assert explore(world).kind == "wrong value"


def test_a_pool_of_the_fake_reuses_blocks() -> None:
    driver = FakeDriver(Machine(), "process")
    pool = Pool(driver)
    block = pool.take(10, "a", "test")
    block.release()
    assert pool.take(10, "b", "test") is block
    assert pool.idle_bytes == 0
    assert pool.used_bytes == block.size_bytes
