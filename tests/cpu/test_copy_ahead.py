"""Records of the copy-engine channel that are published before the copies are enqueued: who is early, and who dies between."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.channels.protocol import EMPTY  # noqa: E402
from crossfade.channels.ring_layout import REPLACED  # noqa: E402
from crossfade.edges import by_copies_in  # noqa: E402
from crossfade.errors import ChannelBroken, ChannelError, DeviceError, Failure  # noqa: E402
from tests.helpers.builds import interpreted_only  # noqa: E402
from tests.helpers.copy_pair import lose, open_copy_ends, settle  # noqa: E402

open_copy: Any = open_copy_ends


@pytest.fixture
def pair() -> Iterator[tuple[Any, list[Any]]]:
    """A writer and two readers through which one value has gone."""
    with open_copy(2, 2) as (writer, readers):
        while not writer.try_write(torch.arange(4)):
            for end in (writer, *readers):
                end.carrier.progress()
        assert [reader.try_read().sum() for reader in readers] == [6, 6]
        yield writer, readers


def between(writer: Any, act: Callable[[], None]) -> None:
    """Calls ``act`` once, when the record is published and the first copy is about to be enqueued."""
    driver = writer.carrier.homes[0].driver
    copy = driver.copy

    def act_first(*args: Any) -> None:
        driver.copy = copy
        act()
        driver.copy(*args)

    driver.copy = act_first


def test_a_reader_that_is_early_prepares_and_waits(pair: tuple[Any, list[Any]]) -> None:
    writer, readers = pair
    seen: list[Any] = []

    def read_early() -> None:
        for _ in range(3):
            seen.append(readers[0].try_read())
            assert not readers[0].is_idle()  # so its loop goes on looking
        assert readers[0].statistics().num_kept == 1

    between(writer, read_early)
    assert writer.try_write(torch.arange(5))
    assert seen == [EMPTY] * 3
    values = [reader.try_read() for reader in readers]
    assert [value.tolist() for value in values] == [[0, 1, 2, 3, 4]] * 2
    assert [reader.try_read() for reader in readers] == [EMPTY] * 2
    assert [reader.statistics().num_values for reader in readers] == [2, 2]
    del values
    assert [reader.statistics().num_kept for reader in readers] == [0, 0]


def test_values_of_any_kind_follow_one_that_was_read_early(pair: tuple[Any, list[Any]]) -> None:
    writer, readers = pair
    between(writer, lambda: _is_empty(readers[0]))
    assert writer.try_write(torch.arange(5))
    assert writer.try_write("a message")
    for expected in ([0, 1, 2, 3, 4], "a message"):
        for reader in readers:
            value = reader.try_read()
            assert (value if isinstance(value, str) else value.tolist()) == expected


def _is_empty(reader: Any) -> None:
    assert reader.try_read() is EMPTY


@pytest.mark.parametrize("is_early", [True, False])
def test_a_reader_that_prepared_gets_the_error_of_a_copy_that_was_refused(
    pair: tuple[Any, list[Any]], is_early: bool
) -> None:
    writer, readers = pair

    def refuse() -> None:
        if is_early:
            _is_empty(readers[0])
        raise DeviceError("an illegal address")

    between(writer, refuse)
    assert writer.try_write(torch.arange(5))
    for reader in readers:
        failure = next(value for _ in range(3) if (value := reader.try_read()) is not EMPTY)
        assert type(failure) is Failure
        with pytest.raises(DeviceError, match="a copy could not be enqueued: an illegal address"):
            raise failure.to_error()
    with pytest.raises(ChannelBroken, match="an illegal address"):
        writer.try_write(torch.arange(3))
    writer.end()
    with pytest.raises(ChannelError):
        readers[0].try_read()
    assert readers[0].statistics().num_kept == 0


def test_an_interrupt_in_the_middle_leaves_no_reader_waiting(pair: tuple[Any, list[Any]]) -> None:
    writer, readers = pair

    def interrupt() -> None:
        _is_empty(readers[0])
        raise KeyboardInterrupt

    between(writer, interrupt)
    with pytest.raises(KeyboardInterrupt):
        writer.try_write(torch.arange(5))
    failure = next(value for _ in range(3) if (value := readers[0].try_read()) is not EMPTY)
    assert type(failure) is Failure
    with pytest.raises(ChannelBroken):
        writer.try_write(torch.arange(3))


def test_a_writer_that_dies_in_between_gives_nothing_out_and_the_slot_comes_back(pair: tuple[Any, list[Any]]) -> None:
    writer, readers = pair
    writer.carrier.lanes[0].tell_enqueued = lambda: None
    writer.carrier.tells_from[0][0] = (lambda: None, *writer.carrier.tells_from[0][0][1:])
    assert writer.try_write(torch.arange(5))
    _is_empty(readers[0])
    assert readers[0].statistics().num_kept == 1
    readers[0].break_off("the writer died")
    with pytest.raises(ChannelBroken, match="the writer died"):
        readers[0].try_read()
    assert readers[0].statistics().num_kept == 0
    readers[1].break_off("the writer died")
    lose(writer, 0, "the reader ended")
    lose(writer, 1, "the reader ended")
    for reader in readers:
        reader.close()
    settle([writer, *readers])


def test_a_reader_that_closes_in_between_gives_the_slot_back(pair: tuple[Any, list[Any]]) -> None:
    writer, readers = pair

    def close() -> None:
        _is_empty(readers[0])
        readers[0].close()

    between(writer, close)
    assert writer.try_write(torch.arange(5))
    assert readers[0].statistics().num_kept == 0
    assert readers[1].try_read().tolist() == [0, 1, 2, 3, 4]


def test_a_value_that_was_told_right_before_the_end_is_not_lost(pair: tuple[Any, list[Any]]) -> None:
    writer, readers = pair
    is_enqueued, num_looks = readers[0].carrier.lanes[0].is_enqueued, 0

    def look(block: bool) -> bool:
        nonlocal num_looks
        num_looks += 1
        return num_looks > by_copies_in._NUM_LOOKS and is_enqueued(block)

    readers[0].carrier.lanes[0].is_enqueued = look
    readers[0].carrier.records.clear()
    assert writer.try_write(torch.arange(5))
    writer.end()
    assert readers[0].try_read().tolist() == [0, 1, 2, 3, 4]


def test_a_tensor_without_elements_holds_its_slot_until_it_is_given_out(pair: tuple[Any, list[Any]]) -> None:
    writer, readers = pair
    driver = writer.carrier.homes[0].driver
    write_value, num_kept = driver.write_value, []

    def read_early(*args: Any) -> None:
        driver.write_value = write_value
        _is_empty(readers[0])
        num_kept.append(readers[0].statistics().num_kept)
        write_value(*args)

    driver.write_value = read_early
    assert writer.try_write(torch.zeros(0, 2))
    assert readers[0].try_read().shape == (0, 2)
    assert [*num_kept, readers[0].statistics().num_kept] == [1, 0]


def test_the_stream_that_is_current_when_a_value_is_given_out_waits_for_it(
    pair: tuple[Any, list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, readers = pair
    stream = 0
    monkeypatch.setattr(by_copies_in, "stream_getter", lambda device: lambda: stream)
    readers[0].carrier.records.clear()
    between(writer, lambda: _is_empty(readers[0]))
    assert writer.try_write(torch.arange(5))
    stream = 7
    ring = readers[0].carrier.lanes[0].ring
    wait_for, waiting = ring.expect, []

    def expect(lease: Any) -> None:
        waiting.append(lease.stream)
        wait_for(lease)

    monkeypatch.setattr(ring, "expect", expect)
    value = readers[0].try_read()
    assert waiting == [7]
    assert ring.streams == {0, 7}
    assert value.tolist() == [0, 1, 2, 3, 4]


@interpreted_only("it replaces a method of a compiled class")
def test_a_record_that_is_half_replaced_is_looked_at_again(pair: tuple[Any, list[Any]]) -> None:
    writer, readers = pair
    replace, seen = writer.ring.replace, []

    def replace_slowly(at: int, data: bytes) -> None:
        writer.ring.words[at >> 3] = REPLACED
        writer.ring.board[at + 8 : at + 8 + len(data)] = data
        seen.append(readers[0].try_read())
        replace(at, data)

    def refuse() -> None:
        raise DeviceError("an illegal address")

    writer.ring.replace = replace_slowly
    between(writer, refuse)
    assert writer.try_write(torch.arange(5))
    assert seen == [EMPTY]
    failure: Any = readers[0].try_read()
    with pytest.raises(DeviceError, match="an illegal address"):
        raise failure.to_error()


@interpreted_only("it replaces a method of a compiled class")
def test_a_record_that_nobody_can_read_ends_the_channel(pair: tuple[Any, list[Any]]) -> None:
    """Else the next tensor would take this one's word that its copies are enqueued."""
    writer, readers = pair
    stage = writer.ring.stage_record
    writer.ring.stage_record = lambda kind, payload: stage(kind, b"\xff" * len(payload))
    assert writer.try_write(torch.arange(5))
    with pytest.raises(ChannelBroken, match="cannot be read"):
        readers[0].try_read()


