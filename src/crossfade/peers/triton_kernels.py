"""The local part on a GPU: a copy and a sum, in Triton.

All variants are compiled and loaded by `TritonKernels.load`: to load one while a stream waits hangs. So addresses and lengths are
kept out of what Triton specialises on, and only the element type, the number of ranks, this rank, the number of targets and whether
all addresses are multiples of 16 make a variant.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import MissingDependency
from crossfade.peers.memory import Kind, Reduction

try:
    import triton
    import triton.language as tl
except ImportError:
    raise MissingDependency("triton", extra="gpu", needed_for="collectives on GPUs") from None

KINDS = {
    "float32": tl.float32,
    "float16": tl.float16,
    "bfloat16": tl.bfloat16,
    "float64": tl.float64,
    "int32": tl.int32,
    "int64": tl.int64,
}
"""Element types that can be summed."""

_ALIGNMENT = 16
_BLOCK = 4096
_NUM_WARPS = 8

_ADDRESSES = ["target", "source", "count"]
_SUM_ADDRESSES = ["target", "also", "own", "slots", "slot_bytes", "count"]


def _copy_kernel(
    target: tl.int64,
    source: tl.int64,
    count: tl.int64,
    KIND: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    into = tl.multiple_of(target.to(tl.pointer_type(KIND)), ALIGNMENT)
    out_of = tl.multiple_of(source.to(tl.pointer_type(KIND)), ALIGNMENT)
    block = tl.program_id(0).to(tl.int64)
    while block * BLOCK < count:
        at = block * BLOCK + tl.arange(0, BLOCK)
        if (block + 1) * BLOCK <= count:  # without a mask, which would make narrow accesses of wide ones
            tl.store(into + at, tl.load(out_of + at))
        else:
            tl.store(into + at, tl.load(out_of + at, mask=at < count), mask=at < count)
        block += tl.num_programs(0)


@triton.jit  # type: ignore[untyped-decorator,unused-ignore]
def _add(
    own: tl.tensor,
    slots: tl.tensor,
    slot_bytes: tl.tensor,
    at: tl.tensor,
    inside: tl.tensor | None,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The sum of one block of elements of all ranks, in their order."""
    total = tl.zeros([BLOCK], WIDE)
    for k in tl.static_range(NUM_RANKS):
        address = own if k == RANK else slots + k * slot_bytes
        out_of = tl.multiple_of(address.to(tl.pointer_type(KIND)), ALIGNMENT)
        part = tl.load(out_of + at, mask=inside).to(WIDE)
        total = part if k == 0 else total + part
    return total.to(KIND)


def _sum_kernel(
    target: tl.int64,
    also: tl.int64,
    own: tl.int64,
    slots: tl.int64,
    slot_bytes: tl.int64,
    count: tl.int64,
    KIND: tl.constexpr,
    WIDE: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    HAS_TWO: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    into = tl.multiple_of(target.to(tl.pointer_type(KIND)), ALIGNMENT)
    into_also = tl.multiple_of(also.to(tl.pointer_type(KIND)), ALIGNMENT)
    block = tl.program_id(0).to(tl.int64)
    while block * BLOCK < count:
        at = block * BLOCK + tl.arange(0, BLOCK)
        if (block + 1) * BLOCK <= count:
            whole = _add(own, slots, slot_bytes, at, None, KIND, WIDE, RANK, NUM_RANKS, ALIGNMENT, BLOCK)
            tl.store(into + at, whole)
            if HAS_TWO:
                tl.store(into_also + at, whole)
        else:
            inside = at < count
            rest = _add(own, slots, slot_bytes, at, inside, KIND, WIDE, RANK, NUM_RANKS, ALIGNMENT, BLOCK)
            tl.store(into + at, rest, mask=inside)
            if HAS_TWO:
                tl.store(into_also + at, rest, mask=inside)
        block += tl.num_programs(0)


def _jit(function: Any, plain: list[str]) -> Any:
    return triton.jit(function, do_not_specialize=plain)


_copy = _jit(_copy_kernel, _ADDRESSES)
_sum = _jit(_sum_kernel, _SUM_ADDRESSES)


def _is_aligned(*values: int) -> bool:
    return all(value % _ALIGNMENT == 0 for value in values)


class TritonKernels:
    """See `crossfade.peers.memory.Kernels`."""

    def __init__(self, device: int, rank: int, num_ranks: int, num_programs: int = 264) -> None:
        self._device = device
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_programs = num_programs
        self._streams: dict[int, Any] = {}

    def _on(self, stream: int) -> AbstractContextManager[Any]:
        """Triton launches on torch's current stream."""
        cuda = torch_or_raise().cuda
        if stream == cuda.current_stream(self._device).cuda_stream:
            return nullcontext()
        if stream not in self._streams:
            self._streams[stream] = cuda.ExternalStream(stream, device=self._device)
        return cuda.stream(self._streams[stream])  # type: ignore[no-any-return]

    def load(self) -> None:
        """Compiles, loads and runs every variant."""
        torch = torch_or_raise()
        scratch = torch.zeros(4096, dtype=torch.uint8, device=f"cuda:{self._device}")
        base = scratch.data_ptr()
        stream = torch.cuda.current_stream(self._device).cuda_stream
        for shift in (0, 1):
            self.copy(stream, base + shift, base + 2048 + shift, 64)
        for name in KINDS:
            kind = Kind(name, getattr(torch, name).itemsize)
            for shift in (0, kind.size_bytes):
                for targets in ((base + shift,), (base + shift, base + 1024 + shift)):
                    slot = (base + 2048, 0, self._rank, self._num_ranks)
                    self.reduce(stream, Reduction(kind, 8, targets, base + 2048 + shift, *slot))
        torch.cuda.synchronize(self._device)

    def _grid(self, count: int) -> tuple[int]:
        return (max(1, min(-(-count // _BLOCK), self._num_programs)),)

    def copy(self, stream: int, target: int, source: int, size_bytes: int) -> None:
        """See `Kernels`."""
        if not size_bytes:
            return
        is_wide = _is_aligned(target, source, size_bytes)
        count = size_bytes // 8 if is_wide else size_bytes
        with self._on(stream):
            _copy[self._grid(count)](
                target,
                source,
                count,
                KIND=tl.int64 if is_wide else tl.int8,
                ALIGNMENT=_ALIGNMENT if is_wide else 1,
                BLOCK=_BLOCK,
                num_warps=_NUM_WARPS,
            )

    def reduce(self, stream: int, reduction: Reduction) -> None:
        """See `Kernels`."""
        kind = KINDS[reduction.kind.name]
        first, last = reduction.targets[0], reduction.targets[-1]
        is_aligned = _is_aligned(first, last, reduction.own, reduction.slots, reduction.slot_bytes)
        with self._on(stream):
            _sum[self._grid(reduction.count)](
                first,
                last,
                reduction.own,
                reduction.slots,
                reduction.slot_bytes,
                reduction.count,
                KIND=kind,
                WIDE=tl.float32 if reduction.kind.size_bytes == 2 else kind,
                RANK=reduction.rank,
                NUM_RANKS=reduction.num_ranks,
                HAS_TWO=len(reduction.targets) > 1,
                ALIGNMENT=_ALIGNMENT if is_aligned else reduction.kind.size_bytes,
                BLOCK=_BLOCK,
                num_warps=_NUM_WARPS,
            )
