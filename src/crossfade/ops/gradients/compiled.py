"""The operators as torch.compile sees them: operators of torch's by the name ``crossfade::``, with shapes and gradients.

::

    crossfade::matmul_reduce_scatter(a, b, bias, group, lane, candidate, backward_candidate) -> out
    crossfade::matmul_all_reduce, crossfade::replicated_matmul      likewise
    crossfade::matmul_all_to_all(..., counts) -> out                counts: W x W of them, row by row
    crossfade::all_gather_matmul(..., keeps_rows) -> out, rows      rows: all ranks' a, or nothing
    crossfade::matmul_gradients(operator, grad, rows, b, ...)       one for all of them -> dA, dB, dbias, or nothing
    crossfade::all_to_all(tensor, group, lane)
    crossfade::split(x, group, dim, lane), crossfade::gather        each goes back by the other

``group`` is what `crossfade.peers.groups.key_of` gives. What they do is what `crossfade.ops.gradients.backward` does for torch's
autograd, so gradients are overlapped as they are there. A tensor of 0 elements stands for nothing: operators of torch's always give
what they say.

Importing this defines them; it needs torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from crossfade.ops.calls.job import Layout
from crossfade.ops.gradients.autograd import join_shares, take_share
from crossfade.ops.gradients.backward import AllGather, AllReduce, AllToAll, Gradient, Needs, ReduceScatter, Replicated
from crossfade.peers import collectives
from crossfade.peers.groups import find_group
from crossfade.peers.keys import GroupKey

Tensor = torch.Tensor
_CALLS: dict[str, Callable[..., Gradient]] = {
    str(call.name): call for call in (ReduceScatter, AllReduce, AllGather, AllToAll, Replicated)
}
_REDUCE_SCATTER, _ALL_REDUCE, _ALL_GATHER, _ALL_TO_ALL, _REPLICATED = _CALLS
_OPERANDS = "Tensor a, Tensor b, Tensor? bias, "
_WHERE = "str group, int lane, str? candidate, str? backward_candidate"
_SCHEMAS = {
    _REDUCE_SCATTER: f"({_OPERANDS}{_WHERE}) -> Tensor",
    _ALL_REDUCE: f"({_OPERANDS}{_WHERE}) -> Tensor",
    _REPLICATED: f"({_OPERANDS}{_WHERE}) -> Tensor",
    _ALL_TO_ALL: f"({_OPERANDS}{_WHERE}, SymInt[]? counts) -> Tensor",
    _ALL_GATHER: f"({_OPERANDS}{_WHERE}, bool keeps_rows) -> (Tensor, Tensor)",
}
_GRADIENTS = (
    "(str operator, Tensor grad, Tensor? rows, Tensor? b, SymInt[] shape, bool is_b_transposed, bool[] needs, "
    f"{_WHERE}, SymInt[]? counts, bool keeps_rows) -> (Tensor, Tensor, Tensor)"
)


class _Where(NamedTuple):
    """How a call is done, as operators of torch's are told: see the schemas."""

    group: str
    lane: int
    candidate: str | None
    backward_candidate: str | None
    counts: Sequence[int] | None = None
    keeps_rows: bool = False

    @classmethod
    def of(cls, name: str, where: Sequence[Any]) -> _Where:
        """Of the last arguments of an operator."""
        made = cls(*where[:4])
        if len(where) > 4:
            return made._replace(**{"counts" if name == _ALL_TO_ALL else "keeps_rows": where[4]})
        return made

    def call(self, name: str, place: Tensor) -> Gradient:
        """The operator, on tensors where this one is."""
        group, counts = find_group(self.group, place), None
        if self.counts is not None:
            count = group.num_ranks
            counts = [list(self.counts[p * count : (p + 1) * count]) for p in range(count)]
        where = group, self.lane, self.candidate, self.backward_candidate
        return _CALLS[name](*where, counts=counts, save_gathered=self.keeps_rows)


def _do(name: str, a: Tensor, b: Tensor, bias: Tensor | None, *where: Any) -> Any:
    at = _Where.of(name, where)
    out, rows, _ = at.call(name, a).forward(a, b, bias, Needs(False, at.keeps_rows, False))
    if name != _ALL_GATHER:
        return out
    return out, a.new_empty(0) if rows is None else rows


