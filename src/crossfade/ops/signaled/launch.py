"""A product prepared once for its shape, and launched with few host microseconds; and the sum over ranks beside it.

    product = Product(loader, driver, Operands.of(a, b, ...), plan, config)
    product.load(Epilogue(has_signals=True))            set-up: may wait for the device
    product.launch(stream, stretch, a, b, target, epilogue)
    product.counters.wait(push_stream, piece)           ... and the piece may be moved

Nothing here waits, and nothing is allocated after set-up: what a launch takes is integers that were worked out before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from crossfade.device.borrowed import device_of, torch_or_raise
from crossfade.device.driver import Driver
from crossfade.errors import DeviceError
from crossfade.ops.signaled.counters import Counters, num_counter_words
from crossfade.ops.signaled.kernels import COUNTER_WORDS
from crossfade.ops.signaled.loading import Launch, Loader, ProductVariant
from crossfade.ops.signaled.operands import KIND_BYTES, WIDEST, Operands, find_unit
from crossfade.ops.signaled.tiles import Stretch, TileConfig, TilePlan

if TYPE_CHECKING:
    import torch

__all__ = ["Epilogue", "Parts", "Product", "Target"]


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
        a: torch.Tensor,
        b: torch.Tensor,
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

    def _point_to(self, a: torch.Tensor, b: torch.Tensor) -> tuple[Any, Any]:
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
