"""Whether a call of an operator has a gradient, and how torch's autograd is told of it. Imports torch when it does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from crossfade.device.borrowed import torch_or_raise

if TYPE_CHECKING:
    import torch

    from crossfade.ops.backward import Call

__all__ = ["apply", "wants_gradient"]


def wants_gradient(*tensors: Any) -> bool:
    """Whether autograd is to know of a call with these (which need not be tensors: nobody has checked them yet)."""
    for tensor in tensors:
        if getattr(tensor, "requires_grad", False):
            return bool(torch_or_raise().is_grad_enabled())
    return False


def apply(call: Call, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None, **others: object) -> torch.Tensor:
    """The operator's result, through which gradients flow back.

    Args:
        call: of which operator.
        a: its operand.
        b: its operand.
        bias: its operand.
        others: outputs and work of the caller's, by name: what autograd could not follow.

    Raises:
        RuntimeError: one of ``others`` was given.
    """
    for name, value in others.items():
        if value is not None:
            raise RuntimeError(
                f"{call.name}(): functions with {name}=... arguments don't support automatic differentiation, but one of the "
                f"arguments requires grad\nhint: leave {name} out, or call it under torch.no_grad()"
            )
    from crossfade.ops.autograd import Differentiable

    out: torch.Tensor = Differentiable.apply(call, a, b, bias)  # type: ignore[no-untyped-call]
    return out
