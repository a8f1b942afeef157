"""Splitting a batch and joining outputs: what `interleave` does unless the user gives functions of his own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from crossfade.errors import BatchesError


def leaves_of(value: Any) -> list[Any]:
    """What a value holds. Quicker than pytree where that is one tensor, as inputs and outputs of a module's call mostly are."""
    return [value] if isinstance(value, torch.Tensor) else pytree.tree_leaves(value)


def leaves_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What the arguments of a call hold, in the order that pytree has."""
    return [leaf for value in (*args, *kwargs.values()) for leaf in leaves_of(value)]


def local_of(tensor: Any) -> torch.Tensor:
    """What of a tensor this rank has: its shard, of a DTensor."""
    return getattr(tensor, "_local_tensor", tensor)  # type: ignore[no-any-return]


class Call(NamedTuple):
    """The arguments of one batch, and how many rows it has: what its outputs weigh."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_rows: int


def split_batch(args: tuple[Any, ...], kwargs: dict[str, Any], num_batches: int) -> list[Call]:
    """Splits all tensors that have as many rows as the first one, in containers too; all else goes to every batch.

    Gives an empty list where there is no tensor with enough rows. Batches differ by one row at most.
    """
    values = *args, *kwargs.values()
    tensors = (each for value in values for each in leaves_of(value) if isinstance(each, torch.Tensor))
    num_rows = next((each.shape[0] for each in tensors if each.dim()), 0)
    if num_rows < num_batches:
        return []
    columns = [_rows(value, num_rows, num_batches) for value in values]
    calls = []
    for index, own in enumerate(zip(*columns, strict=True)):
        own_kwargs = dict(zip(kwargs, own[len(args) :], strict=True))
        calls.append(Call(own[: len(args)], own_kwargs, num_rows // num_batches + (index < num_rows % num_batches)))
    return calls


def _rows(value: Any, num_rows: int, num_batches: int) -> Sequence[Any]:
    """What each batch has of a value."""
    if isinstance(value, torch.Tensor):
        return value.tensor_split(num_batches) if value.dim() and value.shape[0] == num_rows else [value] * num_batches
    leaves, spec = pytree.tree_flatten(value)
    if spec.is_leaf():
        return [value] * num_batches
    columns = [_rows(each, num_rows, num_batches) for each in leaves]
    return [pytree.tree_unflatten([column[k] for column in columns], spec) for k in range(num_batches)]


def join_outputs(outputs: Sequence[Any], num_rows: Sequence[int]) -> Any:
    """One output of those of all batches: tensors one behind the other, single numbers as means weighted by the rows.

    A mean over something else than rows, as over tokens that are not padding, needs a function of the user's.

    Raises:
        BatchesError: outputs have different structures, tensors that do not belong to rows, or objects that differ.
    """
    if all(isinstance(output, torch.Tensor) for output in outputs):
        return _join(tuple(outputs), num_rows)
    flat, specs = zip(*map(pytree.tree_flatten, outputs), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise BatchesError(
            "the batches' outputs have different structures", hint="interleave(join=...) joins them as you say"
        )
    return pytree.tree_unflatten([_join(leaves, num_rows) for leaves in zip(*flat, strict=True)], specs[0])


def _join(leaves: tuple[Any, ...], num_rows: Sequence[int]) -> Any:
    first = leaves[0]
    if all(leaf is first for leaf in leaves):
        return first
    if all(isinstance(leaf, torch.Tensor) for leaf in leaves):
        if not first.dim():
            if not first.is_floating_point():
                raise BatchesError(
                    f"an output is a single {first.dtype}", hint="interleave(join=...) joins it as you say"
                )
            return sum(leaf * (rows / sum(num_rows)) for leaf, rows in zip(leaves, num_rows, strict=True))
        if _belong_to_rows([leaf.shape[:1].numel() for leaf in leaves], num_rows):
            return torch.cat(leaves)
        raise BatchesError(
            f"outputs of shapes {', '.join(str(list(leaf.shape)) for leaf in leaves)} for {', '.join(map(str, num_rows))} rows",
            hint="interleave(join=...) joins them as you say",
        )
    with suppress(RuntimeError, TypeError, ValueError):  # of objects with tensors or arrays in them
        if all(leaf is first or leaf == first for leaf in leaves):
            return first
    raise BatchesError(
        f"the batches give different objects of type {type(first).__name__}",
        hint="leave it out of the outputs (use_cache=False), make it known to torch.utils._pytree (register_dataclass), or "
        "interleave(join=...) joins them as you say",
    )


def _belong_to_rows(lengths: Sequence[int], num_rows: Sequence[int]) -> bool:
    """Whether each output has one length for each row of its batch, or so many."""
    times = lengths[0] // num_rows[0] if num_rows[0] else 0
    return [times * rows for rows in num_rows] == list(lengths)


def kind_of(args: tuple[Any, ...], kwargs: dict[str, Any], *, with_values: bool = False) -> object:
    """What is equal for arguments of one `signature`, and quicker to make where they are tensors, numbers and texts."""
    kinds: list[object] = [*kwargs]
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor):
            kinds.append((each.dtype, each.shape, each.device.type, each.requires_grad))
        elif type(each) in PLAIN:
            is_told = with_values or each is None or type(each) is bool
            kinds.append((type(each), repr(each) if is_told else ""))
        else:
            return signature((args, kwargs), with_values=with_values)
    return tuple(kinds)


PLAIN = (bool, type(None), int, float, str)
"""Types whose values stand in the `signature` of a captured call."""


def signature(value: Any, *, with_values: bool = False) -> tuple[str, ...]:
    """Shapes, types and devices of all tensors in a value, types of all else, and how they are nested; equal for calls of one kind.

    Args:
        value: anything.
        with_values: numbers and texts count too, as a graph has them for good.
    """
    leaves, spec = pytree.tree_flatten(value)
    return (*(_signature(leaf, with_values) for leaf in leaves), "" if spec.is_leaf() else _nesting(value, spec))


def _nesting(value: Any, spec: pytree.TreeSpec) -> str:
    """In short, where a value is the arguments of a call and none of them holds others."""
    match value:
        case (tuple(args), dict(kwargs)):
            flat = ((None,) * len(args), dict.fromkeys(kwargs))
            if spec == pytree.tree_structure(flat):
                return ", ".join([f"{len(args)} by position", *(f"{name!r} by name" for name in kwargs)])
    return str(spec)


_MODES: tuple[Callable[[], object], ...] = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    *(partial(ask, kind) for ask in (torch.is_autocast_enabled, torch.get_autocast_dtype) for kind in ("cpu", "cuda")),
    dist.is_initialized,
)


def modes_now() -> list[object]:
    """What of torch's state makes another kind of call; quicker to make than `modes`."""
    return [ask() for ask in _MODES]


def modes(*, trains: bool) -> tuple[str, ...]:
    """What of torch's state makes another kind of call, in words. ``trains``: whether the module is in training."""
    return (
        "training" if trains else "evaluation",
        "with gradients" if torch.is_grad_enabled() else "without gradients",
        *(["in inference mode"] if torch.is_inference_mode_enabled() else []),
        *(
            f"autocast on {kind} to {torch.get_autocast_dtype(kind)}"
            for kind in ("cpu", "cuda")
            if torch.is_autocast_enabled(kind)
        ),
    )


def device_kinds(args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
    """Where the tensors among the arguments of a call are: ``"cpu"``, ``"cuda"``."""
    return {leaf.device.type for leaf in leaves_of_call(args, kwargs) if isinstance(leaf, torch.Tensor)}


def _signature(leaf: Any, with_values: bool) -> str:
    if isinstance(leaf, torch.Tensor):
        grad = " with gradient" if leaf.requires_grad else ""
        return f"{leaf.dtype}{list(leaf.shape)} on {leaf.device.type}{grad}".removeprefix("torch.")
    is_told = isinstance(leaf, bool | None) or (with_values and isinstance(leaf, int | float | str))
    return repr(leaf) if is_told else type(leaf).__name__