def test_the_error_that_ends_a_channel_keeps_no_lease(pair: tuple[Any, list[Any]]) -> None:
    """One that is kept itself would keep the frames that it passes, and the tensors in them."""
    writer, readers = pair
    assert writer.try_write(torch.arange(5))
    kept = readers[0].try_read()
    assert writer.try_write(torch.arange(5))
    readers[0].carrier.refuse("another reader is gone")
    with pytest.raises(ChannelBroken, match="another reader"):
        readers[0].try_read()
    assert kept.tolist() == [0, 1, 2, 3, 4]
    assert readers[0].carrier.lanes[0].ring._ended.__traceback__ is None


def test_a_device_that_refuses_while_slots_are_exchanged_ends_the_channel(pair: tuple[Any, list[Any]]) -> None:
    """Its offer is used up: nobody would make another."""
    writer, readers = pair
    large = torch.zeros(10_000)
    assert not writer.try_write(large)
    for reader in readers:
        reader.carrier.progress()
    driver = writer.carrier.homes[0].driver
    record = driver.record_event

    def refuse(event: int, stream: int) -> None:
        driver.record_event = record
        raise DeviceError("an illegal address")

    driver.record_event = refuse
    with pytest.raises(DeviceError, match="an illegal address"):
        writer.try_write(large)
    with pytest.raises(ChannelBroken, match="an illegal address"):
        writer.try_write(large)
