"""Operators as nodes of torch's autograd graph: one class for all of them, which a `Gradient` tells what to do; and the shares
that `crossfade.ops.layers.regions` takes and joins, forward and back. Needs torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from crossfade.ops.gradients.backward import Gradient, Needs
from crossfade.peers import collectives

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup


class Differentiable(torch.autograd.Function):
    """The node. Backward runs in a thread of torch's autograd, on the stream of the forward."""

    @staticmethod
    def forward(ctx: Any, call: Gradient, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
        """The operator itself; autograd does not look inside."""
        ctx.call = call
        out, rows, matrix = call.forward(a, b, bias, Needs(*ctx.needs_input_grad[1:]))
        ctx.save_for_backward(rows, matrix)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """Gradients of what needs one."""
        rows, matrix = ctx.saved_tensors  # first: a checkpoint may run the forward again here, on the same lane
        with torch.no_grad():
            grads = ctx.call.backward(grad, rows, matrix, Needs(*ctx.needs_input_grad[1:]))
        if torch.is_grad_enabled() and grad.requires_grad:  # create_graph=True
            once: Any = _Once.apply
            grads = tuple(each if each is None else once(ctx.call.name, each, grad) for each in grads)
        return None, *grads


class _Once(torch.autograd.Function):
    """A gradient that has none itself."""

    @staticmethod
    def forward(ctx: Any, name: str, value: Tensor, source: Tensor) -> Tensor:
        ctx.name = name
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        raise RuntimeError(
            f"the gradient of {ctx.name} has no gradient itself\nhint: leave create_graph out, or take torch.mm and "
            "torch.distributed.nn.functional there"
        )


def take_share(x: Tensor, group: PeerGroup, dim: int) -> Tensor:
    """This rank's, contiguous; W divides the dimension."""
    return x.chunk(group.num_ranks, dim)[group.rank].clone(memory_format=torch.contiguous_format)


def join_shares(x: Tensor, group: PeerGroup, dim: int, lane: int) -> Tensor:
    """All ranks', one behind the other along the dimension."""
    shares = collectives.all_gather(x[None], group, lane=lane)
    dim %= x.dim()
    return shares.movedim(0, dim).flatten(dim, dim + 1)
