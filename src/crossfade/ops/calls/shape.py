"""What one call of an operator computes, as far as the choice of an algorithm depends on it.

Letters: on each of W ranks a product of (M, K) by (K, N) gives (M, N).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["ITEM_BYTES", "Layout", "Operator", "Shape", "takes_fused"]


class Operator(StrEnum):
    """The functions for which an algorithm is chosen."""

    REDUCE_SCATTER = "matmul_reduce_scatter"
    ALL_REDUCE = "matmul_all_reduce"
    ALL_GATHER = "all_gather_matmul"
    ALL_TO_ALL = "matmul_all_to_all"


class Layout(StrEnum):
    """How ``b`` lies in memory; ``a`` is row-major."""

    ROWS = "nn"
    """Row-major: contiguous."""
    COLUMNS = "nt"
    """The transpose of a contiguous matrix, such as the weight of a linear layer."""


ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
"""Bytes of an element."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One product and its collective. All ranks have equal ones.

    Attributes:
        operator: the function's name, such as ``matmul_reduce_scatter``; one of `Operator` where it is to be done.
        m: rows of this rank's product; for ``all_gather_matmul`` those of all ranks. Where ranks have different numbers of rows
            (``matmul_all_to_all``) the most that one of them may have, so that all choose alike.
        n, k: its columns, and what is summed over.
        dtype: of the elements, as torch calls it, such as ``bfloat16``.
        layout: one of `Layout`.
        num_ranks: W.

    Raises:
        ValueError: a length is negative, or there is no rank, or a type is none of `ITEM_BYTES`.
    """

    operator: str
    m: int
    n: int
    k: int
    dtype: str
    layout: str
    num_ranks: int

    def __post_init__(self) -> None:
        if min(self.m, self.n, self.k) < 0 or self.num_ranks < 1:
            raise ValueError(f"{self} does not exist\nhint: lengths are not negative, and there is at least one rank")
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"there is no type {self.dtype!r} here\nhint: one of {', '.join(ITEM_BYTES)}")

    @property
    def item_bytes(self) -> int:
        """Of one element."""
        return ITEM_BYTES[self.dtype]

    @property
    def rows_of_a(self) -> int:
        """Of this rank's ``a``."""
        return self.m // self.num_ranks if self.operator == Operator.ALL_GATHER else self.m

    @property
    def bucket(self) -> Shape:
        """The shape that stands for this one and for others like it in choices: N and K are the same, M is not less.

        The rows of each rank are rounded up to 1, 2, 3, 4, 6, 8, 12, 16, ...: so M is a multiple of W, and at most half as large
        again (or W - 1 more).
        """
        rows = -(-self.m // self.num_ranks)
        return replace(self, m=self.num_ranks * _step_up(rows))

    def __str__(self) -> str:
        return f"{self.operator} {self.m},{self.n},{self.k} {self.dtype} {self.layout} x{self.num_ranks}"


def _step_up(rows: int) -> int:
    """The least of 0, 1, 2, 3, 4, 6, 8, 12, ... that is not less."""
    if rows <= 2:
        return rows
    power = 1 << (rows - 1).bit_length()
    middle = power // 4 * 3
    return middle if rows <= middle else power


def takes_fused(operator: Operator, lane: int, *, has_bias: bool) -> bool:
    """Whether torch's fused operators take such calls; where they do not, the algorithm ``fused`` is ``plain``."""
    return not lane and not (operator == Operator.REDUCE_SCATTER and has_bias)
