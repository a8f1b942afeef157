"""Values to messages and back."""

from __future__ import annotations

import datetime
import enum
import functools
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.channels.values.codec import decode, message_of, prepare
from crossfade.channels.values.layout import Encoded


def through(value: Any, *, private: Any = bytearray) -> Any:
    message = memoryview(bytearray(message_of(value).to_bytes()))
    return decode(message, private=private, shared=memoryview.toreadonly)


class Kind(enum.Enum):
    ONE = 1


class Custom:
    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.inside == self.inside

    __hash__ = None  # type: ignore[assignment]


class Tagged(np.ndarray[Any, Any]):
    """A subclass of ndarray."""


ARRAYS: dict[str, Any] = {
    "floats": np.random.default_rng(0).random((3, 4, 5)),
    "empty": np.empty((0, 3)),
    "zero-dimensional": np.array(7.5),
    "fortran order": np.asfortranarray(np.arange(12).reshape(3, 4)),
    "not contiguous": np.arange(100)[::3],
    "broadcast": np.broadcast_to(np.arange(3), (4, 3)),
    "booleans": np.arange(9) % 2 == 0,
    "complex": np.arange(5) * 1j,
    "big-endian": np.arange(5, dtype=">i4"),
    "half": np.arange(5, dtype=np.float16),
    "dates": np.array(["2026-11-21", "NaT"], dtype="datetime64[D]"),
    "spans of time": np.array([1, 2], dtype="timedelta64[us]"),
    "strings": np.array(["a", "bcd"]),
    "byte strings": np.array([b"a", b"bcd"]),
    "structured": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    "objects": np.array([{"k": 1}, None], dtype=object),
    "raw": np.zeros(3, dtype="V5"),
    "of a dtype with metadata": np.zeros(3, np.dtype("i1", metadata={"enum": {"RED": 0}})),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("wrap", [False, True])
def test_arrays(name: str, wrap: bool) -> None:
    array = ARRAYS[name]
    for _ in range(2):  # the second time from what was remembered
        got = through([array])[0] if wrap else through(array)
        assert type(got) is np.ndarray
        assert (got.dtype, got.shape) == (array.dtype, array.shape)
        assert got.tobytes() == array.tobytes() if array.dtype != object else (got == array).all()


def test_array_subclasses_and_scalars() -> None:
    tagged = np.arange(4).view(Tagged)
    assert type(through(tagged)) is Tagged
    assert type(through(np.float32(1.5))) is np.float32
    masked = np.ma.masked_array([1, 2], [True, False])
    assert through(masked).mask.tolist() == [True, False]


def test_arrays_do_not_go_through_pickle() -> None:
    message = prepare(np.arange(1000))
    assert isinstance(message, Encoded)
    assert len(message.head) < 200
    assert message.buffers[0][1].nbytes == 8000


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner) | st.builds(Custom, inner)
        ),
        max_leaves=20,
    )
)
def test_plain_values(value: Any) -> None:
    assert through(value) == value


def test_large_and_deep_values() -> None:
    for value in (b"x" * 5_000_000, "y" * 2_000_000, bytearray(b"z" * 3_000_000), list(range(200_000))):
        assert through(value) == value
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    assert through(deep) == deep


def test_what_only_cloudpickle_can() -> None:
    captured = 3

    class Local:
        def __init__(self, x: int) -> None:
            self.x = x

    assert through(lambda x: x + captured)(1) == 4
    assert through(Local(5)).x == 5
    assert through({"inside": [Local(6), np.arange(3)]})["inside"][0].x == 6
    assert through(functools.partial(pow, 2))(3) == 8
    assert through(Kind.ONE) is Kind.ONE
    assert through(datetime.date(2026, 11, 21)) == datetime.date(2026, 11, 21)


def test_a_word_that_looks_like_the_main_module_is_only_a_word() -> None:
    assert through(["__main__", Custom("__main__")]) == ["__main__", Custom("__main__")]


def test_what_cannot_be_pickled() -> None:
    with pytest.raises(TypeError, match="generator"):
        message_of(number for number in range(3))
    with pytest.raises((TypeError, pickle.PicklingError)):
        message_of([Custom(1), (number for number in range(3))])


def test_tensors_keep_their_memory_out_of_the_pickle() -> None:
    torch = pytest.importorskip("torch", reason="tensors need torch")
    tensor = torch.randn(100, 100)
    message = message_of({"tensor": tensor, "array": np.arange(2000)})
    assert len(message.head) < 2000
    shared: list[memoryview] = []

    def keep(view: memoryview) -> memoryview:
        shared.append(view)
        return view

    got = through({"tensor": tensor}, private=keep)
    assert torch.equal(got["tensor"], tensor)
    assert len(shared) == 1
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(through(sparse).to_dense(), torch.eye(3))
    assert type(through(torch.nn.Parameter(torch.ones(2)))) is torch.nn.Parameter
    conjugate = torch.tensor([1 + 2j]).conj()
    assert torch.equal(through(conjugate), conjugate)


@given(damage=st.binary(max_size=300))
def test_a_damaged_message_is_an_error(damage: bytes) -> None:
    try:
        decode(memoryview(bytearray(damage)), shared=memoryview.toreadonly)
    except (MemoryError, RecursionError, SystemError):
        raise
    except Exception:
        return
