"""When the thread beside the program works on transfers, and when it leaves them to the program."""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Event

import pytest

pytest.importorskip("torch", reason="crossfade.p2p")

from crossfade.p2p import attendant as room
from crossfade.p2p.attendant import Attendant


class Graces:
    """Stands for the event that ends the thread: what the program does during each grace; after the last one it ends."""

    def __init__(self, *during: Callable[[], None]) -> None:
        self._left = list(during)

    def wait(self, timeout_s: float) -> bool:
        if not self._left:
            return True
        self._left.pop(0)()
        return False

    def is_set(self) -> bool:
        return not self._left


def nothing() -> None: ...


def run(is_quiet: bool, during: Callable[[Attendant], list[Callable[[], None]]]) -> int:
    """How often it worked."""
    worked: list[bool] = []
    attendant = Attendant([], lambda: is_quiet, lambda: worked.append(True), nothing)
    attendant._wanted.set()
    attendant._ended = Graces(*during(attendant))  # type: ignore[assignment]
    attendant._run()
    return len(worked)


def test_it_works_when_the_program_has_done_nothing_during_a_grace() -> None:
    assert run(False, lambda attendant: [nothing]) == 1


def test_it_leaves_transfers_to_a_program_that_begins_more_of_them() -> None:
    assert run(False, lambda attendant: [attendant.call] * 5) == 0
    assert run(False, lambda attendant: [attendant.call, attendant.call, nothing]) == 1


def test_it_works_at_times_beside_a_program_that_never_stops() -> None:
    num = 2 * (room._MOST_GRACES + 1)
    assert run(False, lambda attendant: [attendant.call] * num) == 2


def test_it_sleeps_when_there_is_nothing_to_do() -> None:
    assert run(True, lambda attendant: [attendant.call, nothing]) == 0


def test_it_looks_now_and_then_once_a_stream_waits_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_TICK_S", 0.001)
    ticks: SimpleQueue[None] = SimpleQueue()
    attendant = Attendant([], lambda: True, nothing, lambda: ticks.put(None))
    assert ticks.empty()
    attendant.watch()
    attendant.watch()
    for _ in range(3):
        ticks.get(timeout=10)
    attendant.close()


def test_it_looks_also_if_it_had_to_work_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_TICK_S", 0.001)
    ticks: SimpleQueue[None] = SimpleQueue()
    worked = Event()
    attendant = Attendant([], worked.is_set, worked.set, lambda: ticks.put(None))
    attendant.call()
    assert worked.wait(10)
    attendant.watch()
    ticks.get(timeout=10)
    attendant.close()
