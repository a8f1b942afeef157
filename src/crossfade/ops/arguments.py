"""What operators may be given, and what they say when it is something else."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from crossfade.ops.shape import ITEM_BYTES, Layout
from crossfade.peers.arguments import check_overlap, check_tensor, describe

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

__all__ = [
    "DTYPES",
    "Given",
    "check_operands",
    "check_out",
    "layout_of",
    "packed",
    "rows_for_each",
    "store",
]

DTYPES = tuple(ITEM_BYTES)
"""Element types of operators; all but float64 are added in float32."""


class Given(NamedTuple):
    """What was given, checked.

    Attributes:
        a: (M, K): all leading dimensions are rows.
        b: (K, N), in one of the layouts.
        bias: (N,), contiguous, or None.
    """

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None


def check_operands(name: str, group: PeerGroup, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> Given:
    """Checks the inputs of an operator.

    Args:
        name: of the operator.
        group: on whose device they have to be.
        a: (..., K), 2 dimensions or more. One that is not contiguous may be copied, on the current stream.
        b: (K, N).
        bias: (N,), or None. Likewise: kernels read it by its address alone.

    Raises:
        TypeError: one is no tensor, or of a type that operators do not take.
        ValueError: devices, shapes, types or layouts do not fit.
    """
    check_tensor(group, f"a of {name}", a)
    check_tensor(group, f"b of {name}", b)
    _check_type(name, a)
    if a.dim() < 2 or b.dim() != 2 or a.shape[-1] != b.shape[0]:
        raise ValueError(
            f"a of {name} is of shape {list(a.shape)} and b of {list(b.shape)}\nhint: they have to be (..., K) and (K, N)"
        )
    if b.dtype != a.dtype:
        raise ValueError(f"a of {name} is {a.dtype}, and b is {b.dtype}\nhint: give both the same type")
    layout_of(name, b)
    if bias is not None:
        check_tensor(group, f"bias of {name}", bias)
        if bias.dtype != a.dtype or tuple(bias.shape) != (b.shape[1],):
            raise ValueError(
                f"bias of {name} is {describe(bias)}\nhint: it has to be {a.dtype} of shape [{b.shape[1]}]"
            )
    rows = packed(group, a).view(_num_rows(a), a.shape[-1])
    return Given(rows, b, None if bias is None else packed(group, bias))


def _check_type(name: str, a: torch.Tensor) -> None:
    dtype = str(a.dtype).removeprefix("torch.")
    if dtype in DTYPES:
        return
    if dtype.startswith("float8"):
        raise TypeError(
            f"{name} takes no {a.dtype}\nhint: torch._scaled_mm into bfloat16, then a collective of crossfade.peers; "
            "there is no overlapped fp8 product"
        )
    raise TypeError(f"{name} takes no {a.dtype}\nhint: one of {', '.join(DTYPES)}")


def layout_of(name: str, b: torch.Tensor) -> Layout:
    """The layout of ``b``.

    Raises:
        ValueError: it has neither.
    """
    if b.is_contiguous():
        return Layout.ROWS
    if b.t().is_contiguous():
        return Layout.COLUMNS
    raise ValueError(
        f"b of {name} has strides {list(b.stride())}, and is neither row-major nor the transpose of a contiguous matrix\n"
        "hint: b.contiguous()"
    )


def packed(group: PeerGroup, tensor: torch.Tensor) -> torch.Tensor:
    """Contiguous; a copy of it where it must be, made in its place among what the current stream does."""
    if tensor.is_contiguous():
        return tensor
    made = tensor.new_empty(tensor.shape)
    group.do(lambda: made.copy_(tensor))
    return made


def _num_rows(a: torch.Tensor) -> int:
    num = 1
    for length in a.shape[:-1]:
        num *= length
    return num


def check_out(
    name: str,
    group: PeerGroup,
    given: Given,
    out: torch.Tensor | None,
    shape: tuple[int, ...],
    what: str = "out",
    place: int | None = None,
) -> torch.Tensor:
    """Checks an output, or makes it; gives a contiguous tensor to fill, which `store` brings into the output.

    Args:
        name: of the operator.
        group: on whose device it has to be.
        given: to the operator.
        out: what the caller gave.
        shape: what it has to be.
        what: what it is called.
        place: where it may lie, seen from ``a``; None for nowhere near.

    Raises:
        TypeError: it is no tensor.
        ValueError: it does not fit, or lies over an operand.
    """
    if out is None:
        return given.a.new_empty(shape)
    check_tensor(group, f"{what} of {name}", out)
    if tuple(out.shape) != shape or out.dtype != given.a.dtype:
        raise ValueError(
            f"{what} of {name} is {describe(out)}\nhint: it has to be {given.a.dtype} of shape {list(shape)}"
        )
    for each in given:
        if each is not None:
            flat = each if each.is_contiguous() else each.t()
            check_overlap(name, flat, out, place if each is given.a else None)
    return out if out.is_contiguous() else out.new_empty(shape)


def store(group: PeerGroup, out: torch.Tensor | None, filled: torch.Tensor) -> torch.Tensor:
    """The output that the caller gave, with what is in ``filled``; or ``filled``, if the caller gave none."""
    if out is None or out is filled:
        return filled
    given = out
    group.do(lambda: given.copy_(filled))
    return given


def rows_for_each(name: str, group: PeerGroup, num_rows: int) -> int:
    """How many rows each rank gets.

    Raises:
        ValueError: the number of ranks does not divide them.
    """
    if num_rows % group.num_ranks:
        raise ValueError(
            f"a of {name} has {num_rows} rows\nhint: their number has to be a multiple of the number of ranks, "
            f"{group.num_ranks}"
        )
    return num_rows // group.num_ranks
