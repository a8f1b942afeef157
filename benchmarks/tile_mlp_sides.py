"""What takes turns in ``benchmarks.tile_mlp``: an MLP's forward and backward by crossfade's layers, and by torch.mm and
torch.distributed.

Each call gives the output and the gradients of the input and of both weights. They are checked against the same in float64, by
torch alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.tile_rows import BESIDE, CROSSFADE, PRODUCTS, SERIAL, Block
from benchmarks.tile_sides import MODES, Ranks, Side, load_products, named
from crossfade.ops.layers.linear import ColumnParallelLinear, RowParallelLinear

NAMES = ("y", "dx", "dw up", "dw down")
Tensors = tuple[torch.Tensor, ...]
Forward = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def activate(h: torch.Tensor, *, is_gated: bool) -> torch.Tensor:
    """silu, of one half times the other if it is gated."""
    if not is_gated:
        return functional.silu(h)
    gate, up = h.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _gather(x: torch.Tensor, num_ranks: int) -> torch.Tensor:
    out = x.new_empty(num_ranks * len(x), x.shape[1])
    named("all_gather_single", "all_gather_into_tensor")(out, x.contiguous())
    return out


def _scatter(x: torch.Tensor, num_ranks: int, *, is_async: bool = False) -> tuple[torch.Tensor, Any]:
    out = x.new_empty(len(x) // num_ranks, x.shape[1])
    return out, named("reduce_scatter_single", "reduce_scatter_tensor")(out, x, async_op=is_async)


class GatherMultiply(torch.autograd.Function):
    """All ranks' x times the transpose of this rank's weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, num_ranks: int, is_beside: bool) -> torch.Tensor:
        whole = _gather(x, num_ranks)
        ctx.save_for_backward(whole, weight)
        ctx.num_ranks, ctx.is_beside = num_ranks, is_beside
        return whole @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        whole, weight = ctx.saved_tensors
        grad = grad.contiguous()
        dx, work = _scatter(grad @ weight, ctx.num_ranks, is_async=ctx.is_beside)
        dw = grad.t() @ whole
        if ctx.is_beside:
            work.wait()
        return dx, dw, None, None


