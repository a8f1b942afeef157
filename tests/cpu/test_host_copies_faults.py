"""Values from a device to the host: faults and the end, over a driver that is late by order of the test."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.channels.protocol import EMPTY  # noqa: E402
from crossfade.device.events import EventPool  # noqa: E402
from crossfade.errors import ActorDiedError, ChannelBroken, ChannelClosed, DeviceError, Failure, TaskError  # noqa: E402
from tests.helpers.host_rings import LONG_US, home_on, open_ring  # noqa: E402
from tests.helpers.late_driver import LateDriver  # noqa: E402
from tests.helpers.waiting import take, until  # noqa: E402


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
        home, events = home_on(other), EventPool(other)
        ring.copies.homes = [home, ring.home]
        ring.copies._events[home.device] = events
        up = ring.home.up_stream
        late.hold(up)
        other.hold(home.up_stream)
        assert len(ring.copies.ends_of_copies()) == 2
        told: list[DeviceError | None] = []
        both = tuple(
            pool.at(stream, is_waited=True)
            for pool, stream in ((events, home.up_stream), (ring.copies.events(ring.home), up))
        )
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
        first = set(ring.writer.ring._slots._busy)
        assert ring.writer.try_write([torch.full((3000,), 3)])  # into another slot
        assert set(ring.writer.ring._slots._busy) > first
        late.let_go(up)
        assert ring.copies.poll()
        assert int(take(ring.reader)[0][-1]) == 3
        assert ring.writer.try_write([torch.full((3000,), 4)])  # the slot that was held is there again
        assert {*ring.writer.ring._slots._busy, *ring.writer.ring._slots._free} >= first
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
