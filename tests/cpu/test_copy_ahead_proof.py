"""Tensors by themselves, which are told ahead of their copies, among values of other kinds: ends whose lines come in any order,
that sleep, close, die, are interrupted and refused, each at any line. Values are whole and in order, nobody sleeps for ever, and
nothing is left held.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch")

from crossfade.channels import shm_reader, shm_ring  # noqa: E402
from crossfade.channels.protocol import EMPTY  # noqa: E402
from crossfade.device import ring_sender  # noqa: E402
from crossfade.edges import by_copies, by_copies_in  # noqa: E402
from crossfade.edges import lane as device_lane  # noqa: E402
from crossfade.edges import reader as edge_reader  # noqa: E402
from crossfade.edges import writer as edge_writer  # noqa: E402
from crossfade.errors import ChannelError, DeviceError, Failure  # noqa: E402
from crossfade.host.doorbell import Bell, Doorbell  # noqa: E402
from tests.helpers.builds import interpreted_only  # noqa: E402
from tests.helpers.copy_pair import lose, open_copy_ends  # noqa: E402
from tests.helpers.interleaved import Killed, RungBell, Stage, Task  # noqa: E402

pytestmark = interpreted_only("its threads take turns between two lines of Python")
open_copy: Any = open_copy_ends
MODULES = (by_copies, by_copies_in, device_lane, shm_ring, shm_reader, edge_reader, edge_writer, ring_sender)

MAKERS: list[Callable[[int], Any]] = [
    lambda i: torch.full((3,), i),
    lambda i: torch.full((3,), i),
    lambda i: torch.full((2, 2), float(i)),
    lambda i: torch.full((2,), float(i), requires_grad=True),
    lambda i: torch.arange(i, i + 6).view(2, 3).t(),
    lambda i: torch.zeros((0, 2)),
    lambda i: torch.tensor(i),
    lambda i: torch.full((150 * i,), i),
    lambda i: {"a": torch.full((2,), i), "b": torch.full((3,), float(i)), "c": i},
    lambda i: i,
    lambda i: bytes([i]) * 700 * i,
    lambda i: f"value {i}",
]


def is_same(value: Any, expected: Any) -> bool:
    if isinstance(expected, torch.Tensor):
        return (
            isinstance(value, torch.Tensor)
            and (value.dtype, value.shape, value.requires_grad)
            == (expected.dtype, expected.shape, expected.requires_grad)
            and torch.equal(value.detach(), expected.detach())
        )
    if isinstance(expected, dict):
        return list(value) == list(expected) and all(is_same(value[key], expected[key]) for key in expected)
    return bool(value == expected)


@dataclass
class Case:
    """What may come to pass. Numbers of lines and of calls are 0 for never."""

    seed: int
    depth: int
    num_readers: int
    num_slots: int
    num_sources: int
    kinds: list[int]
    kept: int  # values that a reader keeps at most
    chance: float
    writer_dies_at: int = 0
    reader_dies_at: int = 0
    closes_after: int = 0  # values, by the last reader
    refuses_at: int = 0  # which call of the writer's device fails
    interrupts: bool = False  # with an interrupt, and not an error


class Play:
    """A case on its stage."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.rng = Random(case.seed)
        self.stage = Stage(self.rng, MODULES, case.chance)
        self.stage.on_death = self._died
        self.dead: list[Any] = []
        self.failed_at = -1  # the value that was under way when a device refused
        self.num_written = 0
        self.num_calls = 0
        self.num_read = [0] * case.num_readers
        self.watch = Task("the watchdog", self._watch, is_needed=False)

    def run(self) -> None:
        case, bells = self.case, []

        def new_bell() -> RungBell:
            bells.append(RungBell(self.stage))
            return bells[-1]

        with open_copy(
            case.depth,
            case.num_readers,
            case.num_slots,
            num_sources=case.num_sources,
            new_bell=new_bell,
            dead=self.dead,
        ) as (self.writer, self.readers):
            self.ends = [self.writer, *self.readers]
            self._prepare()
            tasks = [Task("the writer", self._write, case.writer_dies_at)]
            for index in range(case.num_readers):
                dies_at = case.reader_dies_at if index == 0 else 0
                tasks.append(Task(f"reader {index}", partial(self._read, index), dies_at))
            for bell, task in zip(bells, tasks, strict=True):
                bell.task = task
            self.tasks, self.bells = tasks, bells
            self.stage.run([*tasks, self.watch])
            self.dead += [end for end, task in zip(self.ends, tasks, strict=True) if task.is_dead]
            self._tell_of_the_dead()
            self._check()
        self.ends.clear()

    def _prepare(self) -> None:
        for end in self.ends:
            for home in end.carrier.homes:
                home.driver.wait_value = lambda *args: pytest.fail("PL-5: a wait came before what it waits for")
        for home in self.writer.carrier.homes:
            for name in ("record_event", "copy", "write_value"):
                setattr(home.driver, name, self._refusing(getattr(home.driver, name)))
        if self.case.num_sources > 1:
            of = lambda tensor: int(tensor.dtype is torch.float32)  # noqa: E731
            self.writer.carrier.kinds._source_of = self.writer.carrier.sources.splitter._lane_of = of

    def _refusing(self, call: Callable[..., None]) -> Callable[..., None]:
        def refusing(*args: Any) -> None:
            self.num_calls += 1
            if self.num_calls == self.case.refuses_at:
                self.failed_at = self.num_written
                raise KeyboardInterrupt if self.case.interrupts else DeviceError("no more")
            call(*args)

        return refusing

    # Who dies

    def _died(self, task: Task) -> None:
        self.watch.is_rung = True

    def _watch(self) -> None:
        told: list[Task] = []
        while True:
            for task in self.tasks:
                if task.is_dead and task not in told:
                    told.append(task)
                    self._tell_death(self.tasks.index(task))
            self.stage.sleep()

    def _tell_death(self, index: int) -> None:
        """The others hear that an end is gone, in another thread than their own, and wake."""
        if index:
            lose(self.writer, index - 1, "it died")
            self.stage.ring(self.tasks[0])
        else:
            for reader, task in zip(self.readers, self.tasks[1:], strict=True):
                if not task.is_dead:
                    reader.break_off("it died")
                    self.stage.ring(task)

    def _tell_of_the_dead(self) -> None:
        for index, end in enumerate(self.ends):
            if end in self.dead:
                self._tell_death(index)

    # What each does

    def _loop(self, index: int, step: Callable[[], bool], is_over: Callable[[], bool]) -> None:
        """As an actor's: it looks, sees to what else there is, and sleeps."""
        end, flags = self.ends[index], self.bells[index].flags
        is_idle = getattr(end, "is_idle", lambda: False)
        while not is_over():
            if step():
                continue
            is_busy = end.carrier.progress()
            flags[0] = 1
            has_moved = not is_idle() and step()
            if not has_moved:
                if is_busy or end.carrier.progress():
                    self.stage.change()
                else:
                    self.stage.sleep()
            flags[0] = 0

    def _write(self) -> None:
        writer, kinds = self.writer, self.case.kinds
        is_over = False
        value: Any = None

        def step() -> bool:
            nonlocal is_over, value
            if value is None:
                value = MAKERS[kinds[self.num_written]](self.num_written + 1)
            try:
                if not writer.try_write(value):
                    return False
            except (ChannelError, KeyboardInterrupt):
                is_over = True
                return True
            except DeviceError as error:
                value = Failure.capture(error, actor="a", node="n")
                return False
            self.num_written += 1
            value = None
            is_over = self.num_written == len(kinds)
            return True

        with suppress(DeviceError, KeyboardInterrupt):  # the plan ends by it
            self._loop(0, step, lambda: is_over)
        writer.close()

    def _read(self, index: int) -> None:
        reader, case = self.readers[index], self.case
        kept: list[tuple[Any, int]] = []
        is_over = False

        def step() -> bool:
            nonlocal is_over
            try:
                value = reader.try_read()
            except ChannelError:
                is_over = True
                return True
            if value is EMPTY:
                return False
            number = self.num_read[index]
            self._compare(value, number)
            self.num_read[index] = number + 1
            kept.append((value, number))
            while kept and (len(kept) > case.kept or self.rng.random() < 0.3):
                self._compare(*kept.pop(self.rng.randrange(len(kept))))
            is_over = index == case.num_readers - 1 and number + 1 == case.closes_after
            return True

        self._loop(1 + index, step, lambda: is_over)
        reader.close()
        for each in kept:
            self._compare(*each)

    def _compare(self, value: Any, number: int) -> None:
        if number != self.failed_at or type(value) is not Failure:
            expected = MAKERS[self.case.kinds[number]](number + 1)
            assert is_same(value, expected), f"value {number}: {value} instead of {expected}"

    def _check(self) -> None:
        """Whoever did not leave by itself has got all that was written."""
        case = self.case
        num = self.writer.statistics().num_values
        for index, num_read in enumerate(self.num_read):
            is_own = bool(case.closes_after) and index == case.num_readers - 1
            if self.ends[1 + index] not in self.dead and not is_own and self.writer not in self.dead:
                assert num_read == num
        if not (case.closes_after or case.refuses_at or self.dead):
            assert num == len(case.kinds)


