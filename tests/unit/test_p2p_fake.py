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
from crossfade.p2p import windows
from crossfade.p2p.letters import Announced
from crossfade.p2p.transfer import Receive
from crossfade.testing.fake import Machine, Until, sample
from crossfade.testing.fake.machine import Program, Range
from tests.helpers.fake_ranks import MIDDLE, PLENTY, SHORT, Rank, Setting, open_ranks


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

    def staged(self, *, is_staged: bool) -> World:
        """The same, where GPUs do or do not reach each other."""
        world = World(self.steps, self.order)
        world.how = self.how._replace(is_staged=is_staged)
        return world

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


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("name", WORLDS)
def test_nothing_races(name: str, is_staged: bool) -> None:
    verdict = sample(WORLDS[name].staged(is_staged=is_staged), range(30 if is_staged else 60))
    assert verdict.is_ok, verdict


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("name", WORLDS)
def test_a_missing_wait_is_found(name: str, is_staged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """So these worlds would show a race."""
    monkeypatch.setattr(Counter, "wait", lambda self, stream, value: None)
    assert sample(WORLDS[name].staged(is_staged=is_staged), range(20)).kind == "race"


def windows_of(rank: Rank, other: int) -> Any:
    carrier: Any = rank.pairs.each[other].carrier
    return carrier._ends[False].windows


class Short:
    """Short values, all received; their windows and cells are given back once the receiver's host has looked again."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.num_by_host = 0

    def __call__(self, machine: Machine) -> dict[str, Program]:
        zero, one = open_ranks(machine, 2, Setting())
        return {"rank 0": self.sends(zero, one), "rank 1": self.receives(one)}

    def sends(self, rank: Rank, other: Rank) -> Program:
        tensors = [rank.tensor(SHORT) for _ in range(self.num)]
        for number, tensor in enumerate(tensors):
            rank.make(tensor, value(number, SHORT))
            yield from rank.wait(rank.send(tensor, 1, number))
        letters = [letter for letter in rank.posts[1].said if isinstance(letter, Announced)]
        asked = [letter.window is not None and letter.window.is_prompt for letter in letters]
        self.num_by_host = asked.count(False)
        yield Until("the receiver", lambda: other.has_closed or other.is_done)
        rank.look()
        opened = windows_of(rank, 1)
        opened.collect(is_thorough=True)
        assert not opened._open
        assert rank.side.short.cells.used_bytes == 0
        yield from rank.leave()
        rank.free(*tensors)

    def receives(self, rank: Rank) -> Program:
        tensors = [rank.tensor(SHORT) for _ in range(self.num)]
        for number, tensor in enumerate(tensors):
            yield from rank.wait(rank.receive(tensor, 0, number))
        yield rank.driver.until_idle(rank.compute)
        assert rank.driver.is_idle(rank.compute)
        rank.look()
        rank.is_done = True
        yield from rank.leave()
        rank.free(*tensors)


def test_a_short_value_s_window_comes_back_when_the_receiver_s_host_looks() -> None:
    world = Short(3)
    verdict = sample(world, range(30))
    assert verdict.is_ok, verdict
    assert world.num_by_host == 3


def test_with_half_of_the_windows_in_use_the_stream_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(windows, "NUM_WINDOWS", 8)
    monkeypatch.setattr(windows, "_NUM_KEPT", 2)
    world = Short(6)
    verdict = sample(world, range(30))
    assert verdict.is_ok, verdict
    assert 3 <= world.num_by_host <= 6


class Barrier:
    """A value is received, its rank computes, and another one is sent that fits only into what the first one has left: its sender
    waits for nothing. ``is_staged``: both go through the host's memory.
    """

    def __init__(self, size_bytes: int, buffer_bytes: int, *, is_staged: bool) -> None:
        self.size_bytes = size_bytes
        self.how = Setting(buffer_bytes=[buffer_bytes], is_staged=is_staged)

    def __call__(self, machine: Machine) -> dict[str, Program]:
        zero, one = open_ranks(machine, 2, self.how)
        return {"rank 0": self.sends(zero, one), "rank 1": self.receives(one, zero)}

    def sends(self, rank: Rank, other: Rank) -> Program:
        first, second = (rank.tensor(size) for size in (self.size_bytes, MIDDLE))
        rank.make(first, value(0, self.size_bytes))
        yield from rank.wait(rank.send(first, 1, 0))
        yield Until("the receiver", lambda: other.is_done)
        rank.make(second, value(1, MIDDLE))
        yield from rank.wait(rank.send(second, 1, 1))
        rank.is_done = True
        yield from rank.leave()
        rank.free(first, second)

    def receives(self, rank: Rank, other: Rank) -> Program:
        first, second = (rank.tensor(size) for size in (self.size_bytes, MIDDLE))
        yield from rank.wait(rank.receive(first, 0, 0))
        yield rank.driver.until_idle(rank.compute)
        for stream in rank.side.streams.all():
            yield rank.driver.until_idle(stream)
        rank.is_done = True
        yield Until("the second send", lambda: other.is_done)
        yield from rank.wait(rank.receive(second, 0, 1))
        yield from rank.leave()
        rank.free(first, second)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("size_bytes", [SHORT, MIDDLE])
def test_what_has_been_received_keeps_nothing_from_being_copied_first(size_bytes: int, is_staged: bool) -> None:
    """Its receiver's host does nothing more until then."""
    verdict = sample(Barrier(size_bytes, MIDDLE + 4096, is_staged=is_staged), range(30))
    assert verdict.is_ok, verdict
