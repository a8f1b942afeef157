"""Rings on the fake machine: closing, dying, sharing. (test_device_proof.py has all orders of steps.)"""

from __future__ import annotations

import ctypes
import time

import pytest

from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued, Finished, Offer, Record, Retired
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import HostBoard
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError
from crossfade.host.memory import Memory
from crossfade.plan.actions import Action, Verb
from crossfade.plan.device_streams import DeviceStream
from crossfade.runtime.device_record import DeviceRecorder
from crossfade.runtime.record import Recorder
from crossfade.testing.fake import FakeDriver, Machine
from crossfade.testing.fake.machine import Range
from tests.helpers.ring_ends import Ends, finish_receiver, one_sent


def test_ch2_closed_and_broken_are_different_errors() -> None:
    ends = Ends()
    ends.sender.break_off("the receiver died")
    with pytest.raises(ChannelBroken, match="the receiver died"):
        ends.sender.try_send(ends.source, 8)
    ends.receiver.close()
    with pytest.raises(ChannelClosed):
        ends.receiver.accept(Enqueued(0, 0, 8), ends.use)


def test_a_sender_does_not_close_while_copies_are_under_way() -> None:
    ends = one_sent()
    with pytest.raises(ChannelError, match="under way"):
        ends.sender.close()
    ends.run()
    ends.sender.close()
    with pytest.raises(ChannelClosed):
        ends.sender.try_send(ends.source, 8)


def test_what_a_copy_reads_is_kept_until_it_is_done() -> None:
    ends = Ends()

    class Value:
        dropped = 0

        def __del__(self) -> None:
            Value.dropped += 1

    assert ends.sender.try_send(ends.source, 8, keep=Value())
    ends.sender.collect()
    assert Value.dropped == 0
    ends.run()
    ends.sender.collect()
    assert Value.dropped == 1
    ends.sender.close()
    for lease in ends.accept_all():
        lease.release()
    finish_receiver(ends)


def test_who_gives_up_for_somebody_else_s_death_waits_for_a_sender_that_lives() -> None:
    """It may still be copying into slots of which this side has heard nothing."""
    ends = one_sent()
    ends.receiver.give_up("a third one died")
    with pytest.raises(ChannelBroken, match="a third one died"):
        ends.receiver.accept(Enqueued(0, 0, 8), ends.use)
    ends.receiver.collect()
    assert not ends.receiver.is_empty, "the copy has not run"
    ends.run()
    ends.sender.give_up("a third one died")
    with pytest.raises(ChannelBroken, match="a third one died"):
        ends.sender.try_send(ends.source, 8)
    ends.sender.close()
    ends.sender.close()
    assert [type(record) for record in ends.to_receiver] == [Enqueued, Retired, Finished]
    for record in ends.to_receiver[1:]:
        ends.receiver.on_record(record)
    assert ends.receiver.is_empty


def test_who_has_given_up_does_not_wait_for_a_sender_that_dies_afterwards() -> None:
    ends = one_sent()
    ends.receiver.give_up("a third one died")
    ends.receiver.break_off("the sender died")
    ends.receiver.collect()
    assert ends.receiver.is_empty
    ends.run()
    ends.sender.give_up("a third one died")
    ends.sender.break_off("the receiver died")
    ends.sender.close()
    assert [type(record) for record in ends.to_receiver] == [Enqueued]


def test_a_ring_needs_enough_signals() -> None:
    machine = Machine()
    driver = FakeDriver(machine, "process")
    board = HostBoard(driver, Memory.create("signals", 4096), 3, "ring")
    with pytest.raises(ValueError, match="32"):
        RingReceiver(driver, Pool(driver), board, lambda record: None, "ring", num_slots=2, slot_bytes=512)


def test_a_sender_may_close_before_it_has_taken_what_it_asked_for() -> None:
    ends = Ends()
    assert not ends.sender.try_send(ends.source, 5_000)
    ends.accept_all()
    ends.sender.close()
    ends.deliver()
    assert ends.receiver.statistics().num_generations == 2
    finish_receiver(ends)


def test_a_sender_may_close_before_it_has_taken_any_offer() -> None:
    ends = Ends(is_delivering=False)
    ends.sender.close()
    ends.deliver()
    finish_receiver(ends)


def test_nothing_is_offered_to_a_sender_that_has_closed() -> None:
    ends = Ends()
    assert not ends.sender.try_send(ends.source, 5_000)
    ends.sender.close()
    ends.accept_all()
    finish_receiver(ends)
    assert ends.driver.ledger.held("lease") == []


def test_a_sender_closes_though_others_go_on_with_its_stream() -> None:
    ends = one_sent()
    ends.run()
    blocked = ends.driver.create_event()
    signal = HostBoard(ends.driver, Memory.create("signals", 4096), 1, "other").signal(0, "another's")
    signal.set(ends.use)
    assert ends.sender.try_send(ends.source, 8)
    assert not ends.sender.is_done
    signal.wait(ends.copies)
    ends.driver.record_event(blocked, ends.copies)
    queues = ends.machine.queues
    copies = next(name for name, queue in queues.items() if queue and queue[0].stream.endswith("copies"))
    while queues[copies] and "another's" not in queues[copies][0].label:
        ends.machine.run(copies)
    assert not ends.driver.is_idle(ends.copies)
    assert ends.sender.is_done
    ends.sender.close()