@contextmanager
def quick(num_looks: int) -> Iterator[None]:
    """Readers look a few times only, the dead say nothing, and memory is collected between two plays."""
    before, hook = by_copies_in._NUM_LOOKS, sys.unraisablehook
    by_copies_in._NUM_LOOKS = num_looks
    sys.unraisablehook = lambda args: None if args.exc_type is Killed else hook(args)
    gc.disable()
    try:
        yield
    finally:
        by_copies_in._NUM_LOOKS, sys.unraisablehook = before, hook
        gc.enable()


rarely = st.one_of(st.just(0), st.integers(1, 1500))

cases = st.builds(
    Case,
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 3),
    num_readers=st.integers(1, 3),
    num_slots=st.integers(1, 3),
    num_sources=st.integers(1, 2),
    kinds=st.lists(st.integers(0, len(MAKERS) - 1), min_size=1, max_size=12),
    kept=st.integers(0, 4),
    chance=st.sampled_from([0.02, 0.1, 0.3, 0.6]),
    writer_dies_at=rarely,
    reader_dies_at=rarely,
    closes_after=st.one_of(st.just(0), st.integers(1, 6)),
    refuses_at=st.one_of(st.just(0), st.integers(1, 30)),
    interrupts=st.booleans(),
)


@given(case=cases, num_looks=st.integers(1, 4))
def test_values_are_whole_and_in_order_whoever_comes_first(case: Case, num_looks: int) -> None:
    with quick(num_looks):
        Play(case).run()


