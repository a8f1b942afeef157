"""Products of one device that tell a stream beside them of their pieces: `matmul_signaled`, where there is Triton."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

from crossfade.device.borrowed import torch_or_raise
from crossfade.device.cuda import CudaDriver
from crossfade.device.driver import HOST, Driver
from crossfade.errors import DeviceError
from crossfade.ops.signaled.launch import Loader, Product
from crossfade.ops.signaled.operands import KIND_BYTES, Operands, find_unit
from crossfade.ops.signaled.sides import OnGroup, RowGroup, side_of
from crossfade.ops.signaled.tiles import Piece, TileConfig, TilePlan

if TYPE_CHECKING:
    from torch import Tensor

MOST_PRODUCTS = 256
"""That are kept ready, beside those that were captured."""


class _ProductKey(NamedTuple):
    """What calls have in common that one product serves."""

    lane: int
    operands: Operands
    group_rows: tuple[int, ...]
    unit: int
    has_bias: bool
    reserve_sms: int


class SignaledProducts:
    """Ready products, by shape and lane."""

    def __init__(
        self, device: int, driver: Driver, config: TileConfig | None = None, side: Callable[[int, int], Any] = side_of
    ) -> None:
        self._device = device
        self._driver = driver
        self._loader = Loader(device)
        self._config = config or TileConfig()
        self._side = side
        self._products: dict[_ProductKey, Product] = {}
        self._captured: set[_ProductKey] = set()
        self._making = Lock()

    def run(
        self,
        a: Tensor,
        b: Tensor,
        bias: Tensor | None,
        out: Tensor,
        plan: TilePlan,
        on_group: OnGroup,
        *,
        reserve_sms: int,
        lane: int,
    ) -> None:
        """See `matmul_signaled`. The product is enqueued before anything waits for it (PL-5)."""
        side = self._side(self._device, lane)
        is_captured = side.is_capturing()
        ends = tuple(piece.end for piece in plan.pieces)
        address, added = out.data_ptr(), 0 if bias is None else bias.data_ptr()
        unit = find_unit(plan.num_columns, (address | added) // KIND_BYTES)
        key = _ProductKey(lane, Operands.of(a, b), ends, unit, bias is not None, reserve_sms)
        product = self._find(key, plan, is_captured=is_captured)
        main = side.begin()
        product.launch(int(getattr(main, "cuda_stream", 0)), a, b, address, added, is_captured=is_captured)
        try:
            self._tell(product, out, side, on_group, is_captured=is_captured)
        finally:
            side.join(main)

    def _tell(self, product: Product, out: Tensor, side: Any, on_group: OnGroup, *, is_captured: bool) -> None:
        """Each piece's wait, and what the callback enqueues behind it.

        If it raises, the waits are enqueued all the same: a replayed counter is put back by its wait alone.
        """
        error: BaseException | None = None
        with side.use():
            for piece in product.plan.pieces:
                product.counters.wait(side.handle, piece, is_captured=is_captured)
                if error is None:
                    error = _call(on_group, piece, out, side.stream)
        if error is not None:
            raise error

    def _find(self, key: _ProductKey, plan: TilePlan, *, is_captured: bool) -> Product:
        with self._making:
            product = self._products.get(key)
            if product is None:
                if is_captured:
                    raise DeviceError(
                        "matmul_signaled is captured, and was not prepared for this shape and lane",
                        hint="prepare_signaled() it first, or call it once, with such arguments: a capture can load no kernel",
                    )
                self._make_room()
                made_for = self._loader, self._driver, key.operands, plan, self._config
                options: dict[str, Any] = {"unit": key.unit, "has_bias": key.has_bias, "reserve_sms": key.reserve_sms}
                product = self._products[key] = Product(*made_for, **options)
            if is_captured:
                self._captured.add(key)
            return product

    def _make_room(self) -> None:
        """Graphs hold the addresses of what they captured, so that stays."""
        kept = [key for key in self._products if key not in self._captured]
        if len(kept) < MOST_PRODUCTS:
            return
        if self._device != HOST:
            torch_or_raise().cuda.synchronize(self._device)
        for key in kept:
            del self._products[key]


def _call(on_group: OnGroup, piece: Piece, out: Tensor, stream: Any) -> BaseException | None:
    rows = slice(piece.begin, piece.end)
    try:
        on_group(RowGroup(piece.counter, rows, out[rows], stream))
    except BaseException as error:
        return error
    return None


@cache
def products_of(device: int) -> SignaledProducts:
    """Those of a device, in this process."""
    return SignaledProducts(device, CudaDriver(device))
