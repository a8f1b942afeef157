"""Rings on the fake machine: keeping values, growing, closing, dying. (test_device_proof.py has all orders of steps.)"""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from crossfade.device.fake import FakeDriver, Machine, sample
from crossfade.device.fake.machine import Range
from crossfade.device.memory import Block, Pool
from crossfade.device.records import (
    Announced,
    ChunksEnqueued,
    ChunksFreeEnqueued,
    Enqueued,
    Finished,
    FreeEnqueued,
    Offer,
    Record,
    Refused,
    Retired,
    Wanted,
    pack,
    unpack,
)
from crossfade.device.ring import NUM_GROUPS, num_signals
from crossfade.device.ring_receiver import Lease, Leased, RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import BoardPart, HostBoard
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError, DeviceError
from crossfade.host.memory import Memory
from tests.helpers.device_worlds import RingWorld

SEEDS = range(50)


def test_values_that_are_kept_are_copied_out_when_leases_run_short() -> None:
    world = RingWorld(sizes_bytes=(16,) * 8, num_slots=3, num_kept=4)
    verdict = sample(world, SEEDS)
    assert verdict.is_ok, verdict
    assert world.num_copied_out > 0


def test_a_ring_grows_and_gives_the_old_slots_back() -> None:
    world = RingWorld(sizes_bytes=(16, 600, 16, 5_000, 600), num_kept=1)
    verdict = sample(world, SEEDS)
    assert verdict.is_ok, verdict
    assert world.num_generations == 3


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_a_ring_never_stops_when_values_of_ever_more_lengths_are_all_kept(num_slots: int) -> None:
    sizes_bytes = tuple(500 * 2**index for index in range(NUM_GROUPS + 4))
    world = RingWorld(sizes_bytes=sizes_bytes, num_slots=num_slots, num_kept=len(sizes_bytes))
    verdict = sample(world, range(20))
    assert verdict.is_ok, verdict
    assert world.num_copied_out > 0
    assert world.num_generations > NUM_GROUPS


