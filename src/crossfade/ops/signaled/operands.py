"""The shape of a product, and how its operands lie: what a kernel is chosen by. Needs no Triton."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.driver import HOST

if TYPE_CHECKING:
    from torch import Tensor

KIND_NAMES = ("float16", "bfloat16")
"""Element types of operands and results, as torch calls them; accumulation is in float32."""

KIND_BYTES = 2
"""Of an element."""
WIDEST = 8
"""Elements in 16 bytes."""

_FIRST_WITH_DESCRIPTORS = 9  # compute capability


def find_unit(*values: int) -> int:
    """The largest of 8, 4, 2 and 1 that divides all values: how many elements an access can have."""
    joined = WIDEST
    for value in values:
        joined |= value
    return joined & -joined


class Operands(NamedTuple):
    """A product and how its operands lie: calls with equal shapes share what is prepared."""

    kind: str  # element type, as torch calls it
    m: int  # m, n, k: rows, columns, depth
    n: int
    k: int
    a_stride: int  # a_stride, b_stride: elements from one row to the next; of b, rows as it lies in memory
    b_stride: int
    is_b_transposed: bool  # b is the transpose of a row-major (N, K)
    is_by_descriptor: bool  # its operands can be read by tensor descriptors, as the kernel does

    @classmethod
    def of(cls, a: Tensor, b: Tensor, *, has_descriptors: bool = True) -> Operands:
        """The shape of ``a @ b``."""
        if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
            raise ValueError(f"a product of shapes {tuple(a.shape)} and {tuple(b.shape)}\nhint: (M, K) and (K, N)")
        kind = str(a.dtype).removeprefix("torch.")
        if a.dtype != b.dtype or kind not in KIND_NAMES:
            raise ValueError(f"a product of {a.dtype} and {b.dtype}\nhint: both {' or both '.join(KIND_NAMES)}")
        (m, k), n = a.shape, b.shape[1]
        if not (m and n and k):
            raise ValueError(f"an empty product: M {m}, N {n}, K {k}\nhint: there is nothing to overlap")
        is_transposed = b.stride(1) != 1 and n > 1
        outer, inner = (1, 0) if is_transposed else (0, 1)
        if (a.stride(1) != 1 and k > 1) or (b.stride(inner) != 1 and b.shape[inner] > 1):
            raise ValueError(
                f"strides {a.stride()} and {b.stride()}\nhint: rows of a, and rows or columns of b, are contiguous"
            )
        a_stride = a.stride(0) if m > 1 else k
        b_stride = b.stride(outer) if b.shape[outer] > 1 else b.shape[inner]
        places = [tensor.data_ptr() // KIND_BYTES for tensor in (a, b)]
        is_by_descriptor = has_descriptors and find_unit(a_stride, b_stride, *places) == WIDEST
        return cls(kind, m, n, k, a_stride, b_stride, is_transposed, is_by_descriptor)


def has_descriptors(device: int) -> bool:
    """Whether a device copies tiles by tensor descriptors; the interpreter plays such a one."""
    return device == HOST or torch_or_raise().cuda.get_device_capability(device)[0] >= _FIRST_WITH_DESCRIPTORS
