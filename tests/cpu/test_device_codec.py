"""Values taken apart into a message and tensors beside it, and put together again; CPU tensors stand for device ones."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.channels.values.device_codec import ALIGN_BYTES, Split, Splitter, join  # noqa: E402
from crossfade.device.borrowed import tensor_on  # noqa: E402
from crossfade.device.driver import HOST  # noqa: E402
from crossfade.device.host_driver import HostDriver  # noqa: E402


def all_in_one(tensor: Any) -> int | None:
    return 0


class Slots:
    """Memory that the tensors of each lane are copied into, and views on it."""

    def __init__(self, parts: Split) -> None:
        self.driver = HostDriver(1.0)
        self.addresses = {lane: self.driver.allocate(size, "slot") for lane, size in parts.lane_bytes.items()}
        for lane, offset, tensor in parts.tensors:
            size_bytes = tensor.numel() * tensor.itemsize
            assert offset % ALIGN_BYTES == 0
            assert offset + size_bytes <= parts.lane_bytes[lane]
            assert tensor.is_contiguous()
            self.driver.copy(self.addresses[lane] + offset, tensor.data_ptr(), size_bytes, 0)

    def opened(self, notes: memoryview) -> Any:
        return self.make

    def make(self, lane: int, offset: int, dtype: Any, shape: tuple[int, ...]) -> Any:
        return tensor_on(self.addresses[lane] + offset, shape, dtype, HOST, keep=self)


def there_and_back(value: object, lane_of: Callable[[Any], int | None] = all_in_one) -> Any:
    parts = Splitter(lane_of).split(value)
    message = memoryview(bytearray(parts.message.to_bytes()))
    return join(message, Slots(parts).opened)


@dataclass
class Batch:
    name: str
    tokens: Any
    more: dict[str, Any]


DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (0, 3), (3, 5), (2, 300, 7)])
def test_tensors_of_all_types_and_shapes(dtype: Any, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    got = there_and_back(tensor)
    assert got.dtype is dtype
    assert torch.equal(got, tensor)


def test_no_byte_of_a_tensor_is_in_the_message() -> None:
    parts = Splitter(all_in_one).split({"a": torch.full((1000,), 7, dtype=torch.uint8)})
    assert parts.message.size_bytes < 400
    assert parts.lane_bytes == {0: 1000}


def test_containers_and_objects() -> None:
    a, b = torch.arange(5), torch.rand(3, 4)
    tuple_, batch, numbers = there_and_back(((a, 3), Batch("x", b, {"list": [a, None, "text"]}), [1, 2.5]))
    assert torch.equal(tuple_[0], a)
    assert tuple_[1] == 3
    assert batch.name == "x"
    assert torch.equal(batch.tokens, b)
    assert torch.equal(batch.more["list"][0], a)
    assert batch.more["list"][1:] == [None, "text"]
    assert numbers == [1, 2.5]


def test_one_tensor_in_two_places_goes_once() -> None:
    tensor = torch.arange(10)
    value = [tensor, {"again": tensor}]
    assert len(Splitter(all_in_one).split(value).tensors) == 1
    got = there_and_back(value)
    assert got[0] is got[1]["again"]


def test_what_is_not_contiguous_becomes_so() -> None:
    tensor = torch.arange(24).reshape(4, 6)
    for view in (tensor.t(), tensor[:, ::2], tensor[1:3], tensor[0].expand(3, 6)):
        assert torch.equal(there_and_back(view), view)


def test_conjugate_and_negative_views() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    for view in (tensor.conj(), tensor.conj().imag):
        got = there_and_back(view)
        assert torch.equal(got, view)
        assert not got.is_conj()
        assert not got.is_neg()


def test_lanes_have_layouts_of_their_own() -> None:
    """Small ones by lane 1, large ones by lane 0, float64 stays in the message with the arrays."""

    def lane_of(tensor: Any) -> int | None:
        return None if tensor.dtype is torch.float64 else int(tensor.numel() < 100)

    value = [
        torch.arange(10),
        torch.ones(3, dtype=torch.float64),
        np.arange(50),
        torch.arange(1000),
        torch.arange(20),
        b"x" * 10,
    ]
    parts = Splitter(lane_of).split(value)
    assert [(placed.lane, placed.offset, placed.size_bytes) for placed in parts.tensors] == [
        (1, 0, 80),
        (0, 0, 8000),
        (1, 256, 160),
    ]
    assert parts.lane_bytes == {0: 8000, 1: 416}
    got = there_and_back(value, lane_of)
    assert got[5] == value[5]
    assert not got[2].flags.writeable
    for one, other in zip(got[:5], value[:5], strict=True):
        assert np.array_equal(one, other)


def test_without_device_tensors_nothing_lies_beside() -> None:
    value = {"n": 3, "array": np.arange(10), "tensor": torch.ones(2)}
    parts = Splitter(lambda tensor: None).split(value)
    assert parts.tensors == ()
    assert parts.lane_bytes == {}
    got = there_and_back(value, lambda tensor: None)
    assert got["n"] == 3
    assert torch.equal(got["tensor"], value["tensor"])


def test_modules_and_parameters() -> None:
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
    got = there_and_back(module)
    assert len(Splitter(all_in_one).split(module).tensors) == 4
    assert all(type(each) is torch.nn.Parameter and each.requires_grad for each in got.parameters())
    x = torch.rand(5, 3)
    assert torch.equal(got(x), module(x))


def test_requires_grad_goes_along() -> None:
    got = there_and_back([torch.ones(2, requires_grad=True) * 2, torch.ones(2)])
    assert [each.requires_grad for each in got] == [True, False]
    assert got[0].grad_fn is None


def test_sparse_tensors_are_sent_as_their_parts() -> None:
    sparse = torch.eye(4).to_sparse()
    assert len(Splitter(all_in_one).split(sparse).tensors) == 2
    assert torch.equal(there_and_back(sparse).to_dense(), torch.eye(4))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr], ids=str)
def test_sparse_tensors_of_all_layouts_are_kept_by_nobody(layout: Any) -> None:
    dense = torch.tensor([[1.0, 0, 2, 0], [0, 0, 0, 3]])
    sparse = dense.to_sparse(layout=layout, blocksize=(1, 2) if layout is torch.sparse_bsr else None)
    got = there_and_back([sparse, sparse])
    assert got[0] is got[1]
    assert got[0].layout is layout
    assert torch.equal(got[0].to_dense(), dense)
    gone = weakref.ref(got[0])
    del got
    assert gone() is None


def test_what_only_cloudpickle_takes() -> None:
    tensor = torch.arange(6)
    value = {"call": lambda x: x + 1, "tensor": tensor}
    assert len(Splitter(all_in_one).split(value).tensors) == 1
    got = there_and_back(value)
    assert torch.equal(got["call"](got["tensor"]), tensor + 1)


def test_what_cannot_be_pickled_says_so() -> None:
    with pytest.raises(TypeError, match="pickle"):
        Splitter(all_in_one).split([torch.ones(1), (n for n in range(3))])


def test_views_keep_what_makes_them() -> None:
    """A slot is let go of when the last view of any of a value's tensors dies."""
    parts = Splitter(all_in_one).split([torch.arange(5), torch.arange(7)])
    slots = Slots(parts)
    held: list[str] = []

    class Lease:
        def __del__(self) -> None:
            held.append("ended")

    lease = Lease()
    message = memoryview(bytearray(parts.message.to_bytes()))
    first, second = join(
        message,
        lambda notes, lease=lease: (
            lambda lane, offset, dtype, shape: tensor_on(  # type: ignore[misc]
                slots.addresses[lane] + offset, shape, dtype, HOST, keep=lease
            )
        ),
    )
    del lease
    view = second[3:]
    del second
    del first
    assert held == []
    assert view.tolist() == [3, 4, 5, 6]
    del view
    assert held == ["ended"]


def test_a_damaged_message_is_refused() -> None:
    parts = Splitter(all_in_one).split([torch.arange(5)])
    slots = Slots(parts)
    whole = bytearray(parts.message.to_bytes())
    at = parts.message.buffers[1][0]
    whole[at + 16] += 8  # the length in the table
    with pytest.raises(ValueError, match="does not have 48 bytes"):
        join(memoryview(whole), slots.opened)
    for broken in (b"", b"\0" * 16, whole[:40]):
        with pytest.raises((ValueError, EOFError)):
            join(memoryview(bytearray(broken)), slots.opened)
