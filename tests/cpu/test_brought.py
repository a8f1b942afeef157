"""CPU tensors that a reader wants on its device, beside device tensors that come by lanes: copy, staged and NCCL channels.

The device is the CPU, so floats stand for device tensors, and integers for those of the CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.edges.host_copies import HostCopies  # noqa: E402
from crossfade.errors import Failure  # noqa: E402
from tests.helpers.bells import new_bell  # noqa: E402
from tests.helpers.channel_pairs import Pair, same  # noqa: E402
from tests.helpers.copy_pair import open_copy_ends  # noqa: E402
from tests.helpers.doers import Unpicklable  # noqa: E402
from tests.helpers.nccl_pair import open_nccl_ends  # noqa: E402
from tests.helpers.staged_pair import open_staged_ends  # noqa: E402

LIMIT_S = 20.0
HOME_OF: dict[Any, Callable[[Any], Any]] = {
    open_copy_ends: lambda reader: reader.carrier.homes[0],
    open_staged_ends: lambda reader: reader.carrier.lanes[0].arrivals.home,
    open_nccl_ends: lambda reader: reader.carrier.link.lanes[0].arrivals.home,
}
VALUE = {"cpu": torch.arange(1000), "device": torch.ones(5), "more": [torch.arange(7).view(7, 1), "text"], "empty": []}


class Opened:
    """A channel, and how many bytes each reader's value had brought to the device."""

    def __init__(self, writer: Any, readers: list[Any]) -> None:
        self.pair = Pair(writer, readers)
        self.reader = readers[0]
        self.sizes_bytes: list[int] = []

    def around(self, stream: int, execution: int | None = None) -> Callable[[int], None]:
        return self.sizes_bytes.append

    def carry(self, value: Any) -> list[Any]:
        """The value, as all get it."""
        assert self.pair.write(value)
        return self.pair.read()


@contextmanager
def opened(open_ends: Any, num_readers: int = 1) -> Iterator[Opened]:
    with open_ends(2, num_readers) as (writer, readers):
        writer.carrier.sources.splitter._lane_of = lambda tensor: 0 if tensor.is_floating_point() else None
        found, bell = Opened(writer, readers), new_bell()
        copies = [HostCopies([HOME_OF[open_ends](reader)], bell, 0.0) for reader in readers]
        for reader, each in zip(readers, copies, strict=True):
            reader.carrier.joiner.copies = each
            reader.carrier.brought.around = found.around
        yield found
        gc.collect()
        for each in copies:
            assert each.close(LIMIT_S)
        bell.close()


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("open_ends", HOME_OF)
def test_cpu_tensors_arrive_on_the_device_beside_those_that_come_by_lanes(open_ends: Any, num_readers: int) -> None:
    with opened(open_ends, num_readers) as channel:
        kept = []
        for _ in range(6):  # more than the ring's slots, while all are kept: they lie in memory of their own
            kept += channel.carry(VALUE)
        assert len(kept) == 6 * num_readers
        assert all(same(got, VALUE) for got in kept)
        assert channel.sizes_bytes == [8056] * len(kept)
        for got in kept:
            got["cpu"].fill_(1)  # nobody else sees it
        assert all(same(got, VALUE) for got in channel.carry(VALUE))
        del got, kept


@pytest.mark.parametrize("open_ends", HOME_OF)
def test_values_without_device_tensors_are_brought_too(open_ends: Any) -> None:
    with opened(open_ends) as channel:
        for value in (
            [torch.arange(3)],
            [torch.arange(100_000), torch.arange(0)],
            7,
            "text",
            {"none": None},
            torch.ones(2),
        ):
            assert same(channel.carry(value)[0], value)
        assert channel.sizes_bytes == [24, 800_000]


@pytest.mark.parametrize("open_ends", HOME_OF)
def test_a_value_that_does_not_unpickle_leaves_the_next_ones_whole(open_ends: Any) -> None:
    with opened(open_ends) as channel:
        failure = Failure.capture(KeyError("x" * 5000), actor="a", node="n")
        assert type(channel.carry(failure)[0]) is Failure
        for value in ([torch.arange(10), Unpicklable()], [torch.arange(10), torch.ones(3), Unpicklable()]):
            assert type(channel.carry(value)[0]) is Failure
            assert same(channel.carry(VALUE)[0], VALUE)


@pytest.mark.parametrize("open_ends", HOME_OF)
def test_values_that_were_not_taken_leave_nothing(open_ends: Any) -> None:
    with opened(open_ends) as channel:
        for value in ([torch.arange(3)], VALUE):
            assert channel.pair.write(value)
            assert channel.reader.try_start()
            channel.pair.turn()
