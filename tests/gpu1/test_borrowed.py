"""One GPU: tensors in memory that torch does not own, made either way."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.device import borrowed  # noqa: E402
from crossfade.device.borrowed import TensorMaker  # noqa: E402

DTYPES = [
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    "complex128", "float8_e4m3fn", "uint16", "uint64",
]  # fmt: skip


class Kept:
    """Something whose end can be seen."""


@pytest.fixture(params=["of storages", "by the interface"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "of storages":
        if not borrowed._has_tensors_of_storages():
            pytest.skip("this torch makes no tensors of storages")
    else:
        monkeypatch.setattr(borrowed, "_has_tensors_of_storages", lambda: False)
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (7,), (3, 0), (2, 3, 5)])
def test_a_tensor_sees_the_memory_and_looks_like_any_other(way: str, dtype: str, shape: tuple[int, ...]) -> None:
    kind = getattr(torch, dtype)
    owner = torch.randint(0, 2, (64,), device="cuda").to(kind)
    tensor = TensorMaker(shape, kind, 0).make(owner.data_ptr(), owner)
    like = torch.empty(shape, dtype=kind, device="cuda")
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device) == (
        like.shape,
        like.stride(),
        like.dtype,
        like.device,
    )
    assert (
        torch.equal(tensor.reshape(-1).cpu().view(torch.uint8), owner[: tensor.numel()].cpu().view(torch.uint8))
        or not tensor.numel()
    )
    assert tensor.is_contiguous()


def test_what_is_kept_lives_as_long_as_the_last_view(way: str) -> None:
    owner = torch.arange(64, dtype=torch.float32, device="cuda")
    kept = Kept()
    seen = weakref.ref(kept)
    tensor = TensorMaker((8, 8), torch.float32, 0).make(owner.data_ptr(), kept)
    del kept
    views = [tensor[1:3], tensor.detach(), tensor.T, tensor.view(torch.int32), tensor.untyped_storage()]
    del tensor
    while views:
        gc.collect()
        assert seen() is not None
        views.pop()
    gc.collect()
    assert seen() is None


def test_autograd_autocast_and_captures_take_it(way: str) -> None:
    owner = torch.randint(-8, 8, (64,), device="cuda").float()  # their sums are exact
    tensor = TensorMaker((8, 8), torch.float32, 0).make(owner.data_ptr(), owner)
    weight = torch.randn(8, 8, device="cuda", requires_grad=True)
    (tensor @ weight).sum().backward()
    assert torch.equal(weight.grad, tensor.sum(0)[:, None].expand(8, 8))
    asked = tensor.clone().requires_grad_()
    (asked * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(asked.grad, torch.full((8, 8), 2.0, device="cuda"))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert (tensor @ tensor).dtype is torch.bfloat16
    leaf = tensor.requires_grad_()
    (leaf * 3).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(leaf.grad, torch.full((8, 8), 3.0, device="cuda"))
    with torch.inference_mode():
        assert torch.equal(leaf + 1, owner.view(8, 8) + 1)
