"""The copy-engine channel, over drivers whose device is the CPU: CPU tensors stand for device ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.edges.host_copies import HostCopies  # noqa: E402
from crossfade.errors import ChannelBroken, DeviceError, Failure  # noqa: E402
from crossfade.testing import conformance  # noqa: E402
from tests.helpers.bells import new_bell  # noqa: E402
from tests.helpers.channel_pairs import check_both_die, check_values_stay_whole, in_turns  # noqa: E402
from tests.helpers.copy_pair import lose, open_copy_ends, open_copy_pair, settle  # noqa: E402

torch.set_num_threads(1)

open_copy = in_turns(open_copy_ends)
TestCopyEngine = conformance.suite(open_copy_pair)


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_values_arrive_whole_and_stay_so_while_they_are_kept(num_slots: int, num_readers: int, seed: int) -> None:
    with open_copy(4, num_readers, num_slots) as (pair, _, _):
        check_values_stay_whole(pair, 4, 150, seed)


def test_a_tensor_goes_beside_the_message_and_its_slot_is_free_when_the_last_view_dies() -> None:
    with open_copy(2, 1) as (pair, writer, (reader,)):
        tensor = torch.arange(1000)
        assert pair.write({"a": tensor, "b": tensor[:3]})
        (value,) = pair.read()
        assert reader.statistics().num_kept == 1
        assert writer.statistics().num_bytes == 0
        view = value["b"][1:]
        del value
        assert reader.statistics().num_kept == 1
        assert view.tolist() == [1, 2]
        del view
        assert reader.statistics().num_kept == 0


def test_a_slow_reader_stops_the_writer_and_nobody_else_and_wakes_it() -> None:
    with open_copy(8, 2) as (pair, _, readers):
        for number in range(2):
            assert pair.write(torch.full((10,), number))
        waiting = torch.full((10,), 2)
        assert not pair.write(waiting)
        first = readers[0].try_read()
        assert first.tolist() == [0] * 10
        del first
        assert not pair.write(waiting)  # the other reader has not let go
        other = readers[1].try_read()
        assert not pair.write(waiting)
        del other
        assert pair.write(waiting)
        for reader in readers:
            assert [reader.try_read()[0].item() for _ in range(2)] == [1, 2]


def test_who_has_no_memory_refuses_the_value_and_the_channel_goes_on() -> None:
    with open_copy(2, 1) as (pair, _, (reader,)):
        assert pair.write(torch.arange(10))
        assert pair.read()[0].sum() == 45
        driver = reader.carrier.lanes[0]._home.driver
        allocate = driver.allocate

        def refuse(size_bytes: int, label: str) -> int:
            raise DeviceError("out of memory")

        driver.allocate = refuse
        with pytest.raises(DeviceError, match=r"no memory for slots of 8000000 bytes: out of memory"):
            pair.write(torch.ones(1_000_000, dtype=torch.float64))
        assert pair.write(torch.arange(5))
        assert pair.read()[0].sum() == 10
        driver.allocate = allocate
        assert pair.write(torch.ones(1_000_000, dtype=torch.float64))
        assert pair.read()[0].sum() == 1_000_000


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_before", [0, 1])
def test_slots_that_cannot_be_opened_are_told_of_and_end_the_channel(num_before: int) -> None:
    """Also where there are others that were opened before: they stay what they are until the ends are closed."""
    with open_copy(2, 1) as (pair, writer, _):
        for _ in range(num_before):
            assert pair.write(torch.ones(10))
            assert pair.read()[0].sum() == 10

        def refuse(handle: bytes, label: str) -> int:
            raise DeviceError("out of address space")

        writer.carrier.homes[0].driver.open_handle = refuse
        with pytest.raises(DeviceError, match="its slots cannot be opened: out of address space"):
            pair.write(torch.ones(100_000))
        with pytest.raises(ChannelBroken, match="its slots cannot be opened: out of address space"):
            pair.write(torch.ones(10))
        assert pair.write("a message")
        assert pair.read() == ["a message"]


@pytest.mark.parametrize("is_bare", [True, False])
def test_a_copy_that_cannot_be_enqueued_is_an_error_in_the_value_s_place(is_bare: bool) -> None:
    with open_copy(4, 2) as (pair, writer, readers):
        assert pair.write(torch.arange(10))
        assert [value.sum() for value in pair.read()] == [45, 45]
        driver = writer.carrier.homes[0].driver
        copies = [driver.copy]

        def refuse_the_second(*args: Any) -> None:
            if not copies:
                raise DeviceError("an illegal address")
            copies.pop()(*args)

        driver.copy = refuse_the_second
        value = torch.arange(10)
        assert pair.write(value if is_bare else ["x" * 10_000, value])
        for failure in pair.read():
            assert type(failure) is Failure
            with pytest.raises(DeviceError, match="a copy could not be enqueued: an illegal address"):
                raise failure.to_error()
        for other in (torch.arange(3), "a message"):
            with pytest.raises(ChannelBroken, match="a copy could not be enqueued: an illegal address"):
                writer.try_write(other)
        writer.end()
        with pytest.raises(ChannelBroken):
            readers[0].try_read()


def test_tensors_outlive_their_channel() -> None:
    with open_copy(2, 1) as (pair, writer, (reader,)):
        assert pair.write(torch.arange(1000))
        (tensor,) = pair.read()
        writer.close()
        reader.close()
        settle([writer, reader])
        assert reader.carrier.is_referenced
        assert tensor.sum() == 499_500
        del tensor
        reader.carrier.progress()
        assert not reader.carrier.is_referenced


def test_the_tensors_of_a_dead_writer_are_not_given_out_and_its_slots_come_back() -> None:
    """Its copies may have been cut off, so only what lies in the message can be trusted."""
    with open_copy(2, 1) as (pair, _, (reader,)):
        assert pair.write("a message")
        assert pair.write(torch.arange(4))
        check_both_die(pair)
        assert not reader.carrier.is_referenced


def test_a_death_may_be_heard_of_in_the_middle_of_telling() -> None:
    """By the watchdog's thread, while the main thread tells the dead: what was still to be told is dropped behind that."""
    with open_copy(2, 1) as (pair, writer, (reader,)):
        assert pair.write(torch.arange(4))
        (tensor,) = pair.read()
        mailbox = reader.carrier.lanes[0]._post._outbox._mailbox
        try_put = mailbox.try_put

        def die_first(record: Any) -> bool:
            reader.break_off("the writer died")
            return bool(try_put(record))

        mailbox.try_put = die_first
        assert not writer.try_write(torch.arange(1_000_000))
        reader.carrier.progress()
        lose(writer, 0, "the reader died")
        assert tensor.sum() == 6
        del tensor
        settle([reader, writer])


