"""Gradients of the operators, for tests: what they must be, by torch's own on all ranks' operands in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from crossfade.ops import references
from crossfade.ops.calls.job import Operator
from crossfade.ops.operators import replicated_matmul
from crossfade.peers.group import PeerGroup
from tests.helpers.ops_inputs import FUNCTIONS, Inputs, assert_equal, make, matrix

OPERATORS: dict[str, Callable[..., torch.Tensor]] = {
    **{str(operator): each for operator, each in FUNCTIONS.items()},
    "replicated_matmul": replicated_matmul,
}
FEW = ("plain", "rounds", "rounds(rounds=2)")
ALIKE = ("matmul_all_reduce",)
"""All ranks have the same output, and one gradient of it."""
Grads = tuple[torch.Tensor | None, ...]


def inputs_for(name: str, group: PeerGroup, sizes: tuple[int, int, int], dtype: str = "float64", **more: Any) -> Inputs:
    operator = Operator.ALL_REDUCE if name == "replicated_matmul" else Operator(name)
    inputs = make(operator, group, sizes, dtype, **more)
    if name == "replicated_matmul":
        inputs.a[:] = [inputs.a[0]] * group.num_ranks
    return inputs


def outputs(name: str, a: list[torch.Tensor], b: list[torch.Tensor], bias: Any, counts: Any) -> list[torch.Tensor]:
    """Of all ranks, by torch."""
    ranks = range(len(a))
    rows = [each.flatten(0, -2) for each in a]
    if name in ("matmul_reduce_scatter", "matmul_all_reduce"):
        total = sum((row @ matrix for row, matrix in zip(rows, b, strict=True)), start=torch.zeros(()).double())
        total = total if bias is None else total + bias[0]
        if name == "matmul_all_reduce":
            return [total.view(*a[0].shape[:-1], total.shape[1])]
        return list(total.chunk(len(a))) if len(total) else [total] * len(a)
    added = [torch.zeros(()).double()] * len(a) if bias is None else bias
    if name == "replicated_matmul":
        return [references.replicated_matmul(a[rank], b[rank], bias=added[rank]) for rank in ranks]
    if name == "all_gather_matmul":
        return [torch.cat(rows) @ b[rank] + added[rank] for rank in ranks]
    products = [rows[rank] @ b[rank] + added[rank] for rank in ranks]
    parts = []
    for rank in ranks:
        lengths = [len(rows[rank]) // len(a)] * len(a) if counts is None else counts[rank]
        parts.append(torch.split(products[rank], lengths))
    return [torch.cat([parts[source][rank] for source in ranks]) for rank in ranks]


def expected(
    name: str, inputs: Inputs, weights: list[torch.Tensor] | None, rank: int
) -> tuple[Grads, list[torch.Tensor]]:
    """A rank's gradients of the sum of all outputs times their weights (None: ones), and the outputs."""

    def leaves(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [each.detach().double().cpu().requires_grad_() for each in tensors]

    a, b = leaves(inputs.a), leaves(inputs.b)
    if name == "replicated_matmul":
        a = [a[0]] * len(a)
    bias = None if inputs.bias is None else leaves(inputs.bias)
    outs = outputs(name, a, b, bias, inputs.counts)
    pairs = zip(outs, weights or [torch.ones_like(out) for out in outs], strict=True)
    go_back(torch.stack([(out * weight.double().cpu()).sum() for out, weight in pairs]).sum())
    is_shared = name in ("matmul_reduce_scatter", "matmul_all_reduce")
    of_bias = None if bias is None else bias[0 if is_shared else rank].grad
    return (a[rank].grad, b[rank].grad, of_bias), [out.detach() for out in outs]


def operands(inputs: Inputs, rank: int, needs: Sequence[bool] = (True, True, True)) -> list[torch.Tensor | None]:
    """A rank's, as leaves."""
    own = [inputs.a[rank], inputs.b[rank], None if inputs.bias is None else inputs.bias[rank]]
    return [
        each if each is None else each.detach().requires_grad_(is_needed)
        for each, is_needed in zip(own, needs, strict=True)
    ]


def go_back(out: torch.Tensor, grad: torch.Tensor | None = None, **options: Any) -> None:
    """Backward from a tensor; from the sum of its elements if there is no gradient given."""
    grad = torch.ones_like(out) if grad is None else grad
    out.backward(grad, **options)  # type: ignore[no-untyped-call]


def grad_of(leaf: torch.Tensor | None) -> torch.Tensor:
    assert leaf is not None
    assert leaf.grad is not None
    return leaf.grad


def weights_for(outs: list[torch.Tensor], like: torch.Tensor, seed: int) -> list[torch.Tensor]:
    source, dtype = torch.Generator().manual_seed(seed), str(like.dtype).removeprefix("torch.")
    return [matrix(out.shape, dtype, source, is_exact=True).to(like.device) for out in outs]


def options_of(name: str, candidate: str | None, inputs: Inputs) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if name != "replicated_matmul":
        options["candidate"] = candidate
    if name != "matmul_all_reduce":
        options["backward_candidate"] = candidate
    if inputs.counts is not None:
        options["counts"] = inputs.counts
    return options


def check(
    name: str,
    group: PeerGroup,
    inputs: Inputs,
    candidate: str | None,
    needs: Sequence[bool] = (True, True, True),
    seed: int = 77,
    **more: Any,
) -> None:
    """Forward and backward on all ranks, against the exact gradients."""
    rank = group.rank
    what = (
        f"{name}, {candidate}, a {list(inputs.a[0].shape)}, b {list(inputs.b[0].shape)}, {inputs.a[0].dtype}, {needs}"
    )
    _, outs = expected(name, inputs, None, rank)
    weights = weights_for(outs, inputs.a[0], seed)
    wanted, _ = expected(name, inputs, weights, rank)
    a, b, bias = operands(inputs, rank, needs)
    out = OPERATORS[name](a, b, group, bias=bias, **options_of(name, candidate, inputs), **more)
    own = 0 if name in ALIKE else rank
    assert_equal(out.detach(), outs[own], what)
    go_back(out, weights[own])
    for label, leaf, grad, is_needed in zip(("a", "b", "bias"), (a, b, bias), wanted, needs, strict=True):
        if leaf is None or not is_needed:
            assert leaf is None or leaf.grad is None, f"{what}: gradient of {label}"
            continue
        assert leaf.grad is not None, f"{what}: no gradient of {label}"
        assert leaf.grad.dtype == leaf.dtype
        assert grad is not None
        if grad.numel():
            assert_equal(leaf.grad.reshape(grad.shape), grad, f"{what}: gradient of {label}")


def check_grads(found: Sequence[torch.Tensor], wanted: Grads, what: str) -> None:
    """Of ``a``, ``b`` and the bias, all of which have one."""
    for label, got, true in zip(("a", "b", "bias"), found, wanted, strict=True):
        assert true is not None
        assert_equal(got, true, f"{what}: gradient of {label}")


def refill(leaves: Sequence[torch.Tensor | None], fresh: Inputs, rank: int) -> None:
    """The same tensors get a rank's other values."""
    assert fresh.bias is not None
    for leaf, value in zip(leaves, (fresh.a, fresh.b, fresh.bias), strict=True):
        assert leaf is not None
        leaf.copy_(value[rank])


def reference_of_branches(inputs: list[Inputs], back: Inputs, rank: int) -> list[torch.Tensor]:
    """By torch, all ranks at once."""
    a = [each.detach().double().cpu().requires_grad_() for each in inputs[0].a]
    weights = [[each.detach().double().cpu().requires_grad_() for each in one.b] for one in inputs]
    last = [each.detach().double().cpu().requires_grad_() for each in back.b]
    total = torch.zeros(()).double()
    for own in range(len(a)):
        q, k, v = (torch.cat(a) @ one[own] for one in weights)
        total = total + ((q * k + v) @ last[own]).sum()
    go_back(total)
    found = [a[rank].grad, *(one[rank].grad for one in weights), last[rank].grad]
    return [each for each in found if each is not None]