RECORDS: list[Record] = [
    Enqueued(3, 1, 1 << 40),
    FreeEnqueued(2, 7),
    Wanted(12345),
    Offer(4, 2, 3, 1 << 33, bytes(range(64))),
    Retired(9, 1 << 35),
    Finished(),
    Refused(1 << 40, "kein Speicher für 3 GB"),
    Announced(0),
    ChunksEnqueued(5),
    ChunksFreeEnqueued(6),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_comes_back_from_its_bytes(record: Record) -> None:
    data = pack(record)
    assert len(data) <= 100
    assert unpack(data) == record
    for wrong in (data[:-1], data + b"x", b"\xff" + data[1:], b""):
        with pytest.raises(ChannelError):
            unpack(wrong)


class Ends:
    """A ring whose two ends the test drives by hand, records going over at once."""

    def __init__(self, num_slots: int = 2, slot_bytes: int = 512, *, is_delivering: bool = True) -> None:
        self.machine = Machine()
        self.driver = FakeDriver(self.machine, "process")
        self.pool = Pool(self.driver)
        memory = Memory.create("signals", 65536)
        board = HostBoard(self.driver, memory, num_signals(num_slots), "ring")
        self.to_sender: list[Record] = []
        self.to_receiver: list[Record] = []
        self.copies, self.use = self.driver.create_stream("copies"), self.driver.create_stream("use")
        self.receiver = RingReceiver(
            self.driver, self.pool, board, self.to_sender.append, "ring", num_slots=num_slots, slot_bytes=slot_bytes
        )
        self.sender = RingSender(self.driver, board, self.copies, self.to_receiver.append, "ring")
        self.source = self.pool.take(1, "source", "test").address
        if is_delivering:
            self.deliver()

    def deliver(self) -> None:
        while self.to_sender:
            self.sender.on_record(self.to_sender.pop(0))

    def accept_all(self) -> list[Lease]:
        """The receiver takes what was told: leases on the values."""
        records, self.to_receiver[:] = list(self.to_receiver), []
        leases = []
        for record in records:
            if isinstance(record, Enqueued):
                leases.append(self.receiver.accept(record, self.use))
            else:
                self.receiver.on_record(record)
        return leases

    def run(self) -> None:
        """Lets the device do all that it can."""
        machine = self.machine
        while ready := [name for name, queue in machine.queues.items() if queue and machine.can_run(queue[0])]:
            machine.run(ready[0])


def grow(ends: Ends, size_bytes: int) -> None:
    """Sends a value of this length, of which no byte is copied; the ring gets longer where it has to."""
    ends.driver.copy = lambda *args: None  # type: ignore[method-assign]
    block = Pool(ends.driver).take(size_bytes, "source", "test")
    for _ in range(6):
        if ends.sender.try_send(block.address, size_bytes):
            break
        ends.accept_all()
        ends.deliver()
        ends.run()
    for lease in ends.accept_all():
        lease.release()
    ends.run()
    ends.deliver()
    ends.sender.collect()
    ends.accept_all()
    ends.receiver.collect()


def test_values_that_grow_slowly_for_long_do_not_hold_many_times_their_length() -> None:
    ends, size_bytes = Ends(slot_bytes=16 << 20), 16 << 20
    while size_bytes < 1 << 30:
        size_bytes += size_bytes // 50
        grow(ends, size_bytes)
    assert ends.receiver.statistics().slot_bytes <= size_bytes * 1.5
    assert ends.pool.used_bytes + ends.pool.idle_bytes < 2 * size_bytes * 4
    assert ends.receiver.statistics().num_generations < 15


def test_where_memory_is_short_slots_are_only_a_little_longer_than_the_value() -> None:
    ends = Ends(slot_bytes=16 << 20)
    grow(ends, 20 << 20)
    allocate, asked = ends.driver.allocate, []

    def allocate_little(size_bytes: int, label: str) -> int:
        asked.append(size_bytes)
        if size_bytes > 60 << 20:
            raise DeviceError("no memory")
        return allocate(size_bytes, label)

    ends.driver.allocate = allocate_little  # type: ignore[method-assign]
    ends.pool.take(1, "something else", "test").drop("test")
    assert ends.pool.idle_bytes
    grow(ends, 24 << 20)
    assert ends.pool.idle_bytes, "nobody had to give memory back for a wish"
    assert ends.receiver.statistics().slot_bytes == 27 << 20
    assert asked[-1] == 54 << 20 < max(asked)
    with pytest.raises(DeviceError, match="no memory"):
        grow(ends, 40 << 20)
    assert ends.receiver.statistics().num_generations == 3


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
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
    (record,) = [record for record in ends.to_receiver if isinstance(record, Enqueued)]
    with pytest.raises(KeyboardInterrupt):
        ends.receiver.accept_at(record.generation, record.slot, record.size_bytes, ends.use, Unmade)
    gc.collect()
    assert unraised == []
    assert ends.receiver.statistics().num_leased == 0
    assert [record for record in ends.to_sender if isinstance(record, FreeEnqueued)] == []
    ends.accept_all()[0].release()


def test_ch2_closed_and_broken_are_different_errors() -> None:
    ends = Ends()
    ends.sender.break_off("the receiver died")
    with pytest.raises(ChannelBroken, match="the receiver died"):
        ends.sender.try_send(ends.source, 8)
    ends.receiver.close()
    with pytest.raises(ChannelClosed):
        ends.receiver.accept(Enqueued(0, 0, 8), ends.use)


def test_a_sender_does_not_close_while_copies_are_under_way() -> None:
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
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


def test_the_slots_of_a_dead_sender_come_back_when_the_last_lease_ends() -> None:
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
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
    ends.run()
    ends.receiver.collect()
    assert ends.receiver.is_empty
    assert ends.driver.ledger.held("lease") == []


def test_who_gives_up_for_somebody_else_s_death_waits_for_a_sender_that_lives() -> None:
    """It may still be copying into slots of which this side has heard nothing."""
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
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
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
    ends.receiver.give_up("a third one died")
    ends.receiver.break_off("the sender died")
    ends.receiver.collect()
    assert ends.receiver.is_empty
    ends.run()
    ends.sender.give_up("a third one died")
    ends.sender.break_off("the receiver died")
    ends.sender.close()
    assert [type(record) for record in ends.to_receiver] == [Enqueued]


def test_values_that_nobody_accepted_do_not_hold_the_slots() -> None:
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
    ends.run()
    ends.sender.close()
    ends.receiver.close()
    for record in ends.to_receiver:
        if isinstance(record, Retired):
            ends.receiver.on_record(record)
    assert ends.receiver.is_empty


def test_growth_stops_when_values_of_every_generation_are_kept_and_goes_on_when_one_ends() -> None:
    ends = Ends()
    leases = []
    for generation in range(NUM_GROUPS):
        size_bytes = 512 * 2**generation
        block = ends.pool.take(size_bytes, "source", "test")
        assert ends.sender.try_send(block.address, size_bytes)
        leases += ends.accept_all()
        ends.run()
        assert not ends.sender.try_send(block.address, size_bytes * 2)
        assert ends.accept_all() == []
        ends.deliver()
        ends.sender.collect()
        ends.run()
        ends.sender.collect()
    assert ends.receiver.statistics().num_generations == NUM_GROUPS
    assert ends.receiver.statistics().num_leased == NUM_GROUPS
    leases[0].release()
    ends.run()
    ends.accept_all()
    ends.receiver.collect()
    assert ends.receiver.statistics().num_generations == NUM_GROUPS + 1


def test_a_ring_needs_enough_signals() -> None:
    machine = Machine()
    driver = FakeDriver(machine, "process")
    board = HostBoard(driver, Memory.create("signals", 4096), 3, "ring")
    with pytest.raises(ValueError, match="32"):
        RingReceiver(driver, Pool(driver), board, lambda record: None, "ring", num_slots=2, slot_bytes=512)


def finish_receiver(ends: Ends) -> None:
    """Both sides are closed: what the receiver is told then gives all slots back."""
    ends.run()
    ends.receiver.close()
    assert ends.accept_all() == []
    ends.receiver.collect()
    assert ends.receiver.is_empty
    assert ends.driver.ledger.held("event") == ends.driver.ledger.held("opened") == []


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
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
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


def test_a_lease_may_end_in_another_thread_while_the_slots_are_collected() -> None:
    """The end of a ring, seen by `collect` at every step of a lease's end: it never takes the slots before the use is noted."""
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
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
    ends.run()
    ends.receiver.collect()
    assert ends.receiver.is_empty


def test_an_end_without_slots_gives_back_what_its_close_took() -> None:
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
    ends.accept_all()[0].release()
    ends.deliver()
    ends.run()
    ends.sender.close()
    ends.accept_all()
    assert ends.receiver.statistics().slot_bytes == 0, "there are slots left"
    ends.receiver.close()
    while not ends.receiver.is_empty:
        ends.receiver.collect()
    assert ends.driver.ledger.held("event") == []


def test_slots_are_not_given_back_while_the_end_is_being_noted() -> None:
    """A watchdog's thread breaks the ring off; the other thread collects before the last uses are noted."""
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
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
    ends.run()
    ends.receiver.collect()
    assert ends.receiver.is_empty


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


def test_a_ring_may_begin_without_slots() -> None:
    ends = Ends(slot_bytes=0)
    assert ends.receiver.is_empty
    assert ends.sender.next_place is None
    assert not ends.sender.try_send(ends.source, 0)
    assert not ends.sender.try_send(ends.source, 0)
    assert ends.to_receiver == [Wanted(1)], "it asks once"
    ends.accept_all()
    ends.deliver()
    assert ends.sender.try_send(ends.source, 8)
    ends.accept_all()[0].release()
    ends.run()
    ends.sender.close()
    ends.accept_all()
    finish_receiver(ends)


def test_what_is_wanted_while_it_is_being_offered_is_offered_once() -> None:
    ends = Ends(is_delivering=False)
    assert not ends.sender.try_send(ends.source, 100)
    ends.accept_all()
    ends.deliver()
    assert ends.receiver.statistics().num_generations == 1
    assert ends.sender.try_send(ends.source, 100)


def test_where_there_is_no_memory_the_value_is_refused_and_the_ring_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    take = ends.pool.take

    def refuse(size_bytes: int, label: str, user: str, *, gives_back: bool) -> Block:
        if size_bytes > 1_000_000:
            raise DeviceError("out of memory")
        return take(size_bytes, label, user, gives_back=gives_back)

    monkeypatch.setattr(ends.pool, "take", refuse)
    for _ in range(2):
        assert not ends.sender.try_send(ends.source, 2_000_000)
        ends.accept_all()
        ends.deliver()
        with pytest.raises(DeviceError, match=r"no memory for slots of 2000000 bytes: out of memory\nhint: "):
            ends.sender.try_send(ends.source, 2_000_000)
        assert ends.sender.try_send(ends.source, 8)
        ends.accept_all()[0].release()
        ends.deliver()
    assert not ends.sender.try_send(ends.source, 2_000_000)
    ends.accept_all()
    ends.deliver()
    assert not ends.sender.try_send(ends.source, 5_000), "what is shorter than what was refused is asked for"
    ends.accept_all()
    ends.deliver()
    assert ends.sender.try_send(ends.source, 5_000)


def test_slots_that_cannot_be_opened_end_the_ring_and_all_slots_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
    assert not ends.sender.try_send(ends.source, 5_000)

    def refuse(handle: bytes, label: str) -> int:
        raise DeviceError("out of address space")

    monkeypatch.setattr(ends.driver, "open_handle", refuse)
    leases = ends.accept_all()
    with pytest.raises(DeviceError, match="its slots cannot be opened: out of address space"):
        ends.deliver()
    assert not ends.sender.is_growing
    with pytest.raises(ChannelBroken, match="its slots cannot be opened: out of address space"):
        ends.sender.try_send(ends.source, 8)
    ends.run()
    ends.sender.close()
    for lease in leases:
        lease.release()
    finish_receiver(ends)


def test_the_last_records_of_the_dead_may_come_when_their_slots_are_given_back() -> None:
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
    ends.accept_all()[0].release()
    ends.deliver()
    ends.run()
    ends.sender.close()
    ends.receiver.break_off("the sender died")
    ends.run()
    ends.receiver.collect()
    assert ends.receiver.is_empty
    assert ends.accept_all() == []
    assert ends.receiver.is_empty


@pytest.mark.timeout(20)
def test_slots_are_not_offered_anew_before_the_credit_of_their_last_lease_is_back() -> None:
    """The lease ends in one thread, and its ring is collected in another."""
    ends = Ends()
    assert ends.sender.try_send(ends.source, 8)
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
    first, second = BoardPart(board, 0, 4), BoardPart(board, 4, 6)
    second.signal(1, "x").release()
    first.poke(3, 7)
    assert [board.peek(index) for index in range(10)] == [0, 0, 0, 7, 0, 1, 0, 0, 0, 0]
    assert (first.peek(3), second.peek(1)) == (7, 1)
    assert second.counter(5, "y").has(0)
    with pytest.raises(ValueError, match="signals 4 to 11 of a row of 10"):
        BoardPart(board, 4, 7)


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
        ends.accept_all()[0].release()
        ends.deliver()
        ends.run()
    ends.driver.destroy_graph(graph)


@pytest.mark.timeout(20)
def test_a_lease_that_two_threads_end_ends_once() -> None:
    ends = Ends(num_slots=1)
    for _ in range(200):
        assert ends.sender.try_send(ends.source, 8)
        (lease,) = ends.accept_all()
        threads = [threading.Thread(target=lease.release) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [type(record) for record in ends.to_sender] == [FreeEnqueued]
        ends.deliver()
        ends.run()
