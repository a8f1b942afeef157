"""How the operands of a product lie (`crossfade.ops.signaled.operands`)."""

from __future__ import annotations

from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

from crossfade.ops.signaled.operands import Operands, find_unit  # noqa: E402


def half(*shape: int) -> Any:
    return torch.empty(*shape, dtype=torch.float16)


@pytest.mark.parametrize(
    ("values", "unit"), [((), 8), ((0,), 8), ((64, 24), 8), ((64, 12), 4), ((6, 64), 2), ((64, 7), 1), ((1 << 40,), 8)]
)
def test_a_unit_divides_all(values: tuple[int, ...], unit: int) -> None:
    assert find_unit(*values) == unit


def test_layouts() -> None:
    assert Operands.of(half(48, 32), half(32, 24)) == Operands("float16", 48, 24, 32, 32, 24, False, True)
    assert Operands.of(half(48, 32), half(24, 32).T) == Operands("float16", 48, 24, 32, 32, 32, True, True)
    assert Operands.of(half(48, 64)[:, :32], half(32, 24)).a_stride == 64


def test_what_descriptors_cannot_describe() -> None:
    assert Operands.of(half(8, 36), half(36, 24)) == Operands("float16", 8, 24, 36, 36, 24, False, False)
    assert not Operands.of(half(8, 37), half(37, 24)).is_by_descriptor
    assert not Operands.of(half(9, 32)[:, 4:28], half(24, 24)).is_by_descriptor
    assert not Operands.of(half(8, 32), half(32, 24), has_descriptors=False).is_by_descriptor
    # The length of a row is no matter where the rows lie well.
    assert Operands.of(half(8, 40)[:, :37], half(37, 24)).is_by_descriptor


def test_sides_of_one_element_have_any_stride() -> None:
    a, b = half(4, 32)[:1], half(32, 1)
    assert Operands.of(a.as_strided((1, 32), (5, 1)), b) == Operands("float16", 1, 1, 32, 32, 1, False, False)
    row = half(1, 16).as_strided((1, 16), (3, 1))
    assert Operands.of(half(8, 1), row) == Operands("float16", 8, 16, 1, 1, 16, False, False)


@pytest.mark.parametrize(
    ("a", "b", "what"),
    [
        (half(4, 8), half(9, 4), r"shapes \(4, 8\) and \(9, 4\)"),
        (half(2, 4, 8), half(8, 4), "shapes"),
        (half(4, 8).float(), half(8, 4), "torch.float32 and torch.float16"),
        (half(4, 8).float(), half(8, 4).float(), "torch.float32"),
        (half(0, 8), half(8, 4), "an empty product: M 0"),
        (half(8, 4).T, half(8, 4), "strides"),
        (half(4, 8), half(16, 8)[::2, ::2], "strides"),
    ],
)
def test_what_is_no_such_product_is_refused(a: Any, b: Any, what: str) -> None:
    with pytest.raises(ValueError, match=f"{what}.*\nhint: "):
        Operands.of(a, b)
