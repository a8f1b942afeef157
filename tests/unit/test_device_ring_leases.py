"""Rings on the fake machine: values that are kept, and where their leases end."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from crossfade.device.records import Enqueued, FreeEnqueued, Record, Retired
from crossfade.device.ring_receiver import Leased
from crossfade.errors import ChannelBroken, DeviceError
from tests.helpers.ring_ends import Ends, one_sent
from tests.helpers.threads import together
from tests.helpers.worlds.kit import assert_sound
from tests.helpers.worlds.rings import RingWorld

SEEDS = range(50)


def test_values_that_are_kept_are_copied_out_when_leases_run_short() -> None:
    world = RingWorld(sizes_bytes=(16,) * 8, num_slots=3, num_kept=4)
    assert_sound(world, SEEDS)
    assert world.num_copied_out > 0


def test_a_ring_that_ends_as_it_collects_gives_no_lease() -> None:
    ends = Ends()
    for _ in range(2):
        assert ends.sender.try_send(ends.source, 8)
    first, second = [record for record in ends.to_receiver if isinstance(record, Enqueued)]
    lease = ends.receiver.accept(first, ends.use)
    ends.driver.begin_capture(ends.use)
    lease.release()
    ends.driver.destroy_graph(ends.driver.end_capture(ends.use))

    def refuse(stream: int, address: int, value: int) -> None:
        raise DeviceError("the device is gone")

    ends.driver.write_value = refuse  # type: ignore[method-assign]
    with pytest.raises(ChannelBroken, match="the device is gone"):
        ends.receiver.accept(second, ends.use)
    assert ends.receiver.statistics().num_leased == 0
    assert ends.driver.ledger.held("lease") == []


def test_a_lease_dies_before_it_has_a_slot_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    class Unmade(Leased):
        __slots__ = ()

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            raise KeyboardInterrupt

    unraised: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", unraised.append)
    ends = one_sent()
    (record,) = [record for record in ends.to_receiver if isinstance(record, Enqueued)]
    with pytest.raises(KeyboardInterrupt):
        ends.receiver.accept_at(record.generation, record.slot, record.size_bytes, ends.use, Unmade)
    gc.collect()
    assert unraised == []
    assert ends.receiver.statistics().num_leased == 0
    assert [record for record in ends.to_sender if isinstance(record, FreeEnqueued)] == []
    ends.accept_all()[0].release()


def test_the_slots_of_a_dead_sender_come_back_when_the_last_lease_ends() -> None:
    ends = one_sent()
    record = ends.to_receiver.pop(0)
    assert isinstance(record, Enqueued)
    lease = ends.receiver.accept(record, ends.use)
    ends.receiver.break_off("the sender died")
    ends.run()
    ends.receiver.collect()
    assert not ends.receiver.is_empty
    lease.release()
    lease.release()
    ends.receiver.collect()
    assert not ends.receiver.is_empty, "the last use has not run"
    assert ends.is_given_back()
    assert ends.driver.ledger.held("lease") == []


def test_values_that_nobody_accepted_do_not_hold_the_slots() -> None:
    ends = one_sent()
    ends.run()
    ends.sender.close()
    ends.receiver.close()
    for record in ends.to_receiver:
        if isinstance(record, Retired):
            ends.receiver.on_record(record)
    assert ends.receiver.is_empty


def test_a_lease_may_end_in_another_thread_while_the_slots_are_collected() -> None:
    """The end of a ring, seen by `collect` at every step of a lease's end: it never takes the slots before the use is noted."""
    ends = one_sent()
    (lease,) = ends.accept_all()
    ends.run()
    ends.receiver.break_off("the sender died")
    ends.run()
    enqueue = ends.driver._enqueue

    def look_first(stream: int, label: str, **rest: object) -> None:
        ends.receiver.collect()
        assert not ends.receiver.is_empty, f"given back before '{label}'"
        enqueue(stream, label, **rest)
        ends.receiver.collect()
        assert not ends.receiver.is_empty, f"given back behind '{label}'"

    ends.driver._enqueue = look_first  # type: ignore[method-assign]
    lease.release()
    ends.receiver.collect()
    assert not ends.receiver.is_empty
    assert ends.is_given_back()


def test_slots_are_not_given_back_while_the_end_is_being_noted() -> None:
    """A watchdog's thread breaks the ring off; the other thread collects before the last uses are noted."""
    ends = one_sent()
    (lease,) = ends.accept_all()
    ends.run()
    ends.driver.kernel(ends.use, "the last use")
    lease.release()
    ends.sender.close()
    ends.accept_all()
    assert not ends.receiver.is_empty
    mark = ends.receiver._mark

    def look_first(stream: int) -> None:
        ends.receiver.collect()
        assert not ends.receiver.is_empty
        mark(stream)

    ends.receiver._mark = look_first  # type: ignore[method-assign]
    ends.receiver.break_off("the sender died")
    ends.receiver.collect()
    assert not ends.receiver.is_empty, "the last use has not run"
    assert ends.is_given_back()


@pytest.mark.timeout(20)
def test_slots_are_not_offered_anew_before_the_credit_of_their_last_lease_is_back() -> None:
    """The lease ends in one thread, and its ring is collected in another."""
    ends = one_sent()
    (lease,) = ends.accept_all()
    assert not ends.sender.try_send(ends.source, 5_000)
    ends.accept_all()
    ends.deliver()
    ends.run()
    ends.sender.collect()
    ends.accept_all()
    tell, collector = ends.receiver._tell, threading.Thread(target=ends.receiver.collect)
    left: list[int] = []

    def tell_late(record: Record) -> None:
        ends.run()
        collector.start()
        collector.join(0.1)
        left.extend(ends.receiver._generations)
        tell(record)

    ends.receiver._tell = tell_late
    lease.release()
    assert left == [0, 1]
    collector.join(10)
    assert list(ends.receiver._generations) == [1]


def test_a_lease_that_ends_within_a_capture_ends_behind_it() -> None:
    """In the graph, ``free`` would be set at each replay, and not before the first."""
    ends = Ends(num_slots=2)
    assert ends.sender.try_send(ends.source, 8)
    assert ends.sender.try_send(ends.source, 8)
    first, second = ends.accept_all()
    ends.driver.begin_capture(ends.use)
    assert ends.driver.is_capturing(ends.use)
    assert not ends.driver.is_capturing(ends.copies)
    first.release()
    first.release()
    ends.receiver.collect()
    assert ends.to_sender == []
    assert ends.receiver.statistics().num_leased == 2
    graph = ends.driver.end_capture(ends.use)
    second.release()
    ends.receiver.collect()
    ends.receiver.collect()
    assert ends.to_sender == [FreeEnqueued(0, 1), FreeEnqueued(0, 0)]
    ends.deliver()
    ends.run()
    for _ in range(3):
        ends.driver.launch(graph, ends.use)
        assert ends.sender.try_send(ends.source, 8)
        ends.use_one()
    ends.driver.destroy_graph(graph)


@pytest.mark.timeout(20)
def test_a_lease_that_two_threads_end_ends_once() -> None:
    ends = Ends(num_slots=1)
    for _ in range(200):
        assert ends.sender.try_send(ends.source, 8)
        (lease,) = ends.accept_all()
        together(lambda _, lease=lease: lease.release(), range(2))  # type: ignore[misc]
        assert [type(record) for record in ends.to_sender] == [FreeEnqueued]
        ends.deliver()
        ends.run()
