"""Runs the kernels of `crossfade.peers.triton_kernels` in Triton's interpreter, on CPU memory, against plain torch.

``TRITON_INTERPRET=1 python -m tests.helpers.peer_kernels``
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from crossfade.peers.memory import Kind, Reduction
from crossfade.peers.triton_kernels import KINDS, TritonKernels
from tests.helpers.peer_cases import expected, make, same_bits

LENGTHS = (1, 4096, 9001)


def check_copy(size_bytes: int, shift: int) -> None:
    """Neither a byte too few nor one too many."""
    source = make((size_bytes + 64,), "uint8", size_bytes)
    target = torch.full_like(source, 255)
    TritonKernels(0, 0, 2, num_programs=2).copy(0, target.data_ptr() + shift, source.data_ptr() + shift, size_bytes)
    wanted = torch.full_like(source, 255)
    wanted[shift : shift + size_bytes] = source[shift : shift + size_bytes]
    assert torch.equal(target, wanted), (size_bytes, shift)


def check_sum(dtype: str, rank: int, num_ranks: int, length: int, shift: int, num_targets: int) -> None:
    """Bit for bit the sum in the order of the ranks; what lies behind it is left alone."""
    kind = getattr(torch, dtype)
    inputs = [make((length,), dtype, k) for k in range(num_ranks)]
    slots = torch.zeros(num_ranks, length + 64 - length % 64, dtype=kind)
    for k, each in enumerate(inputs):
        if k != rank:
            slots[k, :length] = each
    own = torch.zeros(length + shift, dtype=kind)
    own[shift:] = inputs[rank]
    targets = [torch.full((length + 8,), 77, dtype=kind) for _ in range(num_targets)]
    reduction = Reduction(
        Kind(dtype, kind.itemsize),
        length,
        tuple(each.data_ptr() for each in targets),
        own[shift:].data_ptr(),
        slots.data_ptr(),
        slots.stride(0) * kind.itemsize,
        rank,
        num_ranks,
    )
    TritonKernels(0, rank, num_ranks, num_programs=2).reduce(0, reduction)
    wanted = expected("all_reduce", inputs, rank)
    if dtype == "bfloat16":  # the interpreter cuts off where a GPU rounds
        exact = expected("all_reduce", [each.float() for each in inputs], rank)
        wanted = (exact.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
    for target in targets:
        assert same_bits(target[:length], wanted), (dtype, rank, num_ranks, length, shift)
        assert bool((target[length:] == 77).all()), (dtype, rank, num_ranks, length, shift)


def main() -> None:
    with pytest.MonkeyPatch.context() as patch:  # a torch for CPUs has no streams; the interpreter needs none
        patch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
        _check_all()


def _check_all() -> None:
    for size_bytes in (0, *LENGTHS, 8 * 4096, 8 * 9001):
        for shift in (0, 1, 8, 16):
            check_copy(size_bytes, shift)
    num_sums = 0
    for dtype in KINDS:
        for rank, num_ranks in ((0, 2), (1, 2), (1, 3), (3, 4)):
            for length in LENGTHS:
                for shift in (0, 1):
                    check_sum(dtype, rank, num_ranks, length, shift, 1 + length % 2)
                    num_sums += 1
    print(f"{num_sums} sums")


if __name__ == "__main__":
    main()