class MultiplyScatter(torch.autograd.Function):
    """This rank's rows of the sum over ranks of x times the transpose of the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, num_ranks: int) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.num_ranks = num_ranks
        return _scatter(x @ weight.t(), num_ranks)[0]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        whole = _gather(grad, ctx.num_ranks)
        return whole @ weight, whole.t() @ x, None


@dataclass
class MlpWork:
    """A block's operands on this rank; see `tile_timing.Load`.

    Attributes:
        x: (tokens / W, hidden).
        up: (inner / W, hidden), twice as many rows if it is gated.
        down: (hidden, inner / W).
        grad: of the output.
    """

    block: Block
    x: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    grad: torch.Tensor
    whole: torch.Tensor
    b: torch.Tensor
    product: torch.Tensor
    out: torch.Tensor
    wanted: dict[str, torch.Tensor]
    most_error: float = 1e-2
    most_off: float = 0.2

    @classmethod
    def of(cls, block: Block, ranks: Ranks) -> MlpWork:
        """Makes them. Collective."""
        torch.manual_seed(1000 * ranks.rank + 11)
        dtype, num_ranks = getattr(torch, block.dtype), block.num_ranks

        def make(rows: int, columns: int, scale: float = 1.0) -> torch.Tensor:
            return torch.randn(rows, columns, device=ranks.device, dtype=dtype) * scale

        x, grad = (make(block.tokens // num_ranks, block.hidden) for _ in range(2))
        up = make((1 + block.is_gated) * block.inner // num_ranks, block.hidden, block.hidden**-0.5)
        down = make(block.hidden, block.inner // num_ranks, block.inner**-0.5)
        whole = _gather(x, num_ranks)
        product = x.new_empty(len(whole), len(up))
        work = cls(block, x, up, down, grad, whole, up.t(), product, x.new_empty(x.shape), {})
        exact = work.bare(is_beside=False)(*(each.double() for each in (x, up, down, grad)))
        for shape in block.shapes:
            b = x.new_empty(shape.n, shape.k).t() if shape.layout == "nt" else x.new_empty(shape.k, shape.n)
            load_products(x.new_empty(shape.m, shape.k), b, [shape.m // num_ranks])
        work.wanted = {name: each.float() for name, each in zip(NAMES, exact, strict=True)}
        return work

    def both_ways(self, forward: Forward) -> Callable[..., Tensors]:
        """Forward and backward: (x, up, down, grad) to the output and the gradients."""

        def call(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, grad: torch.Tensor) -> Tensors:
            leaves = [each.detach().requires_grad_() for each in (x, up, down)]
            y = forward(*leaves)
            return y.detach(), *torch.autograd.grad(y, leaves, grad)

        return call

    def bare(self, *, is_beside: bool) -> Callable[..., Tensors]:
        """By torch.mm and torch.distributed."""
        num_ranks, is_gated = self.block.num_ranks, self.block.is_gated

        def forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            h = GatherMultiply.apply(x, up, num_ranks, is_beside)  # type: ignore[no-untyped-call]
            y: torch.Tensor = MultiplyScatter.apply(activate(h, is_gated=is_gated), down, num_ranks)  # type: ignore[no-untyped-call]
            return y

        return self.both_ways(forward)

    def alone(self) -> Callable[[], Tensors]:
        """The same products and activations, of rows that are all here already."""
        is_gated, whole = self.block.is_gated, _gather(self.grad, self.block.num_ranks)
        call = self.both_ways(lambda x, up, down: activate(x @ up.t(), is_gated=is_gated) @ down.t())
        return lambda: call(self.whole, self.up, self.down, whole)

    def layers(self, ranks: Ranks, mode: str, candidate: str | None) -> Callable[[], Tensors]:
        """By crossfade's layers."""
        block, group = self.block, ranks.groups[mode]
        options: dict[str, Any] = {
            "bias": False, "sequence_parallel": True, "device": "meta", "dtype": self.x.dtype,
            "candidate": candidate, "backward_candidate": candidate,
        }  # fmt: skip
        first = ColumnParallelLinear(block.hidden, (1 + block.is_gated) * block.inner, group, **options)
        second = RowParallelLinear(block.inner, block.hidden, group, **options)
        first.weight, second.weight = nn.Parameter(self.up), nn.Parameter(self.down)

        def call() -> Tensors:
            x = self.x.detach().requires_grad_()
            y: torch.Tensor = second(activate(first(x), is_gated=block.is_gated))
            return y.detach(), *torch.autograd.grad(y, [x, first.weight, second.weight], self.grad)

        return call


def mlp_sides(work: MlpWork, ranks: Ranks, candidates: Sequence[str]) -> list[Side]:
    """torch's ways, then crossfade's."""
    operands = work.x, work.up, work.down, work.grad
    serial, beside, alone = work.bare(is_beside=False), work.bare(is_beside=True), work.alone()
    found = [
        Side(PRODUCTS, dict.fromkeys(MODES, alone), None),
        Side(SERIAL, dict.fromkeys(MODES, lambda: serial(*operands)), NAMES),
        Side(BESIDE, dict.fromkeys(MODES, lambda: beside(*operands)), NAMES),
    ]
    for name, candidate in ((CROSSFADE, None), *((each, each) for each in candidates)):
        calls = {mode: work.layers(ranks, mode, candidate) for mode in MODES}
        found.append(Side(name, calls, NAMES, is_ours=True))
    return found


def measure(own: Any, request: Any) -> dict[str, Any]:
    """One block, on this rank. Collective."""
    from benchmarks import tile_timing
    from crossfade.ops.tuning import tuner_of

    own.note("operands")
    block, left_out = Block(**request["row"]), set(request["left_out"])
    work = MlpWork.of(block, own.ranks)
    own.note("tuning")
    tuner = tuner_of(own.ranks.groups["eager"])
    for shape in block.shapes:
        if "tuning" not in left_out:
            tuner.tune(shape)
    chosen = {str(shape): str(tuner.choose(shape)) for shape in block.shapes}
    sides = mlp_sides(work, own.ranks, request["candidates"])
    for side in sides:
        side.errors |= {mode: "left out: it hung" for mode in MODES if f"{side.name}|{mode}" in left_out}
    plan = tile_timing.Plan(
        tuple(request["modes"]), request["num_rounds"], request["num_batches"], request["num_calls"]
    )
    tile_timing.measure(work, own.ranks, sides, plan, own.note)
    own.note("the end of a row")
    found = {side.name: side.to_data() for side in sides}
    del work, sides
    if dist.get_backend() == "nccl":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    return {"sides": found, "choice": {"chosen": chosen}, "num_sms": 0}
