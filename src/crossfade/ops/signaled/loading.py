"""Compiles and loads the kernels of `crossfade.ops.signaled.kernels` ahead of their use, and launches them with little host time.

Triton's own launch looks at every argument again, some 30 us. What it compiled can be called directly, on any stream, in a few;
where this Triton does not offer that (its interpreter does not), its own launch is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import triton.language as tl

from crossfade.device.borrowed import device_of, torch_or_raise
from crossfade.device.driver import HOST
from crossfade.errors import DeviceError
from crossfade.ops.signaled.kernels import product_kernel
from crossfade.ops.signaled.operands import KIND_NAMES, WIDEST
from crossfade.ops.signaled.tiles import TileConfig

if TYPE_CHECKING:
    import torch

    from crossfade.peers.group import PeerGroup

__all__ = ["Launch", "Loader", "ProductVariant", "loader_of"]

_KINDS = {name: getattr(tl, name) for name in KIND_NAMES}
_SIDE = 256  # of what a kernel is loaded with: more than any side of a tile

Launch = Callable[..., None]
"""Takes the stream, then the kernel's arguments without its constants."""


class ProductVariant(NamedTuple):
    """What `crossfade.ops.signaled.kernels` compiles a product for."""

    kind: str  # element type, as torch calls it
    is_by_descriptor: bool  # a and b are read by tensor descriptors
    is_b_transposed: bool  # b is the transpose of a row-major (N, K)
    in_unit: int  # without descriptors: of K, the strides and addresses of a and b
    out_unit: int  # of N, the stride of the result, and every other address
    has_bias: bool  # a row is added to every row
    has_signals: bool  # pieces are counted
    rank: int  # whose part the accumulator is
    num_parts: int  # W where the other ranks' parts are added, else 0
    num_also: int  # further places where the result is stored
    config: TileConfig  # tile and pipeline

    def constants(self) -> dict[str, Any]:
        """In the order of the kernel."""
        config = self.config
        return {
            "KIND": _KINDS[self.kind],
            "IS_BY_DESCRIPTOR": self.is_by_descriptor,
            "IS_B_TRANSPOSED": self.is_b_transposed,
            "IN_UNIT": self.in_unit,
            "OUT_UNIT": self.out_unit,
            "HAS_BIAS": self.has_bias,
            "HAS_SIGNALS": self.has_signals,
            "RANK": self.rank,
            "NUM_PARTS": self.num_parts,
            "NUM_ALSO": self.num_also,
            "PREFETCH": self._prefetch(),
            "BM": config.num_rows,
            "BN": config.num_columns,
            "BK": config.depth,
            "NUM_CUTS": config.num_cuts or (4 if self.num_parts else 1),
        }

    def _prefetch(self) -> str:
        """What asks for the columns of a tile of a part; empty where nothing does, or it cannot be asked for."""
        if not self.config.prefetches or not self.num_parts or self.out_unit < WIDEST:
            return ""
        return f"mov.u32 $0, 0; cp.async.bulk.prefetch.L2.global [$1], {2 * self.config.num_columns};"

    def options(self) -> dict[str, int]:
        """Triton's."""
        return {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}

    def arguments(self, a: torch.Tensor, b: torch.Tensor, a_stride: int, b_stride: int) -> tuple[Any, Any]:
        """What the kernel takes for a and b. A descriptor's ``base`` may be replaced by another tensor of the same shape."""
        if not self.is_by_descriptor:
            return a, b
        from triton.tools.tensor_descriptor import TensorDescriptor

        rows, columns, depth = self.config[:3]
        lines, across = list(b.shape), [depth, columns]
        if self.is_b_transposed:
            lines, across = lines[::-1], across[::-1]
        return (
            TensorDescriptor(a, list(a.shape), [a_stride, 1], [rows, depth]),
            TensorDescriptor(b, lines, [b_stride, 1], across),
        )


class _Loaded(NamedTuple):
    """A variant that may be launched."""

    kernel: Any
    compiled: Any
    constants: dict[str, Any]
    options: dict[str, int]


