"""Kernels that are loaded ahead of their use, and a product prepared once for its shape, launched with few host microseconds.

    product = Product(loader, driver, Operands.of(a, b), plan, config)   set-up: may wait for the device
    product.launch(stream, a, b, out, bias)
    product.counters.wait(push_stream, piece)                            ... and the piece may be moved

A launch waits for nothing and allocates nothing: what it takes is integers that were worked out at set-up. Triton's own launch
looks at every argument again, some 30 us. What it compiled can be called directly, on any stream, in a few; where this Triton does
not offer that (its interpreter does not), its own launch is used.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import triton.language as tl

from crossfade.device.borrowed import device_of, torch_or_raise
from crossfade.device.driver import HOST, Driver
from crossfade.ops.signaled.counters import Counters, num_counter_words
from crossfade.ops.signaled.kernels import product_kernel
from crossfade.ops.signaled.operands import KIND_BYTES, KIND_NAMES, WIDEST, Operands, find_unit
from crossfade.ops.signaled.tiles import TileConfig, TilePlan

if TYPE_CHECKING:
    from torch import Tensor

_KINDS = {name: getattr(tl, name) for name in KIND_NAMES}
_SIDE = 256  # of what a kernel is loaded with: more than any side of a tile

Launch = Callable[..., None]
"""Takes the stream, then the kernel's arguments without its constants."""


class ProductVariant(NamedTuple):
    """What `crossfade.ops.signaled.kernels` compiles a product for."""

    kind: str  # element type, as torch calls it
    is_b_transposed: bool  # b is the transpose of a row-major (N, K)
    unit: int  # of N and the addresses of result and bias
    has_bias: bool  # a row is added to every row
    config: TileConfig  # tile and pipeline

    def constants(self) -> dict[str, Any]:
        """In the order of the kernel."""
        config = self.config
        return {
            "KIND": _KINDS[self.kind],
            "IS_B_TRANSPOSED": self.is_b_transposed,
            "UNIT": self.unit,
            "HAS_BIAS": self.has_bias,
            "BM": config.num_rows,
            "BN": config.num_columns,
            "BK": config.depth,
        }

    def options(self) -> dict[str, int]:
        """Triton's."""
        return {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}

    def descriptors(self, a: Tensor, b: Tensor, a_stride: int, b_stride: int) -> tuple[Any, Any]:
        """What the kernel takes for a and b. Their ``base`` may be replaced by another tensor of the same shape."""
        from triton.tools.tensor_descriptor import TensorDescriptor

        rows, columns, depth = self.config[:3]
        lines, across = list(b.shape), [depth, columns]
        if self.is_b_transposed:
            lines, across = lines[::-1], across[::-1]
        return (
            TensorDescriptor(a, list(a.shape), [a_stride, 1], [rows, depth]),
            TensorDescriptor(b, lines, [b_stride, 1], across),
        )


