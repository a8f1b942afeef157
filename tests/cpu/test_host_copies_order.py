"""Values from a device to the host: their order, faults and the end, over a driver that is late by order of the test."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch")

from crossfade.channels.protocol import EMPTY  # noqa: E402
from crossfade.device.borrowed import tensor_on  # noqa: E402
from crossfade.device.driver import HOST  # noqa: E402
from crossfade.device.host_driver import HostDriver  # noqa: E402
from crossfade.device.moments import Moments  # noqa: E402
from crossfade.errors import ActorDiedError, ChannelBroken, ChannelClosed, DeviceError, Failure, TaskError  # noqa: E402
from tests.helpers.host_rings import LIMIT_S, Ring, home_on, open_ring, take, until  # noqa: E402
from tests.helpers.late_driver import LateDriver  # noqa: E402

LONG_US = 1e6
"""So long a spin that the thread does nothing: the test is the main thread that looks."""


@pytest.fixture
def late() -> LateDriver:
    return LateDriver()


def write(ring: Ring, value: object) -> None:
    until(lambda: ring.writer.try_write(value), "room")


def test_a_value_is_told_of_when_its_bytes_are_there(late: LateDriver) -> None:
    with open_ring(late, spin_us=LONG_US) as ring:
        up = ring.home.up_stream
        tensor = torch.zeros(3000)
        late.hold(0, up)
        late.give(0, lambda: tensor.fill_(7.0))  # what computes it is enqueued, and has not run
        assert ring.writer.try_write({"t": tensor})
        assert not ring.writer.try_flush()
        late.let_go(up)
        ring.copies.poll()
        assert ring.reader.try_read() is EMPTY  # the copy waits for the computation
        late.hold(up)
        late.let_go(0)
        assert not ring.copies.poll()
        late.step(up)  # the wait
        late.step(up)  # the copy
        assert not ring.copies.poll()
        assert ring.reader.try_read() is EMPTY
        late.step(up)
        assert ring.copies.poll()
        assert ring.writer.try_flush()
        assert torch.equal(ring.reader.try_read()["t"], torch.full((3000,), 7.0))


def test_ch1_what_is_written_behind_a_pending_value_waits_for_it(late: LateDriver) -> None:
    with open_ring(late, depth=4, spin_us=LONG_US) as ring:
        up = ring.home.up_stream
        late.hold(up)
        values = [torch.full((10,), 5), 3, b"x" * 3000, {"n": 1}]
        assert all(ring.writer.try_write(value) for value in values)
        assert not ring.writer.try_write("too many")
        ring.copies.poll()
        assert ring.reader.try_read() is EMPTY
        late.let_go(up)
        assert ring.copies.poll()
        assert torch.equal(ring.reader.try_read(), values[0])
        assert [ring.reader.try_read() for _ in range(3)] == values[1:]
        assert ring.writer.try_write("at once")
        assert ring.writer.try_flush()
        assert ring.reader.try_read() == "at once"


def test_a_recorder_is_told_when_a_value_was_under_way(late: LateDriver) -> None:
    with open_ring(late, spin_us=LONG_US) as ring:
        spans: list[tuple[int, int]] = []
        ring.writer.on_moved = lambda start_ns, end_ns: spans.append((start_ns, end_ns))
        late.hold(ring.home.up_stream)
        begin_ns = time.monotonic_ns()
        assert ring.writer.try_write(torch.arange(10))
        assert ring.writer.try_write("moved by nobody")
        let_go_ns = time.monotonic_ns()
        late.let_go(ring.home.up_stream)
        assert ring.copies.poll()
        ((start_ns, end_ns),) = spans
        assert begin_ns <= start_ns <= let_go_ns <= end_ns


def test_a_thread_tells_where_the_main_thread_does_not_look(late: LateDriver) -> None:
    """And only then is a bell rung for a process that sleeps."""
    with open_ring(late, spin_us=100.0) as ring:
        late.hold(ring.home.up_stream)
        assert ring.writer.try_write(torch.arange(10))
        until(lambda: late.num_blocked == 1, "the thread's waiting")
        assert ring.reader.try_read() is EMPTY
        late.let_go(ring.home.up_stream)
        assert torch.equal(take(ring.reader), torch.arange(10))
        assert until(ring.writer.try_flush)


def test_while_the_main_thread_looks_the_thread_sleeps(late: LateDriver) -> None:
    with open_ring(late, spin_us=LONG_US) as ring:
        for number in range(200):
            assert ring.writer.try_write(torch.full((10,), number))
            assert ring.copies.poll()
            assert int(ring.reader.try_read()[0]) == number
        assert not ring.copies.publisher._is_awake


def test_both_look_and_each_value_comes_once() -> None:
    """The thread and the main thread race for 2,000 values."""
    with open_ring(HostDriver(1.0), depth=3, spin_us=0.0) as ring:
        got: list[int] = []
        sent = 0
        deadline = time.monotonic() + 30
        while len(got) < 2000:
            assert time.monotonic() < deadline
            if sent < 2000 and ring.writer.try_write(torch.full((4,), sent) if sent % 3 else sent):
                sent += 1
            if sent % 5 == 0:
                ring.copies.poll()
            value: Any = ring.reader.try_read()
            if value is not EMPTY:
                got.append(int(value[0]) if isinstance(value, torch.Tensor) else value)
        assert got == list(range(2000))


def test_tensors_are_kept_until_they_are_copied(late: LateDriver) -> None:
    """A tensor that lies on a slot of a ring, say: its lease must not end before it was read."""
    dropped = threading.Event()

    class Lease:
        def __del__(self) -> None:
            dropped.set()

    memory = torch.arange(1000)
    with open_ring(late, spin_us=LONG_US) as ring:
        late.hold(ring.home.up_stream)
        value = [tensor_on(memory.data_ptr(), (1000,), torch.int64, HOST, keep=Lease())]
        assert ring.writer.try_write(value)
        value.clear()
        gc.collect()
        assert not dropped.is_set()
        late.let_go(ring.home.up_stream)
        assert ring.copies.poll()
        assert dropped.wait(LIMIT_S)  # by the thread, where the main thread came too late
        assert torch.equal(take(ring.reader)[0], memory)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("write"), st.sampled_from(["number", "text", "device", "device", "both", "large"])),
            st.tuples(st.just("step"), st.integers(1, 4)),
            st.tuples(st.just("poll"), st.just(0)),
            st.tuples(st.just("read"), st.integers(1, 3)),
        ),
        max_size=60,
    ),
    st.integers(1, 4),
    st.integers(1, 2),
)
def test_ch1_any_sequence_comes_in_order(steps: list[tuple[str, Any]], depth: int, num_readers: int) -> None:
    driver = LateDriver()
    with open_ring(driver, depth=depth, num_readers=num_readers, spin_us=LONG_US) as ring:
        up = ring.home.up_stream
        driver.hold(up)
        sent: list[Any] = []
        got: list[list[Any]] = [[] for _ in range(num_readers)]

        def read(num: int) -> None:
            for reader, mine in zip(ring.readers, got, strict=True):
                for _ in range(num):
                    value = reader.try_read()
                    if value is not EMPTY:
                        mine.append(value)

        for kind, what in steps:
            if kind == "write":
                value = _draw(what, len(sent))
                if ring.writer.try_write(value):
                    sent.append(value)
            elif kind == "step":
                driver.step(up, min(what, len(driver._queues[up])))
            elif kind == "poll":
                ring.copies.poll()
            else:
                read(what)
            assert all(len(mine) <= len(sent) for mine in got)
        driver.let_go(up)
        ring.copies.poll()
        read(len(sent))
        for mine in got:
            assert len(mine) == len(sent)
            assert all(map(_is_equal, mine, sent))


def _draw(kind: str, number: int) -> Any:
    return {
        "number": number,
        "text": "x" * (number * 300),
        "device": torch.full((number % 7,), number),
        "both": {"t": torch.full((3, number % 5), number), "array": np.full(number * 40, number), "n": number},
        "large": [torch.full((5000 + number,), number), torch.tensor(number)],
    }[kind]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return bool(torch.equal(one, other))
    if isinstance(other, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(other, dict):
        return all(_is_equal(one[key], other[key]) for key in other)
    if isinstance(other, list):
        return all(map(_is_equal, one, other))
    return bool(one == other)


# Faults and the end


def test_an_event_that_fails_becomes_an_error_in_its_place(late: LateDriver) -> None:
    with open_ring(late, depth=4, spin_us=LONG_US) as ring:
        late.hold(ring.home.up_stream)
        assert ring.writer.try_write(torch.arange(10))
        assert ring.writer.try_write("behind it")
        late.break_down(DeviceError("cuEventQuery failed: CUDA_ERROR_ILLEGAL_ADDRESS: " + "x" * 5000))
        assert ring.copies.poll()
        failure = ring.reader.try_read()
        assert isinstance(failure, Failure)
        error = failure.to_error()
        assert isinstance(error, DeviceError)
        assert isinstance(error, TaskError)
        assert "A.f (node n0), copying it from the GPU to the host, on actor A" in str(error)
        assert "ILLEGAL_ADDRESS" in str(error)
        assert ring.reader.try_read() == "behind it"
        with pytest.raises(DeviceError, match="ILLEGAL"):
            ring.writer.try_write(torch.arange(10))
        for number in range(10):  # what needs no device goes on, for as long as it likes
            assert ring.writer.try_write([number, b"x" * 5000])
            assert ring.reader.try_read()[0] == number


def test_an_event_that_fails_is_told_of_by_the_thread(late: LateDriver) -> None:
    with open_ring(late) as ring:
        late.hold(ring.home.up_stream)
        assert ring.writer.try_write(torch.arange(10))
        until(lambda: late.num_blocked == 1)
        late.break_down(DeviceError("the GPU has fallen off the bus"))
        assert isinstance(take(ring.reader), Failure)


@pytest.mark.parametrize("is_by_thread", [False, True])
def test_of_two_devices_one_that_fails_does_not_give_up_what_the_other_still_writes(
    late: LateDriver, is_by_thread: bool
) -> None:
    """The slot of a value with tensors of both is used again when the second is done."""
    with open_ring(late, spin_us=0.0 if is_by_thread else LONG_US) as ring:
        other = LateDriver()
        other.device = 7
        home, moments = home_on(other), Moments(other)
        ring.copies.homes = [home, ring.home]
        ring.copies._moments[home.device] = moments
        up = ring.home.up_stream
        late.hold(up)
        other.hold(home.up_stream)
        assert len(ring.copies.ends_of_copies()) == 2
        told: list[DeviceError | None] = []
        both = moments.at(home.up_stream), ring.copies.moments(ring.home).at(up)
        ring.copies.publisher.submit(both, told.append)
        other.break_down(DeviceError("an illegal address"))
        assert len(ring.copies.ends_of_copies()) == 1
        if is_by_thread:
            until(lambda: late.num_blocked == 1)
        else:
            assert not ring.copies.publisher.poll()
        assert told == []
        late.let_go(up)
        until(lambda: told or (not is_by_thread and ring.copies.publisher.poll() and told))
        assert "illegal address" in str(told)
        ring.copies.homes = [ring.home]
        other.error = None
        del both
        home.streams.close()
        home.pool.close()
    assert other.ledger.held() == []


@pytest.mark.parametrize("is_by_thread", [False, True])
def test_what_raises_when_it_is_done_holds_up_nothing_behind_it(
    late: LateDriver, monkeypatch: pytest.MonkeyPatch, is_by_thread: bool
) -> None:
    raised: list[str] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: raised.append(str(args.exc_value)))

    def fail(error: DeviceError | None) -> None:
        raise KeyError("planted")

    with open_ring(late, spin_us=0.0 if is_by_thread else LONG_US) as ring:
        for number in range(3):
            ring.copies.publisher.submit((), fail)
            assert ring.writer.try_write(torch.arange(number))
            until(lambda: not ((is_by_thread or not ring.copies.poll()) and ring.copies.is_pending))
            assert len(take(ring.reader)) == number
    assert raised == ["'planted'"] * 3


def test_what_cannot_be_trusted_is_not_told_of(late: LateDriver) -> None:
    """A stream that waited for the dead was let go: the copy is done, and what it copied is rubbish."""
    with open_ring(late, spin_us=LONG_US) as ring:
        late.hold(ring.home.up_stream)
        reasons: list[ActorDiedError | None] = [None]
        ring.writer._distrust = ring.writer.carrier._distrust = lambda: reasons[0]
        assert ring.writer.try_write(torch.arange(10))
        reasons[0] = ActorDiedError("actor B has died")
        late.let_go(ring.home.up_stream)
        assert ring.copies.poll()
        failure = ring.reader.try_read()
        assert isinstance(failure, Failure)
        assert isinstance(failure.to_error(), ActorDiedError)
        reasons[0] = None
        for number in range(10):
            assert ring.writer.try_write(torch.full((10,), number))
            assert ring.copies.poll()
            assert int(take(ring.reader)[0]) == number


def test_no_pinned_memory_is_an_error_and_the_ring_goes_on(late: LateDriver) -> None:
    with open_ring(late, spin_us=LONG_US) as ring:
        late.max_pinned = 0
        for _ in range(10):  # no slot is lost by it
            with pytest.raises(DeviceError, match=r"channel c has no memory for .* bytes to which a GPU can copy"):
                ring.writer.try_write(torch.arange(1000))
        assert ring.writer.try_write(np.arange(1000))
        assert len(ring.reader.try_read()) == 1000
        late.max_pinned = 100
        assert ring.writer.try_write(torch.arange(1000))
        assert ring.copies.poll()
        assert len(ring.reader.try_read()) == 1000


def test_a_copy_that_is_refused_half_way_holds_its_slot(late: LateDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_ring(late, depth=1, spin_us=LONG_US) as ring:
        up = ring.home.up_stream
        late.hold(up)
        copy, num_copies = late.copy, 0

        def refuse(target: int, source: int, size_bytes: int, stream: int) -> None:
            nonlocal num_copies
            num_copies += 1
            if num_copies == 2:
                raise DeviceError("refused")
            copy(target, source, size_bytes, stream)

        monkeypatch.setattr(late, "copy", refuse)
        with pytest.raises(DeviceError, match="refused"):
            ring.writer.try_write([torch.full((3000,), 1), torch.full((3000,), 2)])
        first = ring.writer.ring._slots._busy.copy()
        assert ring.writer.try_write([torch.full((3000,), 3)])  # into another slot
        assert ring.writer.ring._slots._busy.keys() > first.keys()
        late.let_go(up)
        assert ring.copies.poll()
        assert int(take(ring.reader)[0][-1]) == 3
        assert ring.writer.try_write([torch.full((3000,), 4)])  # takes the slot that was held
        assert ring.writer.ring._slots._busy.keys() >= first.keys()
        assert len(ring.writer.ring._slots._busy) < 3


def test_ch1_pending_values_come_after_the_close_and_memory_goes_back_behind_them(late: LateDriver) -> None:
    with open_ring(late, spin_us=LONG_US) as ring:
        late.hold(ring.home.up_stream)
        assert ring.writer.try_write(torch.arange(1000))
        ring.writer.close()
        ring.writer.close()
        with pytest.raises(ChannelClosed):
            ring.writer.try_write(1)
        assert ring.reader.try_read() is EMPTY
        assert not ring.copies.close()  # the copy is under way
        assert [held for held in late.ledger.held() if held.startswith("mapped")] != []
        late.let_go(ring.home.up_stream)
        assert torch.equal(take(ring.reader), torch.arange(1000))
        until(lambda: not ring.copies.is_pending)
        with pytest.raises(ChannelBroken):
            ring.reader.try_read()


@pytest.mark.parametrize("breaks_off", [True, False])
def test_the_end_with_values_pending_leaves_nothing(late: LateDriver, breaks_off: bool) -> None:
    num_threads = threading.active_count()
    with open_ring(late, depth=3, reads_onto="cuda", spin_us=LONG_US) as ring:
        up, down = ring.home.up_stream, ring.home.down_stream
        assert ring.writer.try_write(torch.arange(1000))
        ring.copies.poll()
        late.hold(down)
        got = ring.reader.try_read()
        late.hold(up)
        assert ring.writer.try_write(torch.arange(2000))
        assert ring.writer.try_write(3)
        if breaks_off:
            ring.writer.break_off("the reader died")
            with pytest.raises(ChannelBroken, match="the reader died"):
                ring.writer.try_write(4)
            ring.reader.break_off("the writer died")
        ring.close_ends()
        assert not ring.copies.close()
        late.let_go(up, down)
        assert torch.equal(got, torch.arange(1000))
    assert threading.active_count() == num_threads
    assert late.ledger.held() == []


def test_closing_without_values_ends_the_thread(late: LateDriver) -> None:
    num_threads = threading.active_count()
    with open_ring(late) as ring:
        assert threading.active_count() == num_threads + 1
        assert not ring.copies.is_pending
    assert threading.active_count() == num_threads


def test_slots_that_grow_are_unpinned_when_the_device_is_idle(late: LateDriver) -> None:
    with open_ring(late, depth=1, spin_us=LONG_US) as ring:
        for num in (10, 10_000, 100_000):
            assert ring.writer.try_write(torch.arange(num))
            assert ring.copies.poll()
            assert len(take(ring.reader)) == num
        ring.copies.poll()
        assert len(late.ledger.held("mapped")) <= ring.writer.statistics().num_slots
        late.hold(0)
        late.give(0, lambda: None)
        assert ring.writer.try_write(np.arange(1))
        assert len(late.ledger.held("mapped")) == 1
        for num in (400_000, 900_000):  # a busy device: nothing is given up
            ring.writer.ring._slots._grow(0, num)
            ring.writer.ring._slots.address(0)
        assert len(late.ledger.held("mapped")) == 3
        late.let_go(0)
        ring.copies.poll()
        assert len(late.ledger.held("mapped")) == 1
        take(ring.reader)


def test_slots_set_aside_are_pinned_beforehand(late: LateDriver) -> None:
    with open_ring(late, depth=3, buffer_bytes=50_000, spin_us=LONG_US):
        assert len(late.ledger.held("mapped")) == 3