def test_an_end_without_slots_gives_back_what_its_close_took() -> None:
    ends = one_sent()
    ends.use_one()
    ends.sender.close()
    ends.accept_all()
    assert ends.receiver.statistics().slot_bytes == 0, "there are slots left"
    ends.receiver.close()
    while not ends.receiver.is_empty:
        ends.receiver.collect()
    assert ends.driver.ledger.held("event") == []


def test_a_value_in_several_places_goes_into_one_slot() -> None:
    ends = Ends(num_slots=2)
    other = ends.pool.take(1, "other", "test").address
    for address, content in ((ends.source, b"a" * 300), (other, b"b" * 100)):
        ends.driver.kernel(ends.copies, "make", writes=((address, content),))
    assert ends.sender.next_place == (0, 0)
    assert ends.sender.try_send_parts([(0, ends.source, 100), (256, other, 100), (356, ends.source + 100, 50)])
    assert ends.sender.next_place == (0, 1)
    assert ends.sender.try_send_parts([])
    assert ends.sender.next_place is None
    assert not ends.sender.try_send_parts([(0, other, 8)])
    seen: list[bytes] = []
    lease, empty = ends.accept_all()
    assert (lease.size_bytes, empty.size_bytes) == (406, 0)
    ranges = (Range(lease.address, 100), Range(lease.address + 256, 150))
    ends.driver.kernel(ends.use, "use", reads=ranges, seen=seen)
    ends.run()
    assert seen == [b"a" * 100, b"b" * 100 + b"a" * 50]
    assert ends.sender.statistics().num_bytes == 406


def test_the_last_records_of_the_dead_may_come_when_their_slots_are_given_back() -> None:
    ends = one_sent()
    ends.use_one()
    ends.sender.close()
    ends.receiver.break_off("the sender died")
    assert ends.is_given_back()
    assert ends.accept_all() == []
    assert ends.receiver.is_empty


def test_sources_are_let_go_of_before_the_receiver_may_use_their_slots_counters_anew() -> None:
    """The device gets so far between the look at the sources and the look at the slots."""
    ends = Ends()

    class Value:
        is_alive = True

        def __del__(self) -> None:
            Value.is_alive = False

    assert ends.sender.try_send(ends.source, 8, keep=Value())
    assert not ends.sender.try_send(ends.source, 5_000)
    leases = ends.accept_all()
    ends.deliver()
    has_happened, seen = ends.driver.has_happened, []

    def happens(event: int) -> bool:
        ends.run()
        return bool(has_happened(event))

    def tell(record: Record) -> None:
        seen.append((type(record), Value.is_alive))
        ends.to_receiver.append(record)

    ends.driver.has_happened = happens  # type: ignore[method-assign]
    ends.sender._tell = tell
    ends.sender.collect()
    assert seen == [(Retired, False)]
    assert leases


def test_a_board_may_be_shared_by_rings() -> None:
    driver = FakeDriver(Machine(), "process")
    board = HostBoard(driver, Memory.create("signals", 4096), 10, "row")
    first, second = board.part(0, 4), board.part(4, 6)
    second.signal(1, "x").release()
    first.poke(3, 7)
    assert [board.peek(index) for index in range(10)] == [0, 0, 0, 7, 0, 1, 0, 0, 0, 0]
    assert (first.peek(3), second.peek(1)) == (7, 1)
    assert second.counter(5, "y").has(0)
    with pytest.raises(ValueError, match="signals 4 to 11 of a row of 10"):
        board.part(4, 7)


def test_a_ring_tells_of_its_copies_and_not_of_what_they_wait_for() -> None:
    driver, recorder = HostDriver(1.0), Recorder("A", time.monotonic_ns())
    device = DeviceRecorder(driver, recorder, max_spans=4)
    memory, pool = Memory.create("signals", 1 << 16), Pool(driver)
    board = HostBoard(driver, memory, num_signals(2), "ring")
    to_sender: list[Record] = []
    receiver = RingReceiver(driver, pool, board, to_sender.append, "ring", slot_bytes=1 << 20)
    sender = RingSender(driver, board, 0, lambda record: None, "ring")
    sender.on_record(next(record for record in to_sender if isinstance(record, Offer)))
    sender.around = device.around(DeviceStream.PUSH, Action(Verb.WRITE, "n0"), "n0")
    source = ctypes.create_string_buffer(1 << 20)
    for execution in range(2):
        recorder.round.number = execution
        assert sender.try_send(ctypes.addressof(source), 1 << 20)
    assert not sender.try_send(ctypes.addressof(source), 1 << 20)
    spans = device.spans()
    assert [(span.stream, span.execution, span.size_bytes) for span in spans] == [("push", n, 1 << 20) for n in (0, 1)]
    assert all(span.duration_us > 0 for span in spans)
    sender.close()
    receiver.break_off("the test is over")
    receiver.collect()
    device.close()
    board.close()
    pool.close()
    memory.close()
    assert driver.ledger.held() == []
