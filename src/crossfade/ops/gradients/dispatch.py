"""How a call leaves the operator: to torch.compile while that traces it, or to torch's autograd where it has a gradient.

A traced operator becomes one of torch's, which torch.compile does not look into, and which has its gradient
(`crossfade.ops.gradients.compiled`). What is traced keeps to what torch.compile follows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from crossfade.device.borrowed import torch_or_raise
from crossfade.peers.groups import key_of

if TYPE_CHECKING:
    from torch import Tensor

    from crossfade.ops.choice.candidate import Candidate
    from crossfade.ops.gradients.backward import Gradient
    from crossfade.peers.groups import GroupLike

    Where: TypeAlias = tuple[GroupLike, int, Candidate | str | None, Candidate | str | None]
    """The group, the lane, how the operator is done, and its gradient's."""


def is_traced() -> bool:
    """Whether torch.compile is tracing the caller. While it compiles what it has traced, operators that run are not."""
    return bool(torch_or_raise().compiler.is_dynamo_compiling())


def trace(
    name: str,
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    where: Where,
    *more: object,  # what the operator takes behind the others
    out: Tensor | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> Tensor:
    """An operator that has an output only. An output that was given is filled by a copy."""
    made: Tensor = getattr(_operators(), name)(a, b, bias, *_texts(where), *more)
    if meanwhile is not None:
        meanwhile()
    return _stored(made, out)


def trace_gather(
    a: Tensor, b: Tensor, bias: Tensor | None, where: Where, outs: Sequence[Tensor | None], *, save_gathered: bool
) -> Tensor:
    """`all_gather_matmul`, with ``out`` and ``gathered``."""
    is_saved = save_gathered and b.requires_grad and torch_or_raise().is_grad_enabled()
    keeps_rows = is_saved or outs[1] is not None
    made, rows = _operators().all_gather_matmul(a, b, bias, *_texts(where), keeps_rows)
    _stored(rows, outs[1])
    return _stored(made, outs[0])


def trace_all_to_all(group: GroupLike, counts: Tensor, lane: int) -> Tensor:
    """`crossfade.peers.collectives.all_to_all` of what has no gradient."""
    return _operators().all_to_all(counts, key_of(group), lane)  # type: ignore[no-any-return]


def trace_share(x: Tensor, group: GroupLike, dim: int, lane: int) -> Tensor:
    """`crossfade.ops.layers.regions.split`."""
    return _operators().split(x, key_of(group), dim, lane)  # type: ignore[no-any-return]


def trace_join(x: Tensor, group: GroupLike, dim: int, lane: int) -> Tensor:
    """`crossfade.ops.layers.regions.gather`."""
    return _operators().gather(x, key_of(group), dim, lane)  # type: ignore[no-any-return]


def _operators() -> Any:
    from crossfade.ops.gradients import compiled

    return compiled.OPERATORS


def _texts(where: Where) -> tuple[str, int, str | None, str | None]:
    group, lane, *candidates = where
    one, other = (each if each is None else str(each) for each in candidates)
    return key_of(group), lane, one, other


def _stored(made: Tensor, out: Tensor | None) -> Tensor:
    return made if out is None else out.copy_(made)


def wants_gradient(*tensors: Any) -> bool:
    """Whether autograd is to know of a call with these (which need not be tensors: they are not checked yet)."""
    for tensor in tensors:
        if getattr(tensor, "requires_grad", False):
            return bool(torch_or_raise().is_grad_enabled())
    return False


def apply(gradient: Gradient, a: Tensor, b: Tensor, bias: Tensor | None, **others: object) -> Tensor:
    """The operator's result, through which gradients flow back."""
    for name, value in others.items():
        if value is not None:
            raise RuntimeError(
                f"{gradient.name}(): functions with {name}=... arguments don't support automatic differentiation, but one of the "
                f"arguments requires grad\nhint: leave {name} out, or call it under torch.no_grad()"
            )
    from crossfade.ops.gradients.autograd import Differentiable

    out: Tensor = Differentiable.apply(gradient, a, b, bias)  # type: ignore[no-untyped-call]
    return out
