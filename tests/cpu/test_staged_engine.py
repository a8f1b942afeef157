"""The staged channel, over drivers whose device is the CPU: CPU tensors stand for device ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.channels.protocol import EMPTY  # noqa: E402
from crossfade.device.staged_layout import StagedLayout  # noqa: E402
from crossfade.errors import ChannelBroken, DeviceError, Failure  # noqa: E402
from crossfade.host.memory import PAGE_BYTES  # noqa: E402
from crossfade.testing import conformance  # noqa: E402
from tests.helpers.channel_pairs import Pair, check_both_die, check_values_stay_whole, draw_value, in_turns, same  # noqa: E402
from tests.helpers.copy_pair import lose, settle  # noqa: E402
from tests.helpers.staged_pair import TINY, open_staged_ends, open_staged_pair  # noqa: E402

torch.set_num_threads(1)

open_staged = in_turns(open_staged_ends)
TestStagedEngine = conformance.suite(open_staged_pair)

LAYOUTS = [TINY, StagedLayout(3, PAGE_BYTES), StagedLayout(8, 16 * PAGE_BYTES)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("seed", range(4))
def test_values_arrive_whole_and_stay_so_while_they_are_kept(layout: StagedLayout, num_readers: int, seed: int) -> None:
    with open_staged(4, num_readers, layout) as (pair, _, _):
        check_values_stay_whole(pair, 4, 100, seed)


@pytest.mark.parametrize("seed", range(6))
def test_readers_ask_ahead_and_any_end_is_served_at_any_time(seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    values = [draw_value(random) for _ in range(40)]
    with open_staged(3, 2) as (_, writer, readers):
        num_written, waiting = 0, [0, 0]
        got: list[list[Any]] = [[], []]
        for _ in range(200_000):
            if min(map(len, got)) == len(values):
                break
            which = random.randrange(6)
            index = which % 2
            if which < 2:
                random.choice([writer, *readers]).carrier.progress()
            elif which < 4:
                waiting[index] += readers[index].try_start()
            elif waiting[index] and (value := readers[index].try_read()) is not EMPTY:
                readers[index].release()
                waiting[index] -= 1
                got[index].append(value)
            if num_written < len(values) and writer.try_write(values[num_written]):
                num_written += 1
        for mine in got:
            assert same(mine, values)


def test_nothing_moves_before_the_reader_asks_and_no_more_than_the_ring_holds() -> None:
    with open_staged(2, 1) as (pair, writer, (reader,)):
        tensor = torch.arange(100_000)
        assert pair.write(tensor)
        assert pair.write(tensor + 1)
        assert not pair.write(tensor)
        assert reader.try_read() is EMPTY
        assert not writer.try_flush()
        assert reader.try_start()
        assert reader.try_start()
        assert not reader.try_start()
        assert torch.equal(pair.take(reader), tensor)
        assert torch.equal(pair.take(reader), tensor + 1)
        pair.turn()
        assert writer.try_flush()
        assert writer.statistics().num_bytes == 0
        assert reader.statistics().num_bytes == 1_600_000


def test_a_value_is_put_together_when_its_tensors_are_there() -> None:
    with open_staged(2, 1) as (pair, _, _):
        assert pair.write(Summed(torch.arange(10_000)))
        (value,) = pair.read()
        assert value.total == 49_995_000


class Summed:
    """Looks at its tensor as soon as it is made."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.total = int(tensor.sum())

    def __reduce__(self) -> Any:
        return Summed, (self.tensor,)


def test_empty_tensors_and_tensors_of_all_kinds() -> None:
    value = {
        "none": torch.empty(0, 3),
        "odd": torch.arange(7, dtype=torch.uint8),
        "last": torch.empty(0),
        "complex": torch.ones(5, dtype=torch.complex64) * 1j,
        "bool": torch.tensor([True, False, True]),
        "part": torch.arange(100).view(10, 10).t()[::2],
        "scalar": torch.tensor(3.5),
        "grad": torch.ones(3, requires_grad=True),
    }
    with open_staged(2, 1) as (pair, _, _):
        for sent in (value, torch.empty(0, 4), [torch.arange(3, dtype=torch.int8), torch.empty(0)]):
            assert pair.write(sent)
            (got,) = pair.read()
            assert same(got, sent)
        assert pair.write(value)
        assert pair.read()[0]["grad"].requires_grad


def test_copies_onto_the_device_are_recorded_as_of_the_execution_that_brings_them() -> None:
    """Its number is that of the value: a program asks for values ahead of their executions, and it may be further on."""
    spans: list[tuple[int | None, int]] = []

    class Recorded:
        """At no execution in particular."""

        execution = -1

        def __call__(self, stream: int, execution: int | None = None) -> Callable[[int], None]:
            return lambda size_bytes: spans.append((execution, size_bytes))

    with open_staged(4, 1) as (pair, _, (reader,)):
        reader.carrier.recorded[0].around = Recorded()
        for _ in range(3):
            assert reader.try_start()
        for value in (torch.ones(4), "text", torch.ones(8)):
            assert pair.write(value)
        for _ in range(3):
            pair.take(reader)
    assert spans == [(0, 16), (2, 32)]


def test_tensors_of_one_value_know_nothing_of_each_other() -> None:
    with open_staged(2, 1) as (pair, _, _):
        assert pair.write([torch.zeros(4), torch.ones(4, requires_grad=True)])
        ((first, second),) = pair.read()
        product = (second * second).sum()
        first += 1
        product.backward()
        assert second.grad.tolist() == [2, 2, 2, 2]


