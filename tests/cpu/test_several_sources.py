"""Writers with two devices, by each channel between devices: CPU tensors stand for those of one, by their dtype."""

from __future__ import annotations

import gc
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.errors import DeviceError, Failure  # noqa: E402
from tests.helpers.channel_pairs import check_values_stay_whole, in_turns, same  # noqa: E402
from tests.helpers.copy_pair import open_copy_ends  # noqa: E402
from tests.helpers.doers import Unpicklable  # noqa: E402
from tests.helpers.nccl_pair import open_nccl_ends  # noqa: E402
from tests.helpers.staged_pair import open_staged_ends  # noqa: E402

open_copy = in_turns(open_copy_ends)
OPEN_ENDS = [open_copy, in_turns(open_staged_ends), in_turns(open_nccl_ends)]


def source(tensor: Any) -> int:
    """Whole numbers lie on the first device, others on the second."""
    return int(tensor.is_floating_point())


def refuse(*args: Any) -> None:
    raise DeviceError("an illegal address")


def on_two_devices(writer: Any) -> None:
    """What a writer looks at to know where a tensor lies."""
    writer.carrier.sources.splitter._lane_of = source
    kinds = getattr(writer, "_kinds", None)
    if kinds is not None:
        kinds._source_of = source


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_readers", [1, 2])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("open_ends", OPEN_ENDS)
def test_values_of_two_devices_arrive_whole_and_stay_so(open_ends: Any, num_readers: int, seed: int) -> None:
    with open_ends(2, num_readers, num_sources=2) as (pair, writer, _):
        on_two_devices(writer)
        check_values_stay_whole(pair, 2, 40, seed)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("num_sources", [1, 2])
@pytest.mark.parametrize("open_ends", OPEN_ENDS)
def test_a_value_that_does_not_unpickle_leaves_the_next_ones_whole_and_holds_no_slot(
    open_ends: Any, num_sources: int
) -> None:
    both = {"first": torch.arange(10_000), "second": torch.ones(3000), "more": (torch.zeros(0), torch.arange(1))}
    with open_ends(2, 1, num_sources=num_sources) as (pair, writer, (reader,)):
        if num_sources == 2:
            on_two_devices(writer)
        for _ in range(5):
            assert pair.write({**both, "x": Unpicklable()})
            assert type(pair.read()[0]) is Failure
            assert reader.statistics().num_kept == 0
            assert pair.write(both)
            assert same(pair.read()[0], both)
        gc.collect()


@pytest.mark.timeout(60)
def test_a_copy_from_the_second_device_that_is_refused_is_an_error_in_the_value_s_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first device's is enqueued by then: no part of the value is given out."""
    with open_copy(2, 1, num_sources=2) as (pair, writer, _):
        on_two_devices(writer)
        assert pair.write([torch.arange(100), torch.ones(100)])
        del pair.read()[0]

        carrier: Any = writer.carrier
        monkeypatch.setattr(carrier.homes[1].driver, "copy", refuse)
        assert pair.write([torch.arange(100), torch.ones(100)])
        (failure,) = pair.read()
        assert type(failure) is Failure
        assert "an illegal address" in str(failure.to_error())
        gc.collect()
