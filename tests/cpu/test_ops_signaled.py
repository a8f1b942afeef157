"""`crossfade.ops.matmul_signaled` on CPU tensors; and what it does on GPUs, with Triton's interpreter in the GPU's place."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="operators take torch tensors")

from crossfade.ops.signaled import product  # noqa: E402
from crossfade.ops.signaled.product import matmul_signaled, prepare_signaled, reference  # noqa: E402
from crossfade.ops.signaled.sides import RowGroup  # noqa: E402
from tests.helpers.triton_programs import LIMIT_S, needs_triton, run, said  # noqa: E402

A, B = torch.zeros(4, 3), torch.zeros(3, 2)


def integers(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randint(-3, 4, shape).to(dtype)


def ignore(group: RowGroup) -> None:
    """Nothing."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("lead", [(300,), (2, 150), (1,), (3, 0)])
def test_groups_come_in_order_each_when_it_is_done(lead: tuple[int, ...], is_transposed: bool, dtype: Any) -> None:
    a, bias = integers(*lead, 20, dtype=dtype), integers(40, dtype=dtype)
    b = integers(40, 20, dtype=dtype).t() if is_transposed else integers(20, 40, dtype=dtype)
    out, next_row = torch.full((*lead, 40), torch.nan, dtype=dtype), 0
    copies: list[Any] = []
    wanted = (a.double() @ b.double() + bias.double()).to(dtype)
    flat = out.view(-1, 40)

    def on_group(group: RowGroup) -> None:
        nonlocal next_row
        assert group.rows.start == next_row
        assert group.number == len(copies)
        assert group.stream is None
        assert group.tensor.data_ptr() == flat[group.rows].data_ptr()
        copies.append(group.tensor.clone())
        next_row = group.rows.stop
        assert bool(flat[next_row:].isnan().all())  # the rest comes later

    assert matmul_signaled(a, b, on_group=on_group, bias=bias, out=out, group_rows=128) is out
    assert next_row == len(flat)
    assert torch.equal(out, wanted)
    if copies:
        assert torch.equal(torch.cat(copies).view(wanted.shape), wanted)
    told: list[Any] = []
    assert torch.equal(reference(a, b, on_group=told.append, bias=bias), wanted)
    assert [group.rows for group in told] == [slice(0, len(flat))]


def test_rows_of_groups() -> None:
    def rows(m: int, n: int, **options: Any) -> list[int]:
        seen: list[int] = []
        matmul_signaled(
            torch.zeros(m, 1),
            torch.zeros(1, n),
            on_group=lambda group: seen.append(group.rows.stop - group.rows.start),
            **options,
        )
        return seen

    assert rows(8192, 1) == [8192]  # one column of tiles: 64 tiles in all
    assert rows(1024, 8192) == [512, 512]  # each has 128 tiles
    assert rows(8192, 1024) == [4096, 4096]
    assert rows(1000, 64, group_rows=256) == [256, 256, 256, 232]
    assert rows(300, 64, group_rows=1) == [128, 128, 44]
    assert rows(5, 0) == []
    for group_rows in (0, -1):
        with pytest.raises(ValueError, match="piece_rows is"):
            rows(5, 5, group_rows=group_rows)


def test_a_bias_with_gaps_is_packed_for_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(product, "_by_products", lambda given, plan, on_group: seen.append(given.bias))
    bias = integers(2, 2)[:, 0]
    matmul_signaled(A, B, on_group=ignore, bias=bias)
    assert seen[0].is_contiguous()
    assert torch.equal(seen[0], bias)


def test_a_callback_that_raises_ends_it() -> None:
    told = []

    def on_group(group: RowGroup) -> None:
        told.append(group)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        matmul_signaled(torch.zeros(512, 4), torch.zeros(4, 8), on_group=on_group, group_rows=128)
    assert len(told) == 1


def test_other_operands() -> None:
    a, b = integers(6, 8).t(), integers(6, 4)  # no row-major matrix
    assert torch.equal(matmul_signaled(a, b, on_group=ignore), a @ b)
    empty = torch.zeros(3, 0), torch.zeros(0, 2)
    assert torch.equal(matmul_signaled(*empty, on_group=ignore, bias=torch.ones(2)), torch.ones(3, 2))
    out = torch.zeros(8, 4)
    prepare_signaled(a, b, out=out)
    assert torch.equal(out, a @ b)
    with torch.no_grad():
        assert not matmul_signaled(a.clone().requires_grad_(), b, on_group=ignore).requires_grad


@pytest.mark.parametrize(
    ("a", "b", "more", "error", "text"),
    [
        ([1.0], B, {}, TypeError, "a of matmul_signaled is a list\nhint: give a torch tensor"),
        (A, B, {"bias": 3}, TypeError, "bias of matmul_signaled is a int"),
        (A.to("meta"), B, {}, ValueError, "a of matmul_signaled is on meta"),
        (A.to_sparse(), B, {}, ValueError, "torch.sparse_coo"),
        (A.clone().requires_grad_(), B, {}, ValueError, r"a of .* requires grad.*\nhint: detach\(\) it"),
        (A.int(), B.int(), {}, TypeError, "takes no torch.int32\nhint: one of bfloat16, "),
        (A, B.double(), {}, ValueError, "b is torch.float64 on cpu"),
        (A, B.t(), {}, ValueError, r"a of matmul_signaled is of shape \[4, 3\] and b of \[2, 3\]"),
        (A[0], B, {}, ValueError, r"of shape \[3\]"),
        (A, torch.zeros(3, 4)[:, ::2], {}, ValueError, "neither row-major nor the transpose"),
        (A, B, {"bias": torch.zeros(3)}, ValueError, r"has to be of shape \[2\]"),
        (A, B, {"out": torch.zeros(4, 3)}, ValueError, r"contiguous, of shape \[4, 2\]"),
        (A, B, {"out": torch.zeros(2, 4).t()}, ValueError, r"contiguous, of shape \[4, 2\]"),
        (A, B, {"out": A.view(-1)[:8].view(4, 2)}, ValueError, "cannot write into its input"),
    ],
)
def test_what_does_not_do(a: Any, b: Any, more: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        matmul_signaled(a, b, on_group=ignore, **more)


@needs_triton
@pytest.mark.timeout(LIMIT_S + 20)
def test_the_kernels_signals_in_the_interpreter() -> None:
    assert "3 signaled products" in said(run("tests.helpers.tile_signaled", interprets=True))