def test_a_dead_reader_does_not_keep_the_others_from_ending() -> None:
    with open_copy(2, 2) as (pair, writer, (first, second)):
        assert pair.write(torch.arange(4))
        assert [value.sum() for value in pair.read()] == [6, 6]
        lose(writer, 0, "the first reader died")
        with pytest.raises(ChannelBroken, match="the first reader died"):
            writer.try_write(torch.arange(4))
        writer.close()
        second.close()
        settle([writer, second])
        assert not second.carrier.is_referenced
        first.break_off("the writer died")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("around", [lambda tensor: tensor, lambda tensor: {"a": [tensor, 1]}], ids=["alone", "inside"])
def test_a_nested_tensor_comes_whole(around: Any) -> None:
    """It says of its layout that it is strided, and has no shape."""
    with open_copy(2, 1) as (pair, _, _):
        for number in range(3):
            assert pair.write(around(torch.nested.nested_tensor([torch.ones(2), torch.full((3,), number)])))
            (got,) = pair.read()
            nested = got if around(1) == 1 else got["a"][0]
            assert [part.tolist() for part in nested.unbind()] == [[1, 1], [number] * 3]
            del got, nested


def test_a_sparse_tensor_is_not_of_the_kind_of_a_dense_one() -> None:
    with open_copy(4, 1) as (pair, _, _):
        for tensor in (torch.eye(4), torch.eye(4).to_sparse(), torch.eye(4)):
            assert pair.write(tensor)
            assert torch.equal(pair.read()[0].to_dense(), torch.eye(4))


def test_cpu_tensors_are_brought_to_the_device_where_they_are_wanted_there() -> None:
    """Here the device is the CPU as well: what is brought lies in memory of its own."""
    bell = new_bell()
    with open_copy(4, 1) as (pair, writer, (reader,)):
        home = reader.carrier.homes[0]
        copies = HostCopies([home], bell)
        reader.carrier.joiner.copies = copies
        mask = np.arange(3)
        value = {"mask": mask, "tensors": [torch.arange(7), torch.zeros(0)]}
        writer.carrier.sources.splitter._lane_of = lambda tensor: None
        assert pair.write(value)
        (got,) = pair.read()
        assert [each.tolist() for each in got["tensors"]] == [list(range(7)), []]
        assert got["mask"].tolist() == [0, 1, 2]
        while not copies.close(1.0):
            pass
    bell.close()