class Loader:
    """The kernels of one device in this process; of `crossfade.device.driver.HOST`, by Triton's interpreter."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.num_sms = 1
        if device != HOST:
            self.num_sms = torch_or_raise().cuda.get_device_properties(device).multi_processor_count
        self._loaded: dict[ProductVariant, _Loaded] = {}
        self._streams: dict[int, Any] = {}

    def load(self, variant: ProductVariant) -> None:
        """Compiles, loads and runs a variant, unless that was done. It waits for the device: do it before any stream waits."""
        if variant in self._loaded:
            return
        torch = torch_or_raise()
        args, kernel = self._no_product(variant), product_kernel
        constants, options = variant.constants(), variant.options()
        with nullcontext() if self.device == HOST else torch.cuda.device(self.device):
            compiled = kernel[(1,)](*args, **constants, **options)
            if compiled is not None:
                stream = torch.cuda.current_stream(self.device).cuda_stream
                try:
                    compiled[(1, 1, 1)](*args, *constants.values(), stream=stream)
                except TypeError:  # another Triton, other arguments
                    compiled = None
            if self.device != HOST:
                torch.cuda.synchronize(self.device)
        self._loaded[variant] = _Loaded(kernel, compiled, constants, options)

    def _no_product(self, variant: ProductVariant) -> list[Any]:
        """Arguments that do no tile."""
        torch = torch_or_raise()
        kind = getattr(torch, variant.kind)
        a = torch.zeros(_SIDE, _SIDE, dtype=kind, device=device_of(self.device))  # and all that is not touched
        operands, at, sizes = variant.arguments(a, a, _SIDE, _SIDE), a.data_ptr(), [_SIDE] * 5
        table, first, end, counters, out = at + 16, 0, 0, at, at
        return [*operands, *sizes, table, first, end, counters, out, *[0] * 8]

    def launcher(self, variant: ProductVariant, num_programs: int) -> Launch:
        """What launches a loaded variant with so many programs."""
        loaded = self._loaded.get(variant)
        if loaded is None:
            raise DeviceError(
                f"a kernel is asked for that was not loaded: {variant}",
                hint="prepare() the operator for this shape first: to load a kernel while a stream waits would hang",
            )
        constants = tuple(loaded.constants.values())
        if loaded.compiled is not None:
            run = loaded.compiled[(num_programs, 1, 1)]

            def launch(stream: int, *args: Any) -> None:
                run(*args, *constants, stream=stream)

            return launch
        run = loaded.kernel[(num_programs,)]

        def launch_slowly(stream: int, *args: Any) -> None:
            with self._on(stream):
                run(*args, **loaded.constants, **loaded.options)

        return launch_slowly

    def _on(self, stream: int) -> AbstractContextManager[Any]:
        """Triton's own launch goes to torch's current stream."""
        if self.device == HOST:
            return nullcontext()
        cuda = torch_or_raise().cuda
        if stream not in self._streams:
            self._streams[stream] = cuda.ExternalStream(stream, device=self.device)
        return cuda.stream(self._streams[stream])  # type: ignore[no-any-return]

    def table(self, addresses: Sequence[int]) -> torch.Tensor:
        """Addresses, as the kernels read them."""
        torch = torch_or_raise()
        signed = [address - (1 << 64) if address >> 63 else address for address in addresses]
        made = torch.tensor(signed, dtype=torch.int64).to(device_of(self.device))
        self.settle()
        return made  # type: ignore[no-any-return]

    def settle(self) -> None:
        """Waits until what set-up enqueued on torch's current stream is there for every stream."""
        if self.device != HOST:
            torch_or_raise().cuda.current_stream(self.device).synchronize()


_KEPT_AS = "tile kernels"


def loader_of(group: PeerGroup) -> Loader:
    """The one of a group's device; it is kept with the group."""
    loader: Loader | None = group.belongings.get(_KEPT_AS)
    if loader is None:
        loader = group.belongings[_KEPT_AS] = Loader(group.memory.driver.device)
    return loader
