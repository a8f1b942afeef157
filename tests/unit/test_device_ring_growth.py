"""Rings on the fake machine that grow, or cannot: longer slots, wishes and offers."""

from __future__ import annotations

from typing import Any

import pytest

from crossfade.device.driver import OwnerGone
from crossfade.device.memory import Block
from crossfade.device.records import Wanted
from crossfade.device.ring import NUM_GROUPS
from crossfade.errors import ChannelBroken, DeviceError
from tests.helpers.ring_ends import Ends, finish_receiver, grow, one_sent
from tests.helpers.worlds.kit import assert_sound
from tests.helpers.worlds.rings import RingWorld

SEEDS = range(50)


def test_a_ring_grows_and_gives_the_old_slots_back() -> None:
    world = RingWorld(sizes_bytes=(16, 600, 16, 5_000, 600), num_kept=1)
    assert_sound(world, SEEDS)
    assert world.num_generations == 3


@pytest.mark.parametrize("num_slots", [1, 2, 4])
def test_a_ring_never_stops_when_values_of_ever_more_lengths_are_all_kept(num_slots: int) -> None:
    sizes_bytes = tuple(500 * 2**index for index in range(NUM_GROUPS + 4))
    world = RingWorld(sizes_bytes=sizes_bytes, num_slots=num_slots, num_kept=len(sizes_bytes))
    assert_sound(world, range(20))
    assert world.num_copied_out > 0
    assert world.num_generations > NUM_GROUPS


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
    ends.pool.take(1, "something else", "test").release()
    assert ends.pool.idle_bytes
    grow(ends, 24 << 20)
    assert ends.pool.idle_bytes, "nobody had to give memory back for a wish"
    assert ends.receiver.statistics().slot_bytes == 27 << 20
    assert asked[-1] == 54 << 20 < max(asked)
    with pytest.raises(DeviceError, match="no memory"):
        grow(ends, 40 << 20)
    assert ends.receiver.statistics().num_generations == 3


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


def refused(monkeypatch: pytest.MonkeyPatch, error: DeviceError) -> tuple[Ends, list[Any]]:
    """A ring whose sender has asked for larger slots, which it will not be able to open; and what had come before."""
    ends = one_sent()
    assert not ends.sender.try_send(ends.source, 5_000)

    def refuse(handle: bytes, label: str) -> int:
        raise error

    monkeypatch.setattr(ends.driver, "open_handle", refuse)
    return ends, list(ends.accept_all())


def test_slots_of_a_receiver_that_dies_are_waited_for_until_its_death_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its death is the error, and not what came of it first."""
    ends, leases = refused(monkeypatch, OwnerGone("there is no such file"))
    ends.deliver()
    assert not ends.sender.try_send(ends.source, 5_000)
    ends.sender.break_off("it died")
    with pytest.raises(ChannelBroken, match="it died"):
        ends.sender.try_send(ends.source, 8)
    ends.run()
    ends.sender.close()
    for lease in leases:
        lease.release()


def test_slots_that_cannot_be_opened_end_the_ring_and_all_slots_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, leases = refused(monkeypatch, DeviceError("out of address space"))
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
