"""What worlds are made of, and what tests ask about them: values, rings between processes, and verdicts over orders of steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import strategies as st

from crossfade.device.memory import Pool
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import HostBoard
from crossfade.host.memory import Memory
from crossfade.testing.fake import FakeDriver, FakeLink, Fault, Machine, explore, sample
from crossfade.testing.fake.clocks import Clock, Word
from crossfade.testing.fake.explore import World
from crossfade.testing.fake.machine import Program, Range

# verdicts


def orders(num: int) -> st.SearchStrategy[range]:
    """Seeds of so many orders of steps."""
    return st.integers(0, 1 << 32).map(lambda first: range(first, first + num))


def assert_sound(world: World, seeds: Iterable[int], *, is_strict: bool = True) -> None:
    """Nothing is found in the orders drawn by these seeds."""
    verdict = sample(world, seeds, is_strict=is_strict)
    assert verdict.is_ok, verdict


def assert_sound_in_all_orders(world: World, *, is_strict: bool = True, most_runs: int = 0) -> None:
    """Nothing is found in any order; with ``most_runs``, in so many."""
    verdict = explore(world, most_runs=most_runs or 100_000, is_strict=is_strict)
    assert verdict.is_ok, verdict
    assert verdict.is_complete or most_runs


def kinds(world: World, num_seeds: int = 20) -> set[str]:
    """What is found in orders drawn by seed, where PL-5 counts by its meaning: no deadlock."""
    return {sample(world, [seed], is_strict=False).kind for seed in range(num_seeds)}


@pytest.fixture
def no_search_for_races(monkeypatch: pytest.MonkeyPatch) -> None:
    """For streams that are let go by force: they are in no order with anything."""

    def store(machine: Machine, word: Word, value: int, label: str, line: str, clock: Clock) -> None:
        word.value, word.clock, word.writer = value, dict(clock), label
        word.num_writes += 1

    monkeypatch.setattr(Machine, "touch", lambda *_, is_write: None)
    monkeypatch.setattr(Machine, "store", store)


# values


class Scratch(Memory):
    """Shared memory of one run, which may end anywhere."""

    def __del__(self) -> None:
        self.close()


def scratch(size_bytes: int = 4096) -> Memory:
    return Scratch.create("scratch", size_bytes)


def content(index: int, size_bytes: int) -> bytes:
    return bytes([index + 1]) * size_bytes


def make(driver: FakeDriver, stream: int, name: str, address: int, data: bytes) -> int:
    """Enqueues a kernel that stores a value; the event behind it."""
    ready = driver.create_event()
    driver.kernel(stream, f"make {name}", writes=((address, data),))
    driver.record_event(ready, stream)
    return ready


def use(driver: FakeDriver, stream: int, name: str, address: int, size_bytes: int, seen: list[bytes]) -> None:
    """Enqueues a kernel that reads a value, and appends it to ``seen``."""
    driver.kernel(stream, f"use {name}", reads=(Range(address, size_bytes),), seen=seen)


def check_seen(seen: Sequence[bytes], wanted: Sequence[bytes], what: str) -> None:
    if list(seen) != list(wanted):
        raise Fault("wrong value", f"{what} came as {[each[:4] for each in seen]}")


def finish(driver: FakeDriver, streams: Sequence[int]) -> Program:
    """Waits for streams, and looks, so that the host knows what they did."""
    for stream in streams:
        yield driver.until_idle(stream)
        driver.is_idle(stream)


def close_pool(pool: Pool, user: str) -> None:
    """Gives back all that a user has of a pool."""
    for block in list(pool._used):
        block.release()
    pool.close()


# rings


class RingLine:
    """The line of a ring between two processes: its signals' memory, and the records on their way."""

    def __init__(self, machine: Machine, here: FakeDriver, there: FakeDriver, label: str, num_signals: int) -> None:
        self.label, self.num_signals = label, num_signals
        self.memory = scratch(max(4096, num_signals * 64))
        self.ahead = FakeLink(machine, here.process, there.process)
        self.back = FakeLink(machine, there.process, here.process)

    def board(self, driver: FakeDriver) -> HostBoard:
        return HostBoard(driver, self.memory, self.num_signals, self.label)

    def sender(self, driver: FakeDriver, stream: int, kind: Callable[..., RingSender] = RingSender) -> RingSender:
        return kind(driver, self.board(driver), stream, self.ahead.send, self.label)

    def receiver(
        self,
        driver: FakeDriver,
        num_slots: int,
        slot_bytes: int,
        kind: Callable[..., RingReceiver] = RingReceiver,
        pool: Pool | None = None,
    ) -> RingReceiver:
        sizes = {"num_slots": num_slots, "slot_bytes": slot_bytes}
        return kind(driver, pool or Pool(driver), self.board(driver), self.back.send, self.label, **sizes)
