"""Writers with two devices, by each channel between devices: CPU tensors stand for those of one, by their dtype."""

from __future__ import annotations

import gc
from random import Random
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.errors import DeviceError, Failure  # noqa: E402
from tests.cpu.test_copy_engine import Pair, Unpicklable, draw_value, same  # noqa: E402
from tests.cpu.test_staged_engine import Pair as Asking  # noqa: E402
from tests.helpers.copy_pair import open_copy_ends  # noqa: E402
from tests.helpers.nccl_pair import open_nccl_ends  # noqa: E402
from tests.helpers.staged_pair import open_staged_ends  # noqa: E402

PAIR_OF: dict[Any, Any] = {open_copy_ends: Pair, open_staged_ends: Asking, open_nccl_ends: Asking}


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
@pytest.mark.parametrize("open_ends", PAIR_OF)
def test_values_of_two_devices_arrive_whole_and_stay_so(open_ends: Any, num_readers: int, seed: int) -> None:
    random = Random(seed)
    torch.manual_seed(seed)
    with open_ends(2, num_readers, num_sources=2) as (writer, readers):
        on_two_devices(writer)
        pair = PAIR_OF[open_ends](writer, readers)
        kept: list[tuple[Any, Any]] = []
        for _ in range(40):
            value = draw_value(random)
            assert pair.write(value)
            for got in pair.read():
                assert same(got, value)
                kept.append((got, value))
                del got
            random.shuffle(kept)
            while len(kept) > random.choice((0, 2, 10)):
                got, value = kept.pop()
                assert same(got, value)
                del got
        kept.clear()
        gc.collect()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("open_ends", PAIR_OF)
def test_a_value_that_does_not_unpickle_leaves_the_next_ones_whole(open_ends: Any) -> None:
    both = {"first": torch.arange(5000), "second": torch.ones(3000), "more": (torch.zeros(0), torch.arange(1))}
    with open_ends(2, 1, num_sources=2) as (writer, readers):
        on_two_devices(writer)
        pair = PAIR_OF[open_ends](writer, readers)
        for _ in range(3):
            assert pair.write({**both, "x": Unpicklable()})
            assert type(pair.read()[0]) is Failure
            assert pair.write(both)
            assert same(pair.read()[0], both)
        gc.collect()


@pytest.mark.timeout(60)
def test_a_copy_from_the_second_device_that_is_refused_is_an_error_in_the_value_s_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first device's is enqueued by then: no part of the value is given out."""
    with open_copy_ends(2, 1, num_sources=2) as (writer, readers):
        on_two_devices(writer)
        pair = Pair(writer, readers)
        assert pair.write([torch.arange(100), torch.ones(100)])
        del pair.read()[0]

        carrier: Any = writer.carrier
        monkeypatch.setattr(carrier.homes[1].driver, "copy", refuse)
        assert pair.write([torch.arange(100), torch.ones(100)])
        (failure,) = pair.read()
        assert type(failure) is Failure
        assert "an illegal address" in str(failure.to_error())
        gc.collect()
