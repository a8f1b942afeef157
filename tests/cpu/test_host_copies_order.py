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
from tests.helpers.host_rings import LIMIT_S, LONG_US, open_ring  # noqa: E402
from tests.helpers.late_driver import LateDriver  # noqa: E402
from tests.helpers.waiting import take, until  # noqa: E402


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