class Loader:
    """The kernels of one device in this process; of `crossfade.device.driver.HOST`, by Triton's interpreter."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.num_sms = 1
        if device != HOST:
            self.num_sms = torch_or_raise().cuda.get_device_properties(device).multi_processor_count
        self._compiled: dict[ProductVariant, Any] = {}
        self._streams: dict[int, Any] = {}

    def launcher(self, variant: ProductVariant, num_programs: int) -> Launch:
        """What launches a variant with so many programs.

        A variant is compiled, loaded and run once when it is first asked for, which waits for the device: do it before any stream
        waits.
        """
        constants = variant.constants()
        if variant not in self._compiled:
            self._compiled[variant] = self._load(variant, constants)
        compiled = self._compiled[variant]
        if compiled is not None:
            run, values = compiled[(num_programs, 1, 1)], tuple(constants.values())

            def launch(stream: int, *args: Any) -> None:
                run(*args, *values, stream=stream)

            return launch
        slow = product_kernel[(num_programs,)]

        def launch_slowly(stream: int, *args: Any) -> None:
            with self._on(stream):
                slow(*args, **constants, **variant.options())

        return launch_slowly

    def _load(self, variant: ProductVariant, constants: dict[str, Any]) -> Any:
        """What Triton compiled, if it can be called directly."""
        cuda, args = torch_or_raise().cuda, self._no_product(variant)
        with nullcontext() if self.device == HOST else cuda.device(self.device):
            compiled = product_kernel[(1,)](*args, **constants, **variant.options())
            if compiled is not None:
                stream = cuda.current_stream(self.device).cuda_stream
                try:
                    compiled[(1, 1, 1)](*args, *constants.values(), stream=stream)
                except TypeError:  # another Triton, other arguments
                    compiled = None
            if self.device != HOST:
                cuda.synchronize(self.device)
        return compiled

    def _no_product(self, variant: ProductVariant) -> list[Any]:
        """Arguments that do no tile."""
        torch = torch_or_raise()
        kind = getattr(torch, variant.kind)
        a = torch.zeros(_SIDE, _SIDE, dtype=kind, device=device_of(self.device))  # and all that is not touched
        at = a.data_ptr()
        table, num_tiles, counters, out, bias = at + 16, 0, at, at, at
        return [*variant.descriptors(a, a, _SIDE, _SIDE), _SIDE, _SIDE, table, num_tiles, counters, out, bias]

    def _on(self, stream: int) -> AbstractContextManager[Any]:
        """Triton's own launch goes to torch's current stream."""
        if self.device == HOST:
            return nullcontext()
        cuda = torch_or_raise().cuda
        if stream not in self._streams:
            self._streams[stream] = cuda.ExternalStream(stream, device=self.device)
        return cuda.stream(self._streams[stream])  # type: ignore[no-any-return]


class Product:
    """One shape's product, for one call in flight at a time and one thread. To make one is set-up, and not for a capture."""

    def __init__(
        self,
        loader: Loader,
        driver: Driver,
        operands: Operands,
        plan: TilePlan,
        config: TileConfig,
        *,
        unit: int = WIDEST,
        has_bias: bool = False,
        reserve_sms: int = 0,
    ) -> None:
        if (plan.num_rows, plan.num_columns) != (operands.m, operands.n):
            raise ValueError(
                f"a plan for {plan.num_rows} x {plan.num_columns}, a product of {operands.m} x {operands.n}"
            )
        if (plan.tile_rows, plan.tile_columns) != config[:2]:
            raise ValueError(f"tiles of {plan.tile_rows} x {plan.tile_columns} are planned, and {config[:2]} built")
        torch, device = torch_or_raise(), device_of(loader.device)
        self.operands, self.plan = operands, plan
        unit = find_unit(unit, operands.n)
        self._variant = ProductVariant(operands.kind, operands.is_b_transposed, unit, has_bias, config)
        self._table = torch.frombuffer(plan.table, dtype=torch.int32).to(device)
        words = torch.zeros(num_counter_words(plan), dtype=torch.int32, device=device)
        self.counters = Counters(driver, plan, words)
        self._head = (operands.n, operands.k, self._table.data_ptr(), plan.num_tiles)
        self._launch = loader.launcher(self._variant, min(max(loader.num_sms - reserve_sms, 1), plan.num_tiles))
        self._descriptors: tuple[Any, Any] | None = None
        self._address_mask = KIND_BYTES * unit - 1
        if loader.device != HOST:  # what was enqueued here is there for every stream
            torch.cuda.current_stream(loader.device).synchronize()

    def launch(self, stream: int, a: Tensor, b: Tensor, out: int, bias: int = 0, *, is_captured: bool = False) -> None:
        """Enqueues it. ``out`` and ``bias`` are addresses: of (M, N), and of (N,) where it was made with one."""
        if (out | bias) & self._address_mask:
            raise ValueError(f"the addresses of out and bias are not aligned to {self._address_mask + 1} bytes")
        left, right = self._point_to(a, b)
        try:
            self._launch(stream, left, right, *self._head, self.counters.row(is_captured=is_captured), out, bias)
        finally:
            left.base = right.base = None  # no operand is kept alive
        self.counters.note(is_captured=is_captured)

    def _point_to(self, a: Tensor, b: Tensor) -> tuple[Any, Any]:
        """The operands as the kernel takes them. Descriptors are made once, and only their addresses change."""
        if self._descriptors is None:
            self._descriptors = self._variant.descriptors(a, b, self.operands.a_stride, self.operands.b_stride)
        left, right = self._descriptors
        left.base, right.base = a, b
        return left, right
