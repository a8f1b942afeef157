"""numpy arrays by themselves through a shared-memory ring, which moves them without a message."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as st_numpy

from crossfade.channels.protocol import EMPTY
from crossfade.channels.ring_layout import ARRAY, INLINE_BYTES, RECORD_BYTES, SLOT_ARRAY
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.errors import Failure
from tests.cpu.test_codec import ARRAYS
from tests.helpers.shm_pair import open_shm_pair


def through(writer: ShmWriter, reader: ShmReader, value: Any) -> Any:
    assert writer.try_write(value)
    got = reader.try_read()
    assert got is not EMPTY
    return got


def next_kind(writer: ShmWriter) -> int:
    """The kind of the record that was written last."""
    at = writer.at - RECORD_BYTES
    return int(writer.words[(at if at >= writer._first else writer._end - RECORD_BYTES) >> 3]) & 255


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("num_times", [1, 500])
def test_every_kind_of_array_in_a_record_and_in_a_slot(name: str, num_times: int) -> None:
    array = ARRAYS[name] if num_times == 1 else np.concatenate([ARRAYS[name].reshape(-1)] * num_times)
    with open_shm_pair(2, 1) as (writer, (reader,)):
        for _ in range(5):
            got = through(writer, reader, array)
            assert type(got) is np.ndarray
            assert (got.dtype, got.dtype.metadata, got.shape) == (array.dtype, array.dtype.metadata, array.shape)
            assert got.tobytes() == array.tobytes() if array.dtype != object else (got == array).all()


@given(array=st_numpy.arrays(st_numpy.scalar_dtypes(), st_numpy.array_shapes(min_dims=0, min_side=0, max_side=12)))
def test_any_array(array: Any) -> None:
    with open_shm_pair(1, 2) as (writer, readers):
        assert writer.try_write(array)
        for reader in readers:
            got: Any = reader.try_read()
            assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())


@pytest.mark.parametrize("size", [10, 100_000])
def test_an_array_cannot_be_written_to(size: int) -> None:
    with open_shm_pair(2, 1) as (writer, (reader,)):
        got = through(writer, reader, np.arange(size))
        assert not got.flags.writeable
        with pytest.raises(ValueError, match="WRITEABLE"):
            got.flags.writeable = True


def test_where_arrays_lie() -> None:
    with open_shm_pair(2, 1) as (writer, (reader,)):
        for size, kind in ((8, ARRAY), (INLINE_BYTES - 100, ARRAY), (RECORD_BYTES, SLOT_ARRAY)):
            through(writer, reader, np.zeros(size, np.uint8))
            assert next_kind(writer) == kind
        through(writer, reader, np.zeros((1,) * 64))  # a long description
        through(writer, reader, np.zeros((10, 10))[:, ::2])
        assert next_kind(writer) not in (ARRAY, SLOT_ARRAY)


def test_a_slot_is_free_once_the_last_view_is_gone() -> None:
    with open_shm_pair(2, 1) as (writer, (reader,)):
        for make_view in (lambda a: a[5:50].reshape(3, 15), memoryview, lambda a: a.T, lambda a: [a]):
            view: Any = make_view(through(writer, reader, np.arange(5_000)))
            gc.collect()
            assert reader.statistics().num_kept == 1
            del view
            assert reader.statistics().num_kept == 0


def test_more_arrays_than_the_ring_is_deep_are_copied_out() -> None:
    with open_shm_pair(2, 2) as (writer, readers):
        kept: list[list[Any]] = [[], []]
        for number in range(10):
            assert writer.try_write(np.full(5_000, number))
            for reader, values in zip(readers, kept, strict=True):
                values.append(reader.try_read())
        for reader, values in zip(readers, kept, strict=True):
            assert [set(value.tolist()) for value in values] == [{number} for number in range(10)]
            assert (reader.statistics().num_kept, reader.statistics().num_copied_out) == (2, 8)
        assert writer.statistics().num_slots <= 6


def test_a_damaged_array_is_a_failure_and_not_the_end() -> None:
    with open_shm_pair(2, 1) as (writer, (reader,)):
        for size in (10, 5_000):
            writer.try_write(np.zeros(size, np.uint8))
            word = (reader.at) >> 3
            writer.words[word] = (size + 1) << 8 | writer.words[word] & 255
            got = reader.try_read()
            assert isinstance(got, Failure)
            assert "bytes came for an array" in str(got.to_error())
            assert reader.statistics().num_kept == 0
            assert through(writer, reader, np.arange(3)).tolist() == [0, 1, 2]


def test_slots_of_large_values_take_turns_and_no_more_of_them_than_that() -> None:
    """Writing into few slots, in turns, keeps caches warm also where values were kept, or smaller, before."""
    with open_shm_pair(16, 1) as (writer, (reader,)):
        kept = [through(writer, reader, np.zeros(1 << 20, np.uint8)) for _ in range(16)]
        assert writer.statistics().num_slots == 16
        kept.clear()
        places = set()
        for _ in range(64):
            assert writer.try_write(np.zeros(1 << 20, np.uint8))
            places.add(int(writer.words[(reader.at >> 3) + 1]))
            reader.try_read()
        assert len(places) <= 5
        for size in (100_000, 1 << 20, 5_000, 3 << 20, 1 << 20):  # and every size is whole
            for number in range(40):
                assert (through(writer, reader, np.full(size, number, np.uint8)) == number).all()


def test_large_and_small_values_in_turns_make_few_slots_large() -> None:
    with open_shm_pair(8, 1) as (writer, (reader,)):
        kept = [through(writer, reader, np.zeros(5_000, np.uint8)) for _ in range(8)]
        kept.clear()
        for _ in range(40):
            through(writer, reader, np.zeros(10_000_000, np.uint8))
            through(writer, reader, np.zeros(5_000, np.uint8))
        assert writer.statistics().slot_bytes < 2 * 12_000_000
