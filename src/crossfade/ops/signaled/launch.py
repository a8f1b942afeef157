"""Kernels that are loaded ahead of their use, and a product prepared once for its shape, launched with few host microseconds.

    product = Product(loader, driver, Operands.of(a, b, ...), plan, config)
    product.load(Epilogue(has_signals=True))            set-up: may wait for the device
    product.launch(stream, stretch, a, b, target, epilogue)
    product.counters.wait(push_stream, piece)           ... and the piece may be moved

A launch waits for nothing and allocates nothing: what it takes is integers that were worked out at set-up. Triton's own launch
looks at every argument again, some 30 us. What it compiled can be called directly, on any stream, in a few; where this Triton does
not offer that (its interpreter does not), its own launch is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import triton.language as tl

from crossfade.device.borrowed import device_of, torch_or_raise
from crossfade.device.driver import HOST, Driver
from crossfade.errors import DeviceError
from crossfade.ops.signaled.counters import Counters, num_counter_words
from crossfade.ops.signaled.kernels import COUNTER_WORDS, product_kernel
from crossfade.ops.signaled.operands import KIND_BYTES, KIND_NAMES, WIDEST, Operands, find_unit
from crossfade.ops.signaled.tiles import Stretch, TileConfig, TilePlan

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.peers.group import PeerGroup

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
            "BM": config.num_rows,
            "BN": config.num_columns,
            "BK": config.depth,
            "NUM_CUTS": config.num_cuts or (4 if self.num_parts else 1),
        }

    def options(self) -> dict[str, int]:
        """Triton's."""
        return {"num_warps": self.config.num_warps, "num_stages": self.config.num_stages}

    def arguments(self, a: Tensor, b: Tensor, a_stride: int, b_stride: int) -> tuple[Any, Any]:
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

    def table(self, addresses: Sequence[int]) -> Tensor:
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


# a product


class Epilogue(NamedTuple):
    """What is done with a tile beside storing it."""

    has_bias: bool = False  # a row of N elements is added
    has_signals: bool = False  # its piece is counted
    rank: int = 0  # whose part the accumulator is, where parts are added
    num_parts: int = 0  # W where the other ranks' parts are added, else 0
    num_also: int = 0  # further places where it is stored


class Target(NamedTuple):
    """Where a product goes."""

    address: int  # of the result's first row
    stride: int  # elements from one row to the next
    first_row: int = 0  # the row of the product that lies there
    also: int = 0  # address of a `Loader.table` of addresses of further results, with the same stride and alignment
    also_offset: int = 0  # bytes that are added to each of them


class Parts(NamedTuple):
    """Where the other ranks' parts lie, with rows of N elements."""

    address: int = 0  # where rank 0's would lie; rank k's lies ``k * part_bytes`` further, this rank's is not read
    part_bytes: int = 0  # distance of two
    first_row: int = 0  # the row of the product that lies there


_NO_PARTS = Parts()


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
        out_unit: int = WIDEST,
        reserve_sms: int = 0,
    ) -> None:
        if (plan.num_rows, plan.num_columns) != (operands.m, operands.n):
            raise ValueError(
                f"a plan for {plan.num_rows} x {plan.num_columns}, a product of {operands.m} x {operands.n}\n"
                "hint: blocks hold all rows of the product"
            )
        if (plan.tile_rows, plan.tile_columns) != config[:2]:
            raise ValueError(f"tiles of {plan.tile_rows} x {plan.tile_columns} are planned, and {config[:2]} built")
        torch = torch_or_raise()
        self.operands, self.plan, self.config = operands, plan, config
        self.out_unit = find_unit(out_unit, operands.n)
        self._loader = loader
        self._num_programs = max(loader.num_sms - reserve_sms, 1)
        device = device_of(loader.device)
        self._table = torch.frombuffer(plan.table, dtype=torch.int32).to(device) if plan.num_tiles else None
        words = torch.zeros(num_counter_words(plan, COUNTER_WORDS), dtype=torch.int32, device=device)
        self.counters = Counters(driver, plan, words, COUNTER_WORDS)
        table = 0 if self._table is None else self._table.data_ptr()
        self._head = (operands.m, operands.n, operands.k, operands.a_stride, operands.b_stride, table)
        self._launches: dict[tuple[Epilogue, int], Launch] = {}
        self._arguments: tuple[Any, Any] | None = None
        self._address_mask = KIND_BYTES * self.out_unit - 1
        loader.settle()

    def variant(self, epilogue: Epilogue) -> ProductVariant:
        """The kernel for an epilogue."""
        operands = self.operands
        return ProductVariant(
            operands.kind,
            operands.is_by_descriptor,
            operands.is_b_transposed,
            operands.in_unit,
            self.out_unit,
            *epilogue,
            self.config,
        )

    def load(self, *epilogues: Epilogue) -> None:
        """Prepares launches with these epilogues. Set-up: not while a stream waits, nor in a capture."""
        for epilogue in epilogues:
            variant = self.variant(epilogue)
            self._loader.load(variant)
            for stretch in self.plan.stretches:
                num_programs = min(self._num_programs, stretch.num_tiles)
                if num_programs:
                    self._launches[epilogue, stretch.place] = self._loader.launcher(variant, num_programs)

    def launch(
        self,
        stream: int,
        stretch: Stretch,
        a: Tensor,
        b: Tensor,
        target: Target,
        epilogue: Epilogue,
        parts: Parts = _NO_PARTS,
        bias: int = 0,
        *,
        is_captured: bool = False,
    ) -> None:
        """Enqueues one stretch."""
        if not stretch.num_tiles:
            return
        launch = self._launches.get((epilogue, stretch.place))
        if launch is None:
            raise DeviceError(f"{epilogue} was not loaded", hint="prepare() the operator for this shape first")
        places = target.address | target.also_offset | parts.address | parts.part_bytes | bias
        if (places | target.stride * KIND_BYTES) & self._address_mask:
            raise ValueError(f"not all of {target}, {parts} and bias are aligned to {self._address_mask + 1} bytes")
        counters = self.counters.row(is_captured=is_captured)
        first, end = stretch.first_tile, stretch.end_tile
        arguments = self._point_to(a, b)
        try:
            launch(stream, *arguments, *self._head, first, end, counters, *target, *parts, bias)
        finally:
            self._forget()
        if epilogue.has_signals:
            self.counters.note(stretch, is_captured=is_captured)

    def _point_to(self, a: Tensor, b: Tensor) -> tuple[Any, Any]:
        """The operands as the kernel takes them. Descriptors are made once, and only their addresses change."""
        if not self.operands.is_by_descriptor:
            return a, b
        if self._arguments is None:
            self._arguments = self.variant(Epilogue()).arguments(a, b, self.operands.a_stride, self.operands.b_stride)
            return self._arguments
        self._arguments[0].base = a
        self._arguments[1].base = b
        return self._arguments

    def _forget(self) -> None:
        """Keeps no operand alive."""
        if self._arguments is not None:
            self._arguments[0].base = self._arguments[1].base = None
