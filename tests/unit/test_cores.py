"""A thread that looks for work moves away from a core that others want. The clock is the test's, and yields take what it says."""

from __future__ import annotations

import os
import time

import pytest

from crossfade.host import cores
from crossfade.host.cores import Core

_SHORT_NS, _LONG_NS = 500, 50_000


class Machine:
    """Two cores; the thread is on core 0 until it moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: set[int]) -> None:
        self.now_ns = 10**12
        self.yield_ns = _SHORT_NS
        self.allowed = allowed
        self.masks: list[set[int]] = []
        self.fails = False
        monkeypatch.setattr(time, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(cores, "_yield_core", self._yield)
        monkeypatch.setattr(cores, "libc", lambda: self)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(self.allowed))
        monkeypatch.setattr(os, "sched_setaffinity", self._set)

    def _yield(self) -> None:
        self.now_ns += self.yield_ns

    def sched_getcpu(self) -> int:
        return 0

    def _set(self, _: int, mask: set[int]) -> None:
        self.masks.append(set(mask))
        if self.fails and mask != self.allowed:
            raise OSError("that core was switched off")

    def yields(self, number: int, yield_ns: int, pause_ns: int = 0) -> Core:
        core = Core()
        self.yield_ns = yield_ns
        for _ in range(number):
            core.give_way()
            self.now_ns += pause_ns
        return core


def test_short_yields_move_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(monkeypatch, {0, 1}).yields(1000, _SHORT_NS).num_moves == 0


def test_a_few_long_yields_move_the_thread_and_it_may_still_use_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {0, 1})
    assert machine.yields(6, _LONG_NS).num_moves == 1
    assert machine.masks == [{1}, {0, 1}]


def test_a_thread_that_has_moved_stays_for_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {0, 1})
    assert 2 <= machine.yields(100, _LONG_NS).num_moves <= 6  # in 5 ms


def test_long_yields_that_are_far_apart_move_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(monkeypatch, {0, 1}).yields(50, _LONG_NS, pause_ns=40_000_000).num_moves == 0


def test_a_thread_that_may_use_one_core_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {0})
    assert machine.yields(100, _LONG_NS).num_moves == 0
    assert not machine.masks


def test_a_core_that_is_gone_leaves_the_thread_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {0, 1})
    machine.fails = True
    machine.yields(6, _LONG_NS)
    assert machine.masks[-1] == {0, 1}