def test_who_has_no_memory_gets_a_failure_and_the_channel_goes_on() -> None:
    with open_staged(2, 2) as (pair, _, (first, _)):
        arrivals = first.carrier.lanes[0].arrivals
        allocate = arrivals.allocate

        def refuse(size_bytes: int) -> Any:
            raise RuntimeError("out of memory")

        arrivals.allocate = refuse
        assert pair.write(torch.ones(100_000))
        failure, got = pair.read()
        assert type(failure) is Failure
        assert got.sum() == 100_000
        with pytest.raises(DeviceError, match=r"no memory for a value of 400000 bytes: out of memory"):
            raise failure.to_error()
        assert pair.write("a message")
        assert pair.read() == ["a message", "a message"]
        arrivals.allocate = allocate
        assert pair.write(torch.arange(5))
        assert [value.sum() for value in pair.read()] == [10, 10]


def test_tensors_outlive_their_channel_and_what_is_under_way_is_dropped_when_it_closes() -> None:
    with open_staged(2, 1) as (pair, _, (reader,)):
        assert pair.write(torch.arange(10_000))
        (tensor,) = pair.read()
        assert pair.write(torch.arange(100_000))
        assert reader.try_start()
        assert reader.try_read() is EMPTY
    assert torch.equal(tensor, torch.arange(10_000))


@pytest.mark.parametrize("is_enqueued", [False, True])
def test_the_tensors_of_a_dead_writer_are_not_given_out(is_enqueued: bool) -> None:
    """What its streams were to bring may be rubbish, so only what lies in the message can be trusted."""
    with open_staged(2, 1) as (pair, _, (reader,)):
        assert pair.write("a message")
        assert pair.write(torch.arange(4 if is_enqueued else 100_000))
        assert reader.try_start()
        assert reader.try_start()
        pair.turn()
        check_both_die(pair)


def test_a_writer_that_closes_breaks_what_it_has_not_enqueued() -> None:
    with open_staged(2, 1) as (pair, writer, (reader,)):
        assert pair.write(torch.arange(4))
        assert pair.write(torch.arange(100_000))
        writer.close()
        settle([writer])
        assert reader.try_start()
        assert reader.try_start()
        assert pair.take(reader).tolist() == [0, 1, 2, 3]
        with pytest.raises(ChannelBroken, match="the other side closed it"):
            pair.take(reader)


def test_a_dead_reader_ends_it_for_all() -> None:
    with open_staged(2, 2) as (pair, writer, (_, second)):
        assert pair.write(torch.arange(4))
        assert [value.sum() for value in pair.read()] == [6, 6]
        assert pair.write(torch.arange(100_000))
        lose(writer, 0, "the first reader died")
        with pytest.raises(ChannelBroken, match="the first reader died"):
            writer.try_flush()
        with pytest.raises(ChannelBroken, match="the first reader died"):
            writer.try_write(torch.arange(4))
        writer.close()
        settle([writer])
        assert second.try_start()
        with pytest.raises(ChannelBroken):
            pair.take(second)


@pytest.mark.parametrize("num_before", [0, 1, 5])
@pytest.mark.parametrize("refused", ["copy", "write_value"])
def test_a_device_that_refuses_once_ends_the_channel_and_nothing_false_arrives(refused: str, num_before: int) -> None:
    """While a value is written, or later. What comes behind a chunk that is missing does not take its place."""
    with open_staged(4, 1) as (pair, writer, (reader,)):
        assert pair.write(torch.arange(10))
        assert pair.read()[0].sum() == 45
        refuse_once(writer.carrier.sources.homes[0].driver, refused, num_before)
        assert reader.try_start()
        faults = write_two(pair, torch.arange(10_000))
        assert {str(fault).rpartition(": ")[2] for fault in faults} == {"an illegal address"}
        assert reader.try_read() is EMPTY
        with pytest.raises(ChannelBroken, match="an illegal address"):
            pair.write(torch.arange(10)) and writer.try_flush()


@pytest.mark.parametrize("num_before", [0, 5])
def test_a_reader_whose_device_refuses_once_gets_nothing_false(num_before: int) -> None:
    with open_staged(4, 1) as (pair, _, (reader,)):
        refuse_once(reader.carrier.lanes[0].arrivals.home.driver, "copy", num_before)
        assert reader.try_start()
        assert [str(fault) for fault in write_two(pair, torch.arange(10_000))] == ["an illegal address"]
        with pytest.raises(ChannelBroken, match="c at reader 0: an illegal address"):
            reader.try_read()


def refuse_once(driver: Any, name: str, num_before: int) -> None:
    done, left = getattr(driver, name), [num_before]

    def refused(*args: Any) -> None:
        left[0] -= 1
        if left[0] == -1:
            raise DeviceError("an illegal address")
        done(*args)

    setattr(driver, name, refused)


def write_two(pair: Pair, value: Any) -> list[Exception]:
    """Writes two values and goes on with them until all stands still; what was raised."""
    faults: list[Exception] = []
    write = pair.writer.try_write
    steps: list[Callable[[], object]] = [partial(write, value), partial(write, value + 1), *[pair.turn] * 200]
    for step in steps:
        try:
            step()
        except (ChannelBroken, DeviceError) as error:
            faults.append(error)
    return faults
