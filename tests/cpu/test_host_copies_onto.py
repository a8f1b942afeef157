"""Values of the host that are brought to a device, over a driver that is late by order of the test."""

from __future__ import annotations

import gc
import os
import select
import subprocess
import sys
import threading
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.channels.protocol import EMPTY  # noqa: E402
from crossfade.device.events import EventPool  # noqa: E402
from crossfade.device.host_driver import HostDriver  # noqa: E402
from crossfade.errors import DeviceError, Failure  # noqa: E402
from tests.helpers.doers import Unpicklable  # noqa: E402
from tests.helpers.host_rings import LONG_US, Ring, home_on, open_ring, write  # noqa: E402
from tests.helpers.late_driver import LateDriver  # noqa: E402
from tests.helpers.waiting import take, until  # noqa: E402


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


def copy_later(ring: Ring, driver: LateDriver) -> tuple[Any, Any]:
    """A value that was read, and where a held stream is to copy it."""
    assert ring.writer.try_write(torch.full((1000,), 1))
    source: Any = ring.reader.try_read()
    target = torch.zeros(1000, dtype=torch.int64)
    driver.copy(target.data_ptr(), source.data_ptr(), 8000, 0)
    return source, target


def second_value(ring: Ring, driver: LateDriver) -> Any:
    """It waits for the slot of the first one until the stream is past what the program copies from there."""
    driver.hold(0)
    source, target = copy_later(ring, driver)
    del source
    assert ring.reader.statistics().num_kept == 1
    assert ring.writer.try_write(torch.full((1000,), 2))
    assert ring.reader.try_read() is EMPTY  # its share of slots is under way; nothing is copied out
    assert ring.copies.is_pending
    driver.let_go(0)
    assert ring.copies.poll()
    assert torch.equal(target, torch.full((1000,), 1))
    return ring.reader.try_read()


def test_a_view_that_died_holds_its_slot_until_the_stream_is_past_it(late: LateDriver) -> None:
    """The program may have enqueued a copy from it."""
    with open_ring(late, depth=1, writes_from_device=False, reads_onto="default", spin_us=LONG_US) as ring:
        assert torch.equal(second_value(ring, late), torch.full((1000,), 2))
        assert ring.reader.statistics().num_copied_out == 0


def test_a_view_that_died_holds_its_slot_until_each_device_of_the_process_is_past_it(late: LateDriver) -> None:
    """The program may have enqueued a copy to its second GPU, which is slower than the first."""
    with open_ring(late, depth=1, writes_from_device=False, reads_onto="default", spin_us=LONG_US) as ring:
        other = LateDriver()
        home, events = home_on(other), EventPool(other)
        slots = ring.reader.ring._slots
        slots._homes = [*slots._homes, (home, events)]
        view = second_value(ring, other)
        assert torch.equal(view, torch.full((1000,), 2))
        other.begin_capture(0)
        del view
        assert ring.reader.statistics().num_kept == 1
        other.destroy_graph(other.end_capture(0))
        assert ring.reader.statistics().num_kept == 0
        events.close()
        home.streams.close()
        home.pool.close()
    assert other.ledger.held() == []


def test_a_view_that_died_holds_its_slot_from_a_device_that_works_beside_one_that_does_not(late: LateDriver) -> None:
    """What is refused by one GPU of the process says nothing of what another one still reads."""
    with open_ring(late, depth=1, writes_from_device=False, reads_onto="default", spin_us=LONG_US) as ring:
        other = LateDriver()
        home, events = home_on(other), EventPool(other)
        slots = ring.reader.ring._slots
        slots._homes = [(home, events), *slots._homes]
        late.hold(0)
        for refuses_before in (False, True):
            source, target = copy_later(ring, late)
            if refuses_before:
                other.break_down(DeviceError("an illegal address"))
            del source
            other.break_down(DeviceError("an illegal address"))
            assert ring.reader.statistics().num_kept == 1
            late.let_go(0)
            assert torch.equal(target, torch.full((1000,), 1))
            assert ring.reader.statistics().num_kept == 0
            other.error = None
            late.hold(0)
        late.let_go(0)
        events.close()
        home.streams.close()
        home.pool.close()
    assert other.ledger.held() == []


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
        assert select.select([bell.event_fd], [], [], 10)[0]
        assert os.eventfd_read(bell.event_fd) >= 1
        assert int(ring.reader.try_read()[0]) == 1


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
        assert ring.reader.ring._slots.num_kept == 1
        ring.reader.carrier.collect()
        assert ring.reader.ring._slots.num_kept == 1
        late.destroy_graph(late.end_capture(0))
        assert ring.reader.statistics().num_kept == 0


def test_without_pinned_memory_values_are_read_all_the_same(late: LateDriver) -> None:
    late.max_pinned = 0
    for reads_onto in ("default", "cuda"):
        with open_ring(late, writes_from_device=False, reads_onto=reads_onto, spin_us=LONG_US) as ring:
            for number in range(5):
                assert ring.writer.try_write([torch.full((1000,), number)])
                assert int(ring.reader.try_read()[0][0]) == number


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
            assert ring.writer.try_write([torch.arange(1000), Unpicklable()])
            failure = ring.reader.try_read()
            assert isinstance(failure, Failure)
            del failure
            gc.collect()
            assert ring.reader.statistics().num_kept == 0


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
