"""Values between a device and the host, over CPU tensors that stand for a device's: at once, or late by order of the test."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch: Any = pytest.importorskip("torch")

from crossfade.channels import conformance, device_codec  # noqa: E402
from crossfade.channels.device_codec import split_for_host  # noqa: E402
from crossfade.channels.device_writer import DeviceToHostWriter  # noqa: E402
from crossfade.channels.layout import Encoded  # noqa: E402
from crossfade.channels.protocol import EMPTY, Reader, Writer  # noqa: E402
from crossfade.channels.shm_ring import ShmWriter  # noqa: E402
from crossfade.channels.tensors import bring_to_host  # noqa: E402
from crossfade.device.driver import HOST  # noqa: E402
from crossfade.device.host_driver import HostDriver  # noqa: E402
from crossfade.device.tensors import tensor_on  # noqa: E402
from crossfade.errors import ActorDiedError, ChannelBroken, ChannelClosed, DeviceError, Failure, TaskError  # noqa: E402
from tests.helpers.host_rings import Ring, open_ring, take, until  # noqa: E402
from tests.helpers.late_driver import LateDriver  # noqa: E402

LONG_US = 1e6
"""So long a spin that the thread does nothing: the test is the main thread that looks."""


@contextmanager
def open_from_device(depth: int, num_readers: int) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    with open_ring(HostDriver(1.0), depth=depth, num_readers=num_readers) as ring:
        yield ring.writer, ring.readers


@contextmanager
def open_to_device(depth: int, num_readers: int) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    with open_ring(
        HostDriver(1.0), depth=depth, num_readers=num_readers, writes_from_device=False, reads_onto="cuda"
    ) as ring:
        yield ring.writer, ring.readers


@contextmanager
def open_both(depth: int, num_readers: int) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    with open_ring(HostDriver(1.0), depth=depth, num_readers=num_readers, reads_onto="default") as ring:
        yield ring.writer, ring.readers


class AllPending(DeviceToHostWriter):
    """Every value goes the way of one that has to be copied."""

    def publish(self) -> None:
        at = self._at
        ShmWriter.publish(self)
        self._submit(at, -1, (), ())


@contextmanager
def open_pending(depth: int, num_readers: int) -> Iterator[tuple[Writer, Sequence[Reader]]]:
    with open_ring(HostDriver(1.0), depth=depth, num_readers=num_readers, writer_type=AllPending) as ring:
        yield ring.writer, ring.readers


TestPending = conformance.suite(open_pending)
TestFromDevice = conformance.suite(open_from_device)
TestToDevice = conformance.suite(open_to_device)
TestBoth = conformance.suite(open_both)

DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.uint16,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def raw(tensor: Any) -> Any:
    return tensor.contiguous().view(-1).view(torch.uint8)


def sample(dtype: Any, shape: tuple[int, ...]) -> Any:
    return torch.arange(torch.Size(shape).numel()).remainder(50).reshape(shape).to(dtype)


@pytest.fixture
def late() -> LateDriver:
    return LateDriver()


def write(ring: Ring, value: object) -> None:
    until(lambda: ring.writer.try_write(value), "room")


# Values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 5), (2, 300, 7)])
@pytest.mark.parametrize("reads_onto", ["", "default", "cuda"])
def test_tensors_of_all_types_and_shapes(dtype: Any, shape: tuple[int, ...], reads_onto: str) -> None:
    tensor = sample(dtype, shape)
    with open_ring(HostDriver(1.0), reads_onto=reads_onto) as ring:
        for _ in range(3):
            write(ring, tensor)
            got = take(ring.reader)
            assert got.dtype is dtype
            assert tuple(got.shape) == shape
            assert torch.equal(raw(got), raw(tensor))
            del got


@pytest.mark.parametrize("writes_from_device", [True, False])
@pytest.mark.parametrize("reads_onto", ["", "default", "cuda", "cpu"])
def test_values_with_tensors_among_other_things(writes_from_device: bool, reads_onto: str) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    value: dict[str, Any] = {
        "transposed": base.t(),
        "strided": base[:, ::2],
        "expanded": base[0].expand(3, 6),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "negative": torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
        "negated": torch._neg_view(torch.arange(4.0)),
        "grad": torch.ones(2, requires_grad=True) * 2,
        "twice": [base, (base,)],
        "call": lambda x: x + 1,
        "array": np.arange(1000),
        "more": [None, "text", 3],
    }
    with open_ring(HostDriver(1.0), writes_from_device=writes_from_device, reads_onto=reads_onto) as ring:
        write(ring, value)
        got = take(ring.reader)
        for name in ("transposed", "strided", "expanded", "conjugate", "negative", "negated", "grad"):
            assert torch.equal(got[name], value[name]), name
        assert not got["conjugate"].is_conj()
        assert not got["negated"].is_neg()
        assert got["grad"].requires_grad
        assert got["grad"].grad_fn is None
        assert got["twice"][0] is got["twice"][1][0]
        assert got["call"](1) == 2
        assert np.array_equal(got["array"], value["array"])
        assert not got["array"].flags.writeable
        assert got["more"] == value["more"]


def test_modules_and_parameters() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU())
    with open_ring(HostDriver(1.0), reads_onto="cuda") as ring:
        write(ring, module)
        got = take(ring.reader)
    x = torch.rand(5, 3)
    assert torch.equal(got(x), module(x))
    assert all(type(each) is torch.nn.Parameter for each in got.parameters())


def test_no_byte_of_a_device_tensor_is_copied_by_the_host() -> None:
    tensor, cpu = torch.full((1000,), 7, dtype=torch.uint8), torch.full((500,), 3, dtype=torch.uint8)
    split = split_for_host({"a": tensor, "b": cpu, "none": torch.empty(0)}, lambda each: each is not cpu)
    assert isinstance(split.message, Encoded)
    assert [data.nbytes for _, data in split.message.buffers] == [500, 0]
    ((_, offset, placed),) = split.tensors
    assert placed.data_ptr() == tensor.data_ptr()
    assert offset % 64 == 0
    assert offset + 1000 <= split.message.size_bytes


@pytest.mark.parametrize("requires_grad", [True, False])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5)])
def test_a_tensor_by_itself_is_laid_out_as_any_value(shape: tuple[int, ...], requires_grad: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.complex64):
        tensor = sample(dtype, shape).requires_grad_(requires_grad)
        short, general = (make(tensor, lambda each: True) for make in (split_for_host, device_codec._split_any))
        assert short.message == general.message
        assert short.tensors[0].offset == general.tensors[0].offset


def test_without_tensors_a_value_is_a_pickle() -> None:
    assert isinstance(split_for_host({"n": 3}, lambda each: True).message, bytes)


def test_what_a_gpu_of_nobody_holds_is_brought_to_the_host() -> None:
    tensor = torch.arange(24).reshape(4, 6).t()
    got = bring_to_host(tensor)
    assert got.is_contiguous()
    assert torch.equal(got, tensor)
    assert got.data_ptr() != tensor.data_ptr()


def test_several_readers_have_memory_of_their_own() -> None:
    with open_ring(HostDriver(1.0), num_readers=3) as ring:
        for number in range(5):
            write(ring, torch.full((5000,), number))
            got = [take(reader) for reader in ring.readers]
            got[0].zero_()
            assert [int(each[0]) for each in got] == [0, number, number]


# Order


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
        assert torch.equal(ring.reader.try_read()["t"], torch.full((3000,), 7.0))  # type: ignore[index]


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
            assert int(ring.reader.try_read()[0]) == number  # type: ignore[index]
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
        assert dropped.is_set()
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
            assert ring.reader.try_read()[0] == number  # type: ignore[index]


def test_an_event_that_fails_is_told_of_by_the_thread(late: LateDriver) -> None:
    with open_ring(late) as ring:
        late.hold(ring.home.up_stream)
        assert ring.writer.try_write(torch.arange(10))
        until(lambda: late.num_blocked == 1)
        late.break_down(DeviceError("the GPU has fallen off the bus"))
        assert isinstance(take(ring.reader), Failure)


def test_what_cannot_be_trusted_is_not_told_of(late: LateDriver) -> None:
    """A stream that waited for the dead was let go: the copy is done, and what it copied is rubbish."""
    with open_ring(late, spin_us=LONG_US) as ring:
        late.hold(ring.home.up_stream)
        reasons: list[ActorDiedError | None] = [None]
        ring.writer._distrust = lambda: reasons[0]  # type: ignore[attr-defined]
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
        assert len(ring.reader.try_read()) == 1000  # type: ignore[arg-type]
        late.max_pinned = 100
        assert ring.writer.try_write(torch.arange(1000))
        assert ring.copies.poll()
        assert len(ring.reader.try_read()) == 1000  # type: ignore[arg-type]


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
        first = ring.writer._slots._busy.copy()
        assert ring.writer.try_write([torch.full((3000,), 3)])  # into another slot
        assert ring.writer._slots._busy.keys() > first.keys()
        late.let_go(up)
        assert ring.copies.poll()
        assert int(take(ring.reader)[0][-1]) == 3
        assert ring.writer.try_write(1)
        assert not ring.writer._slots._busy.keys() & first.keys()


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
            ring.writer._slots._grow(0, num)
            ring.writer._slots.address(0)  # type: ignore[attr-defined]
        assert len(late.ledger.held("mapped")) == 3
        late.let_go(0)
        ring.copies.poll()
        assert len(late.ledger.held("mapped")) == 1
        take(ring.reader)


def test_slots_set_aside_are_pinned_beforehand(late: LateDriver) -> None:
    with open_ring(late, depth=3, buffer_bytes=50_000, spin_us=LONG_US):
        assert len(late.ledger.held("mapped")) == 3


# Onto the device


def test_tensors_are_brought_to_the_device_and_their_slot_is_held(late: LateDriver) -> None:
    """The slot is free when the copy is done, and the computation waits for it."""
    with open_ring(late, depth=2, writes_from_device=False, reads_onto="cuda", spin_us=LONG_US) as ring:
        down = ring.home.down_stream
        late.hold(down)
        assert ring.writer.try_write(torch.arange(1000))
        got: Any = ring.reader.try_read()
        assert ring.reader.statistics().num_kept == 1
        seen: list[Any] = []
        late.give(0, lambda: seen.append(got.clone()))  # a kernel behind it
        assert seen == []
        late.let_go(down)
        assert torch.equal(seen[0], torch.arange(1000))
        assert ring.reader.statistics().num_kept == 0
        assert torch.equal(got, torch.arange(1000))


@pytest.mark.parametrize("num", [10, 1000])
def test_cpu_tensors_stay_on_their_slot_by_default(late: LateDriver, num: int) -> None:
    with open_ring(late, writes_from_device=False, reads_onto="default", spin_us=LONG_US) as ring:
        late.hold(ring.home.down_stream)
        assert ring.writer.try_write(torch.arange(num))
        assert torch.equal(ring.reader.try_read(), torch.arange(num))


def test_a_view_that_died_holds_its_slot_until_the_stream_is_past_it(late: LateDriver) -> None:
    """The program may have enqueued a copy from it."""
    with open_ring(late, depth=1, writes_from_device=False, reads_onto="default", spin_us=LONG_US) as ring:
        late.hold(0)
        assert ring.writer.try_write(torch.full((1000,), 1))
        source: Any = ring.reader.try_read()
        target = torch.zeros(1000, dtype=torch.int64)
        late.copy(target.data_ptr(), source.data_ptr(), 8000, 0)
        del source
        assert ring.reader.statistics().num_kept == 1
        assert ring.writer.try_write(torch.full((1000,), 2))
        assert ring.reader.try_read() is EMPTY  # its share of slots is under way; nothing is copied out
        assert ring.copies.is_pending
        late.let_go(0)
        assert ring.copies.poll()
        assert torch.equal(target, torch.full((1000,), 1))
        assert torch.equal(ring.reader.try_read(), torch.full((1000,), 2))
        assert ring.reader.statistics().num_copied_out == 0


def test_who_waits_for_a_slot_is_woken(late: LateDriver) -> None:
    with open_ring(late, depth=1, writes_from_device=False, reads_onto="cuda") as ring:
        late.hold(ring.home.down_stream)
        for number in range(2):
            assert ring.writer.try_write(torch.full((1000,), number))
            if number == 0:
                ring.reader.try_read()
        assert ring.reader.try_read() is EMPTY
        bell = ring.copies.publisher._bell
        bell.flags[0] = 1  # asleep
        until(lambda: late.num_blocked == 1)
        late.let_go(ring.home.down_stream)
        until(lambda: not ring.copies.is_pending)
        assert os.eventfd_read(bell.event_fd) >= 1
        assert int(ring.reader.try_read()[0]) == 1  # type: ignore[index]


def test_kept_views_are_copied_out_as_ever(late: LateDriver) -> None:
    with open_ring(late, depth=2, writes_from_device=False, reads_onto="default", spin_us=LONG_US) as ring:
        kept = []
        for number in range(10):
            write(ring, torch.full((1000,), number))
            kept.append(take(ring.reader))
        assert ring.reader.statistics().num_copied_out == 8
        assert all(int(tensor[-1]) == number for number, tensor in enumerate(kept))


def test_a_view_that_dies_within_a_capture_ends_behind_it(late: LateDriver) -> None:
    with open_ring(late, depth=1, writes_from_device=False, reads_onto="default", spin_us=LONG_US) as ring:
        assert ring.writer.try_write(torch.full((1000,), 1))
        view = ring.reader.try_read()
        late.begin_capture(0)
        del view
        assert ring.reader._slots.num_kept == 1
        ring.reader.collect()  # type: ignore[attr-defined]
        assert ring.reader._slots.num_kept == 1
        late.destroy_graph(late.end_capture(0))
        assert ring.reader.statistics().num_kept == 0


def test_without_pinned_memory_values_are_read_all_the_same(late: LateDriver) -> None:
    late.max_pinned = 0
    for reads_onto in ("default", "cuda"):
        with open_ring(late, writes_from_device=False, reads_onto=reads_onto, spin_us=LONG_US) as ring:
            for number in range(5):
                assert ring.writer.try_write([torch.full((1000,), number)])
                assert int(ring.reader.try_read()[0][0]) == number  # type: ignore[index]


def test_a_broken_device_frees_slots(late: LateDriver) -> None:
    with open_ring(late, depth=1, writes_from_device=False, reads_onto="default", spin_us=LONG_US) as ring:
        assert ring.writer.try_write(np.arange(1000))
        view = ring.reader.try_read()
        late.break_down(DeviceError("gone"))
        del view
        assert ring.reader.statistics().num_kept == 0


def test_a_value_that_does_not_unpickle_leaves_no_slot_held(late: LateDriver) -> None:
    with open_ring(late, depth=1, writes_from_device=False, reads_onto="cuda", spin_us=LONG_US) as ring:
        for _ in range(5):
            assert ring.writer.try_write([torch.arange(1000), _Unreadable()])
            failure = ring.reader.try_read()
            assert isinstance(failure, Failure)
            del failure
            gc.collect()
            assert ring.reader.statistics().num_kept == 0


class _Unreadable:
    def __reduce__(self) -> Any:
        return int, ("this is no number",)


def test_views_that_die_in_another_thread_end_once() -> None:
    """Slots are freed, used again and never short, whoever drops the last view."""
    views: SimpleQueue[Any] = SimpleQueue()

    def drop() -> None:
        while views.get() is not None:
            pass

    thread = threading.Thread(target=drop)
    thread.start()
    try:
        with open_ring(HostDriver(1.0), depth=2, writes_from_device=False, reads_onto="default") as ring:
            for number in range(3000):
                write(ring, torch.full((300,), number))
                view = take(ring.reader)
                assert int(view[-1]) == number
                views.put(view)
                del view
            until(lambda: ring.reader.statistics().num_kept == 0, "the end of all views")
            assert ring.writer.statistics().num_slots <= 4
    finally:
        views.put(None)
        thread.join(10)


def test_ends_without_a_device_know_nothing_of_it() -> None:
    code = """
import sys
import crossfade.channels.shm_ring, crossfade.engines.wiring
found = [name for name in sys.modules if name == "torch" or name.startswith("crossfade.device")]
assert not found, found
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
