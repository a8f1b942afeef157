"""Operands for the tests of `crossfade.ops` that follow from a seed, and what operators must give, by products in float64.

Exact operands are -1, 0 and 1 with a short inner dimension, so every sum is a whole number that bfloat16 has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from crossfade.device.capture import capture
from crossfade.ops.calls.job import Operator
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.operators import OPERATORS
from crossfade.peers.group import PeerGroup
from crossfade.peers.opening import open_group

FUNCTIONS: dict[Operator, Callable[..., torch.Tensor]] = {name: spec.function for name, spec in OPERATORS.items()}
REFERENCES: dict[Operator, Callable[..., torch.Tensor]] = {name: spec.reference for name, spec in OPERATORS.items()}
CANDIDATES = ("plain", "rounds", "rounds(rounds=2)", "rounds(rounds=5)")
ROUNDS = CANDIDATES[1:]
DTYPES = ("bfloat16", "float16", "float32", "float64")
EXACT_K = 24
Matrix = list[list[int]]


@dataclass(frozen=True)
class Inputs:
    """All ranks' operands: what follows from a seed, the same in every process."""

    a: list[torch.Tensor]
    b: list[torch.Tensor]
    bias: list[torch.Tensor] | None
    counts: Matrix | None = None

    def partial(self, rank: int) -> torch.Tensor:
        """A rank's product in float64, without the bias."""
        return self.a[rank].double().cpu().flatten(0, -2) @ self.b[rank].double().cpu()

    def product(self, rank: int) -> torch.Tensor:
        value = self.partial(rank)
        return value if self.bias is None else value + self.bias[rank].double().cpu()


def matrix(shape: Sequence[int], dtype: str, source: torch.Generator, *, is_exact: bool) -> torch.Tensor:
    if is_exact:
        return torch.randint(-1, 2, tuple(shape), generator=source).to(getattr(torch, dtype))
    return torch.randn(tuple(shape), generator=source, dtype=torch.float64).to(getattr(torch, dtype))


def make(
    operator: Operator,
    group: PeerGroup,
    sizes: tuple[int, int, int],
    dtype: str = "float32",
    *,
    seed: int = 0,
    layout: str = "rows",
    lead: tuple[int, ...] = (),
    has_bias: bool = False,
    is_exact: bool = True,
    counts: Matrix | None = None,
) -> Inputs:
    """``sizes``: M for one rank's block, N, K. ``lead``: leading dimensions of ``a``."""
    rows, columns, depth = sizes
    num_ranks, device = group.num_ranks, device_of(group)
    has_blocks = operator in (Operator.REDUCE_SCATTER, Operator.ALL_TO_ALL)
    source = torch.Generator().manual_seed(seed)
    inputs = Inputs([], [], [] if has_bias else None, counts)
    for rank in range(num_ranks):
        num_rows = rows * num_ranks if has_blocks else rows
        num_rows = sum(counts[rank]) if counts is not None else num_rows
        inputs.a.append(matrix((*lead, num_rows, depth), dtype, source, is_exact=is_exact).to(device))
        shape = (columns, depth) if layout == "columns" else (depth, columns)
        b = matrix(shape, dtype, source, is_exact=is_exact).to(device)
        inputs.b.append(b.t() if layout == "columns" else b)
        if inputs.bias is not None:
            inputs.bias.append(matrix((columns,), dtype, source, is_exact=is_exact).to(device))
    return inputs


def spread(inputs: Inputs) -> None:
    """The same biases with gaps between their elements, which hold something else."""
    assert inputs.bias is not None
    inputs.bias[:] = [torch.stack([each, torch.full_like(each, 9)], dim=1)[:, 0] for each in inputs.bias]


def expected(operator: Operator, inputs: Inputs, rank: int) -> torch.Tensor:
    """What a rank must get, in float64 on the CPU."""
    num_ranks = len(inputs.a)
    if operator in (Operator.REDUCE_SCATTER, Operator.ALL_REDUCE):
        total = inputs.product(0)
        for other in range(1, num_ranks):
            total = total + inputs.partial(other)
        if operator is Operator.ALL_REDUCE:
            return total.view(*inputs.a[0].shape[:-1], total.shape[1])
        block = len(total) // num_ranks
        return total[rank * block : (rank + 1) * block]
    if operator is Operator.ALL_GATHER:
        gathered = torch.cat([each.double().cpu().flatten(0, -2) for each in inputs.a])
        product = gathered @ inputs.b[rank].double().cpu()
        return product if inputs.bias is None else product + inputs.bias[rank].double().cpu()
    rows = []
    for other in range(num_ranks):
        product = inputs.product(other)
        counts = [len(product) // num_ranks] * num_ranks if inputs.counts is None else inputs.counts[other]
        rows.append(torch.split(product, counts)[rank])
    return torch.cat(rows)


def call(operator: Operator, group: PeerGroup, inputs: Inputs, candidate: Candidate | str | None, **more: Any) -> Any:
    rank = group.rank
    if inputs.counts is not None:
        more["counts"] = inputs.counts
    if inputs.bias is not None:
        more["bias"] = inputs.bias[rank]
    return FUNCTIONS[operator](inputs.a[rank], inputs.b[rank], group, candidate=candidate, **more)


def assert_equal(got: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert tuple(got.shape) == tuple(wanted.shape), f"{what}: {list(got.shape)}, not {list(wanted.shape)}"
    wrong = got.double().cpu() != wanted
    if wrong.any():
        rows = wrong.flatten(0, -2).any(dim=1).nonzero().flatten().tolist()
        raise AssertionError(f"{what}: {int(wrong.sum())} of {wrong.numel()} wrong, in rows {rows[:20]}")


def check(operator: Operator, group: PeerGroup, inputs: Inputs, candidate: str | None, **more: Any) -> torch.Tensor:
    """One call on all ranks, against the exact result."""
    what = f"{operator}, {candidate}, a {list(inputs.a[0].shape)}, b {list(inputs.b[0].shape)}, {inputs.a[0].dtype}"
    got: torch.Tensor = call(operator, group, inputs, candidate, **more)
    assert got.dtype == inputs.a[0].dtype, what
    assert_equal(got, expected(operator, inputs, group.rank), f"{what}, counts {inputs.counts}, {more}")
    return got


def device_of(group: PeerGroup) -> str:
    return str(group.device)


@contextmanager
def opened(device: str, **options: Any) -> Iterator[PeerGroup]:
    """A group, which leaves nothing behind."""
    group = open_group(
        device="cpu" if device == "cpu" else None, **{"buffer_bytes": 1 << 20, "timeout_s": 15, **options}
    )
    yield group
    if device != "cpu":
        torch.cuda.synchronize()
    group.close()
    assert group.memory.driver.ledger.held() == []


def absolute(inputs: Inputs) -> Inputs:
    bias = None if inputs.bias is None else [each.abs() for each in inputs.bias]
    return Inputs([each.abs() for each in inputs.a], [each.abs() for each in inputs.b], bias, inputs.counts)


def captured(group: PeerGroup, body: Callable[[], Any]) -> tuple[Callable[[], None], Callable[[], None]]:
    """How to replay it, and how to drop it."""
    if group.device_type == "cpu":
        driver, stream = group.memory.driver, group.current_stream()
        replay = capture(driver, stream, body)
        return partial(replay.launch, stream), replay.close
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()

    def launch() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return launch, graph.reset