@pytest.mark.parametrize("spin_us", [0.0, 150.0])
def test_threads_that_sleep_on_their_doorbells_lose_no_value(spin_us: float) -> None:
    num, num_readers = 400, 2
    doorbells: list[Doorbell] = []
    faults: list[BaseException] = []

    def new_bell() -> Bell:
        doorbells.append(Doorbell(*Doorbell.create_fds("test"), spin_us=spin_us))
        return doorbells[-1].bell()

    def value(number: int) -> Any:
        return MAKERS[number * 7 % len(MAKERS)](number % 50)

    def each(index: int, end: Any, step: Callable[[int], bool]) -> None:
        try:
            for number in range(num):

                def ready(number: int = number) -> bool:
                    has_moved = step(number)
                    end.carrier.progress()
                    return has_moved

                while not doorbells[index].wait_until(
                    ready, 0.001 if end.carrier.progress() else 20.0, getattr(end, "is_idle", None)
                ):
                    pass
        except BaseException as error:
            faults.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with open_copy(3, num_readers, new_bell=new_bell) as (writer, readers):
            kept: list[Any] = [None] * num_readers

            def write(number: int) -> bool:
                return bool(writer.try_write(value(number)))

            def read(index: int, number: int) -> bool:
                got = readers[index].try_read()
                if got is EMPTY:
                    return False
                assert is_same(got, value(number)), f"value {number}: {got}"
                kept[index] = got
                return True

            threads = [threading.Thread(target=each, args=(0, writer, write))]
            for index, reader in enumerate(readers):
                threads.append(threading.Thread(target=each, args=(1 + index, reader, partial(read, index))))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
            assert not faults, faults
            assert [reader.statistics().num_values for reader in readers] == [num] * num_readers
            kept.clear()
    finally:
        sys.setswitchinterval(interval)
        for doorbell in doorbells:
            doorbell.close()