def _shape(name: str, a: Tensor, b: Tensor, bias: Tensor | None, *where: Any) -> Any:
    """What comes out, without its values."""
    at = _Where.of(name, where)
    _, rank, num_ranks = GroupKey.parse(at.group)
    num_rows, columns = prod(a.shape[:-1]), b.shape[1]
    hint = "hint: they have to be (..., K) and (K, N)"
    check: Any = torch._check  # also of symbols
    check(a.shape[-1] == b.shape[0], lambda: f"a of {name} is of shape {a.shape}, b of {b.shape}\n{hint}")
    if name == _REDUCE_SCATTER:
        check(num_rows % num_ranks == 0, lambda: f"a of {name} has {num_rows} rows\nhint: a multiple of {num_ranks}")
        return a.new_empty(num_rows // num_ranks, columns)
    if name == _ALL_TO_ALL:
        counts = at.counts
        return a.new_empty(num_rows if counts is None else sum(counts[rank::num_ranks]), columns)
    if name != _ALL_GATHER:
        return a.new_empty(*a.shape[:-1], columns)
    total = num_ranks * num_rows
    return a.new_empty(total, columns), a.new_empty(total, a.shape[-1]) if at.keeps_rows else a.new_empty(0)


def _keep(name: str, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """What the gradient needs; see `crossfade.ops.gradients.backward`."""
    a, b, _, *where = inputs
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.where, rows = _Where.of(name, where), a
    if name == _ALL_GATHER:
        ctx.mark_non_differentiable(output[1])
        rows = output[1] if ctx.where.keeps_rows else a
    ctx.set_materialize_grads(False)
    ctx.shape, ctx.is_b_transposed = tuple(a.shape), not b.is_contiguous()
    ctx.save_for_backward(rows if needs_b else None, b if needs_a else None)


def _go_back(name: str, ctx: Any, grad: Tensor | None, *others: None) -> Any:
    nothing = (None,) * len(ctx.needs_input_grad)
    if grad is None:
        return nothing
    needs = list(ctx.needs_input_grad[:3])
    made = OPERATORS.matmul_gradients(name, grad, *ctx.saved_tensors, ctx.shape, ctx.is_b_transposed, needs, *ctx.where)
    return *(each if is_needed else None for each, is_needed in zip(made, needs, strict=True)), *nothing[3:]


def _gradients(
    operator: str,
    grad: Tensor,
    rows: Tensor | None,
    b: Tensor | None,
    shape: Sequence[int],
    is_b_transposed: bool,
    needs: Sequence[bool],
    *where: Any,
) -> tuple[Tensor, ...]:
    call = _Where(*where).call(operator, grad)
    call.resume(tuple(shape), grad, Layout.COLUMNS if is_b_transposed else Layout.ROWS)
    made = call.backward(grad, rows, b, Needs(*needs))
    return tuple(grad.new_empty(0) if each is None else each for each in made)


def _gradient_shapes(
    operator: str,
    grad: Tensor,
    rows: Tensor | None,
    b: Tensor | None,
    shape: Sequence[int],
    is_b_transposed: bool,
    needs: Sequence[bool],
    *where: Any,
) -> tuple[Tensor, ...]:
    depth, columns = shape[-1], grad.shape[-1]
    of_b = grad.new_empty(columns, depth).t() if is_b_transposed else grad.new_empty(depth, columns)
    made = grad.new_empty(tuple(shape)), of_b, grad.new_empty(columns)
    return tuple(each if is_needed else grad.new_empty(0) for each, is_needed in zip(made, needs, strict=True))


def _all_to_all(tensor: Tensor, group: str, lane: int) -> Tensor:
    return collectives.all_to_all(tensor, find_group(group, tensor), lane=lane)


def _split(x: Tensor, group: str, dim: int, lane: int) -> Tensor:
    return take_share(x, find_group(group, x), dim)


def _gather(x: Tensor, group: str, dim: int, lane: int) -> Tensor:
    return join_shares(x, find_group(group, x), dim, lane)


def _region_shape(name: str, x: Tensor, group: str, dim: int, lane: int) -> Tensor:
    shape, num_ranks = list(x.shape), GroupKey.parse(group).num_ranks
    shape[dim] = shape[dim] // num_ranks if name == "split" else shape[dim] * num_ranks
    return x.new_empty(shape)


def _keep_place(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.place = inputs[1:]


def _go_back_by(name: str, ctx: Any, grad: Tensor) -> Any:
    return getattr(OPERATORS, name)(grad, *ctx.place), None, None, None


def _define() -> SimpleNamespace:
    """All of them, by name."""
    made = SimpleNamespace()

    def define(name: str, schema: str, function: Callable[..., Any], fake: Callable[..., Any]) -> Any:
        operator: Any = torch.library.custom_op(f"crossfade::{name}", function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        setattr(made, name, getattr(torch.ops.crossfade, name))
        return operator

    for name, schema in _SCHEMAS.items():
        operator = define(name, schema, partial(_do, name), partial(_shape, name))
        operator.register_autograd(partial(_go_back, name), setup_context=partial(_keep, name))
    define("matmul_gradients", _GRADIENTS, _gradients, _gradient_shapes)
    schema = "(Tensor tensor, str group, int lane) -> Tensor"
    define("all_to_all", schema, _all_to_all, lambda tensor, group, lane: torch.empty_like(tensor))
    schema = "(Tensor x, str group, int dim, int lane) -> Tensor"
    for name, function, back in (("split", _split, "gather"), ("gather", _gather, "split")):
        operator = define(name, schema, function, partial(_region_shape, name))
        operator.register_autograd(partial(_go_back_by, back), setup_context=_keep_place)
    return made


OPERATORS = _define()
"""The operators, by name."""
