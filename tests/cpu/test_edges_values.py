"""Values of every size and kind, through shared memory and through gloo."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.channels.ring_layout import RECORD_BYTES
from crossfade.host.memory import PAGE_BYTES, available_bytes
from tests.helpers.counts import num
from tests.helpers.sessions import TORCH

TRANSPORTS = ["shm", "gloo"]
MIB = 1 << 20


class Plain:
    """Has state, and is equal to its like."""

    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plain) and vars(other) == vars(self)

    __hash__ = None  # type: ignore[assignment]


class Carrier:
    """Makes values, passes them on, says what came."""

    def __init__(self) -> None:
        self._kept: list[Any] = []

    def same(self, value: Any) -> Any:
        return value

    def make(self, size_bytes: int) -> Any:
        return _array(size_bytes)

    def describe(self, value: Any) -> tuple[int, ...]:
        return value.nbytes, *(int(value[place]) if value.nbytes else 0 for place in (0, value.nbytes // 2, -1))

    def keep(self, value: Any) -> int:
        self._kept.append(value)
        return len(self._kept)

    def release(self, _: Any = None) -> None:
        self._kept.clear()


def _array(size_bytes: int) -> Any:
    """Bytes of which the first, the middle one and the last tell the size."""
    array = np.zeros(size_bytes, np.uint8)
    if size_bytes:
        array[0], array[size_bytes // 2], array[-1] = 1, 2 + size_bytes % 83, 3 + size_bytes % 89
    return array


def _description(size_bytes: int) -> tuple[int, ...]:
    array = _array(size_bytes)
    return size_bytes, *(int(array[place]) if size_bytes else 0 for place in (0, size_bytes // 2, -1))


@pytest.fixture(scope="module")
def actors() -> Iterator[tuple[Any, Any]]:
    crossfade.init(preload=TORCH)
    actor = crossfade.remote(Carrier)
    yield actor.remote(), actor.remote()
    crossfade.shutdown()


@pytest.fixture(params=TRANSPORTS, scope="module")
def there_and_back(request: pytest.FixtureRequest, actors: Any) -> Iterator[Any]:
    """Sends a value to the first actor, on to the second, and back."""
    if request.param == "gloo":
        pytest.importorskip("torch")
    first, second = actors
    middle = first.same.bind(crossfade.InputNode()).with_tensor_transport(request.param)
    with second.same.bind(middle).compile(max_inflight=2) as graph:
        yield lambda value: graph.execute(value).get(timeout=60)


def _around(*sizes_bytes: int) -> list[int]:
    return sorted({size + step for size in sizes_bytes for step in (-1, 0, 1) if size + step >= 0})


# What an array's message has before its memory is less than 192 bytes, a pickle's frame less than 64.
BOUNDARIES = [
    *_around(0, 1, PAGE_BYTES, 2 * PAGE_BYTES, 1 << 16, 2 * MIB),
    *range(RECORD_BYTES - 8 - 192, RECORD_BYTES + 2, 7),
]


@pytest.mark.parametrize("kind", [bytes, bytearray, str, np.frombuffer])
def test_sizes_around_every_boundary(there_and_back: Any, kind: Any) -> None:
    for size in BOUNDARIES:
        sent = "x" * size if kind is str else _array(size) if kind is np.frombuffer else kind(_array(size))
        came = there_and_back(sent)
        if kind is np.frombuffer:
            assert came.dtype == sent.dtype
            assert came.tobytes() == sent.tobytes(), size
        else:
            assert type(came) is kind
            assert came == sent, size


def test_sizes_around_the_inline_limit_byte_by_byte(there_and_back: Any) -> None:
    for size in range(RECORD_BYTES - 200, RECORD_BYTES + 8):
        sent = bytes(_array(size))
        assert there_and_back(sent) == sent
        assert there_and_back(np.frombuffer(sent, np.uint8)).tobytes() == sent


@pytest.mark.parametrize("size_bytes", [*_around(16 * MIB), 33 * MIB])
def test_sizes_around_the_split_copy(there_and_back: Any, size_bytes: int) -> None:
    sent = np.arange(size_bytes, dtype=np.uint32).astype(np.uint8)
    assert np.array_equal(there_and_back(sent), sent)


VALUES: dict[str, Any] = {
    "none": None,
    "big int": -(1 << 100_000),
    "nan": [float("inf"), -0.0],
    "complex": 1j,
    "empty str": "",
    "surrogates": "\udcff\U0001f600\0",
    "empty containers": [(), [], {}, set(), frozenset(), b"", bytearray()],
    "nested": [{"a": ({1, 2}, [b"x" * 2000])}],
    "object": Plain(a=1, b=[Plain(c=2)]),
    "lambda": None,
    "class": Plain,
    "exception": None,
    "slice": slice(1, 2),
    "range": range(10**20),
    "memory in pickle": pickle.dumps([1]),
}


@pytest.mark.parametrize("name", VALUES)
def test_python_values(there_and_back: Any, name: str) -> None:
    assert there_and_back(VALUES[name]) == VALUES[name] or name == "class"


def test_functions_and_errors_are_values(there_and_back: Any) -> None:
    assert there_and_back(lambda x: x + 1)(1) == 2
    came = there_and_back(ValueError("a value, not raised"))
    assert type(came) is ValueError
    assert came.args == ("a value, not raised",)


def test_deep_nesting(there_and_back: Any) -> None:
    deep: Any = []
    for _ in range(300):
        deep = [deep]
    assert there_and_back(deep) == deep


def test_nesting_deeper_than_pickle_goes_is_an_error_and_no_more(there_and_back: Any) -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RecursionError):
        there_and_back(deep)
    while deep:  # the interpreter itself is not made to take so deep a list apart
        deep = deep.pop()
    assert there_and_back(1) == 1


def test_memoryviews_arrive_as_their_bytes(there_and_back: Any) -> None:
    for sent in (memoryview(b"abc"), memoryview(bytearray(5000))[::2], np.arange(3000).data):
        assert there_and_back(sent) == sent.tobytes()


STRUCTURED = np.dtype([("x", "f8"), ("name", "U5"), ("sub", [("a", "i2"), ("b", "u1", (2, 2))])])

ARRAYS: dict[str, Any] = {
    "empty": np.empty((0, 3)),
    "empty in the middle": np.empty((2, 0, 3), np.int8),
    "zero-dim": np.array(5.0),
    "scalar": np.float32(2.5),
    "bool": np.array([True, False]),
    "fortran": np.asfortranarray(np.arange(60_000.0).reshape(200, 300)),
    "transposed": np.arange(60_000).reshape(200, 300).T,
    "strided": np.arange(100_000)[::3],
    "backwards": np.arange(100_000)[::-1],
    "broadcast": np.broadcast_to(np.arange(1000), (50, 1000)),
    "structured": np.zeros(2000, STRUCTURED),
    "void": np.zeros(1000, "V3"),
    "object": np.array([1, "a", None, [1, 2]], dtype=object),
    "strings": np.array(["a", "bcd"] * 1000),
    "bytes": np.array([b"a", b"bcd"] * 1000),
    "dates": np.arange("2000-01-01", "2004-01-01", dtype="M8[D]"),
    "durations": np.arange(2000).astype("m8[us]"),
    "no dates": np.array([], "M8[s]"),
    "big-endian": np.arange(2000, dtype=">i4"),
    "long double": np.arange(2000, dtype=np.longdouble),
    "half": np.arange(2000, dtype=np.float16),
    "complex": np.arange(2000, dtype=np.complex64),
    "masked": np.ma.array(np.arange(1000), mask=np.arange(1000) % 2 == 0),
    "matrix of 32 dimensions": np.arange(2).reshape((1,) * 31 + (2,)),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("is_inside", [False, True])
def test_arrays(there_and_back: Any, name: str, is_inside: bool) -> None:
    sent = ARRAYS[name]
    came = there_and_back({"a": [sent, 1]})["a"][0] if is_inside else there_and_back(sent)
    assert type(came) is type(sent)
    assert came.dtype == sent.dtype
    assert came.shape == sent.shape
    assert repr(came.tolist()) == repr(sent.tolist())


def test_one_array_twice_in_a_value_stays_one(there_and_back: Any) -> None:
    array = np.arange(5000)
    one, other, part = there_and_back((array, array, array[10:20]))
    assert one is other
    assert part[0] == 10


def _dtypes() -> list[str]:
    names = (
        "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128 uint16 uint32 uint64"
    )
    return [*names.split(), "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", _dtypes())
def test_tensors_of_every_dtype(there_and_back: Any, dtype: str) -> None:
    torch: Any = pytest.importorskip("torch")
    for shape in ((), (0,), (3,), (2, 0, 3), (50, 60)):
        sent = (torch.arange(max(1, int(np.prod(shape)))) % 2).to(getattr(torch, dtype))[: int(np.prod(shape))]
        sent = sent.reshape(shape)
        came = there_and_back(sent)
        assert came.dtype is sent.dtype
        assert came.shape == sent.shape
        assert came.reshape(-1).view(torch.uint8).tolist() == sent.reshape(-1).view(torch.uint8).tolist()


def test_tensors_of_every_layout(there_and_back: Any) -> None:
    torch: Any = pytest.importorskip("torch")
    base: Any = torch.arange(60_000.0).reshape(200, 300)
    leaf: Any = torch.ones(1000, requires_grad=True)
    for sent in (base.T, base[::2, 3:50], base.expand(2, 200, 300), base[5], base.flip(0), leaf, leaf * 2, base.conj()):
        came = there_and_back(sent)
        assert torch.equal(came, sent)
        assert came.requires_grad == sent.requires_grad
    assert torch.equal(there_and_back({"inside": base.T})["inside"], base.T)
    parameter = there_and_back(torch.nn.Parameter(torch.ones(2000)))
    assert type(parameter) is torch.nn.Parameter
    assert parameter.requires_grad
    sparse = there_and_back(torch.eye(3).to_sparse())
    assert sparse.is_sparse
    assert torch.equal(sparse.to_dense(), torch.eye(3))
    assert torch.equal(there_and_back(torch.view_as_complex(torch.ones(500, 2)).conj()), torch.full((500,), 1 - 1j))
    negative = torch.view_as_complex(torch.ones(500, 2)).conj().imag
    assert negative.is_neg()
    assert torch.equal(there_and_back(negative), torch.full((500,), -1.0))


# Rings that grow


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("max_inflight", [1, 3])
def test_values_that_grow_and_shrink_and_grow(actors: Any, transport: str, max_inflight: int) -> None:
    if transport == "gloo":
        pytest.importorskip("torch")
    first, second = actors
    made = first.make.bind(crossfade.InputNode()).with_tensor_transport(transport)
    sizes = [*(int(1.3**k) for k in range(62)), *(3_000_000 // k for k in range(1, 60)), 5_000_000, 0, 1, 4_000_000]
    with second.describe.bind(made).compile(max_inflight=max_inflight) as graph:
        refs: list[Any] = []
        for index, size in enumerate(sizes):
            if len(refs) - index + max_inflight <= 0 or index >= max_inflight:
                done = index - max_inflight
                assert refs[done].get(timeout=30) == _description(sizes[done])
            refs.append(graph.execute(size))
        assert [ref.get(timeout=30) for ref in refs] == [_description(size) for size in sizes]


def test_a_ring_that_grows_while_its_views_are_kept(actors: Any) -> None:
    first, second = actors
    with first.same.bind(crossfade.InputNode()).compile(max_inflight=1) as graph:
        kept = [graph.execute(_array(2000 * k)).get() for k in range(1, 40)]
        assert [array.tobytes() for array in kept] == [_array(2000 * k).tobytes() for k in range(1, 40)]
    with second.keep.bind(first.make.bind(crossfade.InputNode())).compile(max_inflight=1) as graph:
        assert [graph.execute(3000 * k).get() for k in range(1, 20)] == list(range(1, 20))
    second.release.remote().get()


def test_values_of_50_mb_through_set_aside_buffers(actors: Any) -> None:
    first, second = actors
    made = first.make.bind(crossfade.InputNode())
    with second.describe.bind(made).compile(max_inflight=1, buffer_bytes=1000) as graph:
        for size in (10, 50_000_000, 999, 60_000_000):
            assert graph.execute(size).get(timeout=60) == _description(size)


def test_more_than_there_is_memory_for_is_an_error_and_no_more(actors: Any) -> None:
    first, second = actors
    with second.describe.bind(first.make.bind(crossfade.InputNode())).compile() as graph:
        with pytest.raises((MemoryError, OSError)):
            graph.execute(1 << 46).get(timeout=60)  # numpy itself refuses
        assert graph.execute(10).get(timeout=60) == _description(10)


LARGE = [(1 << 31) + 1, 3_000_000_000, (1 << 32) - 1, 1 << 32, (1 << 32) + 1]
"""The first one is one byte more than fits into 31 bits."""


@pytest.mark.soak
@pytest.mark.parametrize(("size_bytes", "transport"), list(product(LARGE, TRANSPORTS))[: num(1, 10)])
def test_several_gigabytes(actors: Any, transport: str, size_bytes: int) -> None:
    if transport == "gloo":
        pytest.importorskip("torch")
    needed_bytes = (
        3 * size_bytes
    )  # the value, its slot or receive buffer with an eighth to spare, and some for all others
    if available_bytes() < needed_bytes:
        pytest.skip(f"{needed_bytes >> 30} GiB of memory are needed and {available_bytes() >> 30} are there")
    first, second = actors
    made = first.make.bind(crossfade.InputNode()).with_tensor_transport(transport)
    with second.describe.bind(made).compile(max_inflight=1) as graph:
        assert graph.execute(size_bytes).get(timeout=100) == _description(size_bytes)
