"""What every rank does in the tests of operators under torch.compile: the same bits as without it, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from crossfade.errors import ChannelClosed
from crossfade.ops.calls.job import Operator
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.layers import regions
from crossfade.ops.layers.linear import ColumnParallelLinear, RowParallelLinear
from crossfade.ops.operators import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_all_to_all,
    matmul_all_to_all_padded,
    matmul_reduce_scatter,
)
from crossfade.peers.group import PeerGroup
from tests.helpers.ops_gradients import OPERATORS, inputs_for
from tests.helpers.ops_inputs import Inputs, device_of, make, opened

SIZES = (12, 10, 6)
WAYS: tuple[Candidate | str | None, ...] = (None, "plain", "rounds(rounds=2)", Candidate.of("rounds", rounds=3))
Step = Callable[..., torch.Tensor]


def compiled(step: Step, *, backend: str = "", dynamic: bool | None = None) -> Step:
    """Without graph breaks. On a GPU, by inductor."""
    torch._dynamo.reset()
    backend = backend or ("inductor" if torch.cuda.is_available() else "aot_eager")
    made: Step = torch.compile(step, fullgraph=True, backend=backend, dynamic=dynamic)
    return made


def run(step: Step, operands: list[Any], wanted: tuple[bool, ...]) -> list[Any]:
    """The output and the gradients of some operands."""
    leaves = [
        each if each is None else each.detach().clone(memory_format=torch.preserve_format).requires_grad_(has_grad)
        for each, has_grad in zip(operands, wanted, strict=True)
    ]
    out = step(*leaves)
    if any(wanted):
        weights = torch.arange(out.numel(), device=out.device).view(out.shape) % 5
        torch.autograd.backward((out * weights).sum())
    return [out.detach(), *(each if each is None else each.grad for each in leaves)]


def assert_same(got: list[Any], wanted: list[Any], what: str) -> None:
    assert len(got) == len(wanted), what
    for one, other in zip(got, wanted, strict=True):
        assert (one is None) == (other is None), what
        if one is not None:
            assert one.shape == other.shape, what
            assert one.stride() == other.stride(), what
            assert torch.equal(one, other), what


def own(inputs: Inputs, rank: int) -> list[Any]:
    return [inputs.a[rank], inputs.b[rank], None if inputs.bias is None else inputs.bias[rank]]


def hold(name: str, group: PeerGroup, inputs: Inputs, needs: tuple[bool, ...], backend: str = "", **more: Any) -> None:
    """Compiled and eager."""

    def step(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return OPERATORS[name](a, b, group, bias=bias, **more).relu()

    operands = own(inputs, group.rank)
    wanted = run(step, operands, needs)
    assert_same(run(compiled(step, backend=backend), operands, needs), wanted, f"{name}, {needs}, {more}")


def every_operator(device: str) -> None:
    """All operators and ways, both layouts, with and without a bias, leading dimensions."""
    with opened(device) as group:
        for name in OPERATORS:
            for number, way in enumerate(WAYS):
                has_bias, layout, lead = number != 1, ("rows", "columns")[number % 2], ((), (2,))[number // 2]
                more: dict[str, Any] = {} if name == "replicated_matmul" else {"candidate": way}
                inputs = inputs_for(name, group, SIZES, "float32", lead=lead, layout=layout, has_bias=has_bias)
                hold(name, group, inputs, (True, True, has_bias), **more)


def some_gradients(device: str) -> None:
    """Where not all operands need one: other things are saved and gathered."""
    with opened(device) as group:
        for name in OPERATORS:
            inputs = inputs_for(name, group, SIZES, "float32", layout="columns", has_bias=True)
            for needs in ((False, False, False), (True, False, False), (False, True, False), (False, False, True)):
                hold(name, group, inputs, needs)
        inputs = make(Operator.ALL_GATHER, group, SIZES)
        hold("all_gather_matmul", group, inputs, (True, True, False), save_gathered=False, backward_candidate="rounds")


def counted(device: str) -> None:
    """Uneven counts; rooms of one size whose counts are on the device."""
    with opened(device) as group:
        counts = [[p + 2 * q for q in range(group.num_ranks)] for p in range(group.num_ranks)]
        inputs = make(Operator.ALL_TO_ALL, group, SIZES, counts=counts, has_bias=True)

        def uneven(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return matmul_all_to_all(a, b, group, counts, bias=bias).relu()

        operands, needs = own(inputs, group.rank), (True, True, True)
        assert_same(run(compiled(uneven), operands, needs), run(uneven, operands, needs), "uneven")
        inputs = make(Operator.ALL_TO_ALL, group, SIZES)
        rooms = torch.arange(group.num_ranks, device=device_of(group)) + group.rank

        def padded(a: torch.Tensor, b: torch.Tensor, bias: None) -> torch.Tensor:
            rows, received = matmul_all_to_all_padded(a, b, group, rooms)
            return rows * received.sum()

        operands, needs = own(inputs, group.rank), (True, True, False)
        assert_same(run(compiled(padded), operands, needs), run(padded, operands, needs), "padded")


def given_outputs(device: str) -> None:
    """Outputs of the caller's are filled, and its own work is enqueued."""
    with opened(device) as group, torch.no_grad():
        inputs = make(Operator.ALL_GATHER, group, SIZES)
        a, b, _ = own(inputs, group.rank)
        out, rows = a.new_zeros(len(a) * group.num_ranks, SIZES[1]), a.new_zeros(len(a) * group.num_ranks, SIZES[2])

        def gather(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return all_gather_matmul(a, b, group, out=out, gathered=rows) + 1

        result = compiled(gather)(a, b)
        assert torch.equal(result, out + 1)
        assert torch.equal(rows, torch.cat(inputs.a))
        assert torch.equal(out, all_gather_matmul(a, b, group))
        a, b, _ = own(make(Operator.ALL_REDUCE, group, SIZES), group.rank)
        done = a.new_zeros(3)

        def reduce(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return matmul_all_reduce(a, b, group, meanwhile=lambda: done.add_(1))

        assert torch.equal(compiled(reduce)(a, b), matmul_all_reduce(a, b, group))
        assert done.tolist() == [1, 1, 1]


def block(device: str) -> None:
    """A network split over ranks, of several batches in turn: lengths become symbols, and no graph breaks."""
    with opened(device, num_lanes=2) as group:
        up = make(Operator.ALL_GATHER, group, (8, 16, 6), layout="columns").b[group.rank]
        down = make(Operator.REDUCE_SCATTER, group, (8, 6, 16), layout="columns").b[group.rank]

        def network(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
            inner = all_gather_matmul(x, up, group).relu()
            return matmul_reduce_scatter(inner, down, group, lane=1, candidate="rounds")

        made = compiled(network, dynamic=True)
        for rows in (8, 24, 5):
            x = make(Operator.ALL_GATHER, group, (rows, 16, 6), seed=rows).a[group.rank]
            operands, needs = [x, up, down], (True, True, True)
            assert_same(run(made, operands, needs), run(network, operands, needs), f"{rows} rows")


def layers(device: str) -> None:
    """Layers that are split over the ranks, with whole and with shared sequences, with outputs that are gathered."""
    with opened(device) as group:
        torch.manual_seed(5)
        x = torch.randn(4 * group.num_ranks, 3, 8, device=device_of(group))
        for sequence_parallel in (False, True):
            options: dict[str, Any] = {"sequence_parallel": sequence_parallel, "device": device_of(group)}
            up = ColumnParallelLinear(8, 4 * group.num_ranks, group, **options)
            down = RowParallelLinear(4 * group.num_ranks, 8, group, **options)
            whole = ColumnParallelLinear(8, 2 * group.num_ranks, group, gather_output=True, device=device_of(group))
            back = RowParallelLinear(2 * group.num_ranks, 8, group, input_is_parallel=False, device=device_of(group))
            model = torch.nn.Sequential(up, torch.nn.ReLU(), down, whole, back)
            for split in (False, True):
                own = x.chunk(group.num_ranks)[group.rank] if sequence_parallel else x

                def step(x: torch.Tensor, split: bool = split, model: Any = model) -> torch.Tensor:
                    return model(regions.split(x, group, 0) if split else x).relu()  # type: ignore[no-any-return]

                if split and sequence_parallel:
                    own = torch.cat([own] * group.num_ranks)
                wanted = run(step, [own], (True,))
                wanted += [each.grad for each in model.parameters()]
                model.zero_grad()
                got = run(compiled(step), [own], (True,))
                assert_same(got + [each.grad for each in model.parameters()], wanted, f"{sequence_parallel}, {split}")
                model.zero_grad()


def several_groups(device: str) -> None:
    """One program on two groups; what was compiled for a group that is closed says so."""

    def step(a: torch.Tensor, b: torch.Tensor, group: PeerGroup) -> torch.Tensor:
        return matmul_all_reduce(a, b, group) * 2

    def kept(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        operators: Any = torch.ops.crossfade
        product: torch.Tensor = operators.matmul_all_reduce(a, b, None, key, 0, None, None)
        return product

    with torch.no_grad():
        made = compiled(step)
        with opened(device) as first:
            a, b, _ = own(make(Operator.ALL_REDUCE, first, SIZES), first.rank)
            wanted, key = step(a, b, first), first.key
            assert torch.equal(made(a, b, first), wanted)
            with opened(device) as second:
                assert torch.equal(made(a, b, second), wanted)
            with pytest.raises(ChannelClosed, match=r"no open group 'group \d+, rank .*\nhint: keep the group open"):
                made(a, b, second)
            assert torch.equal(compiled(kept)(a, b) * 2, wanted)
        with pytest.raises(ChannelClosed, match=f"no open group '{first.key}'"):
            kept(a, b)


CASES: dict[str, Callable[[str], None]] = {
    each.__name__: each
    for each in (every_operator, some_gradients, counted, given_outputs, block, layers, several_groups)
}
