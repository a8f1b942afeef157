"""What every rank does in the tests of the operators' gradients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from crossfade.errors import DeviceError
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.gradients.backward import find_scratch, reserve_scratch
from crossfade.ops.operators import (
    all_gather_matmul,
    matmul_all_reduce,
    matmul_all_to_all_padded,
    matmul_reduce_scatter,
)
from crossfade.peers.group import PeerGroup
from tests.helpers.ops_gradients import (
    ALIKE,
    FEW,
    OPERATORS,
    check,
    check_grads,
    expected,
    go_back,
    grad_of,
    inputs_for,
    operands,
    options_of,
    reference_of_branches,
    refill,
    weights_for,
)
from tests.helpers.ops_inputs import CANDIDATES, DTYPES, Inputs, absolute, assert_equal, captured, device_of, opened


def shapes(device: str) -> None:
    """Every operator, candidate and layout, with odd sizes, fewer rows than ranks and none at all, with and without a bias."""
    sizes = [(1, 1, 1), (2, 3, 24), (7, 33, 5), (16, 8, 16), (0, 4, 4), (3, 0, 4), (3, 4, 0)]
    with opened(device) as group:
        for name, candidate in product(OPERATORS, CANDIDATES):
            for number, each in enumerate(sizes):
                check(name, group, inputs_for(name, group, each, seed=number, has_bias=number % 2 == 0), candidate)
            for layout in ("rows", "columns"):
                check(name, group, inputs_for(name, group, (11, 13, 7), layout=layout, has_bias=True), candidate)


def types(device: str) -> None:
    """All element types, exact; leading dimensions; operands that are no row-major matrix."""
    with opened(device) as group:
        for name, candidate, dtype in product(OPERATORS, FEW, DTYPES):
            check(name, group, inputs_for(name, group, (9, 17, 24), dtype, has_bias=True), candidate)
        for name, candidate, lead in product(OPERATORS, FEW, ((2,), (3, 1, 2))):
            check(name, group, inputs_for(name, group, (8, 12, 10), lead=lead, has_bias=True), candidate)
            inputs = inputs_for(name, group, (8, 12, 10), seed=1, lead=lead)
            inputs.a[:] = [each.transpose(0, -1).contiguous().transpose(0, -1) for each in inputs.a]
            check(name, group, inputs, candidate)


def needs(device: str) -> None:
    """Only some operands need a gradient; ranks save no more than that."""
    with opened(device) as group:
        for name, candidate in product(OPERATORS, FEW):
            for wanted in product((False, True), repeat=3):
                inputs = inputs_for(name, group, (6, 5, 7), seed=2, has_bias=True)
                if any(wanted):
                    check(name, group, inputs, candidate, wanted)


def gathered_again(device: str) -> None:
    """An all-gather that saves this rank's rows only."""
    with opened(device) as group:
        for candidate, has_bias in product(CANDIDATES, (False, True)):
            inputs = inputs_for("all_gather_matmul", group, (9, 5, 7), seed=3, has_bias=has_bias, lead=(2,))
            check("all_gather_matmul", group, inputs, candidate, save_gathered=False)
        a, b, _ = operands(inputs_for("all_gather_matmul", group, (4, 6, 8)), group.rank)
        for is_saved in (False, True):
            kept: list[int] = []

            def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
                kept.append(tensor.numel())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                all_gather_matmul(a, b, group, save_gathered=is_saved)  # type: ignore[arg-type]
            assert kept == [4 * 8 * (group.num_ranks if is_saved else 1), 8 * 6]


def reserved(device: str) -> None:
    """Rows that gradients gather go into memory which the other ranks write, where it is long enough."""
    num_ranks = dist.get_world_size()
    with opened(device, buffer_bytes=512 * num_ranks, heap_bytes=1 << 16, num_lanes=2) as group:
        reserve_scratch(group, 8 * num_ranks * 9 * 12)
        piece = find_scratch(group, 0, (9 * num_ranks, 12), torch.zeros(1, dtype=torch.float64))
        assert group.shared_offset(piece) is not None
        cases: list[tuple[str, tuple[int, int, int], dict[str, Any]]]
        cases = [("matmul_reduce_scatter", (9, 12, 7), {}), ("all_gather_matmul", (9, 7, 12), {"save_gathered": False})]
        for seed, (candidate, (name, sizes, more)) in enumerate(product((*CANDIDATES, None), cases)):
            for lane in (0, 1, 0):
                piece.fill_(7)
                group.barrier()
                check(name, group, inputs_for(name, group, sizes, seed=seed), candidate, lane=lane, **more)
                assert bool((piece == 7).all()) is (lane == 1), f"{name}, {candidate}, lane {lane}"
            longer = inputs_for(name, group, (sizes[0] + 1, *sizes[1:]), seed=seed)
            check(name, group, longer, candidate, **more)
        with pytest.raises(
            DeviceError, match=r"bytes of the heap are left\nhint: open the group with a larger heap_bytes"
        ):
            reserve_scratch(group, 1 << 20)


def uneven(device: str) -> None:
    """Counts of all kinds, and counts that only the device knows."""
    num_ranks = dist.get_world_size()
    ranks = range(num_ranks)
    several = [
        [[(3 * p + 5 * q) % 7 for q in ranks] for p in ranks],
        [[9] + [0] * (num_ranks - 1) for _ in ranks],
        [[0] * num_ranks] * (num_ranks - 1) + [[3 + p for p in ranks]],
        [[0] * num_ranks] * num_ranks,
    ]
    with opened(device, buffer_bytes=512 * num_ranks) as group:
        for counts, candidate in product(several, (*CANDIDATES, None)):
            inputs = inputs_for("matmul_all_to_all", group, (0, 6, 5), counts=counts, has_bias=True)
            check("matmul_all_to_all", group, inputs, candidate)
        inputs = inputs_for("matmul_all_to_all", group, (4, 6, 5), seed=4)
        a, b, _ = operands(inputs, group.rank)
        wanted, _ = expected("matmul_all_to_all", inputs, None, group.rank)
        own = torch.arange(num_ranks, device=device_of(group))
        rows, _ = matmul_all_to_all_padded(a, b, group, own)  # type: ignore[arg-type]
        go_back(rows.sum())
        assert wanted[0] is not None
        assert_equal(grad_of(a), wanted[0], "padded")


def small_slots(device: str) -> None:
    """Slots that take a few rows only, on lanes that can be replayed as well."""
    for is_replayable in (False, True):
        with opened(device, buffer_bytes=256 * dist.get_world_size(), is_replayable=is_replayable) as group:
            for name, candidate in product(OPERATORS, CANDIDATES[3:]):
                for each in ((19, 16, 16), (31, 5, 3)):
                    check(name, group, inputs_for(name, group, each), candidate)


def without_a_candidate(device: str) -> None:
    """The tuner's choice, forward and backward."""
    with opened(device, num_lanes=2) as group:
        for name, sizes in product(OPERATORS, ((64, 128, 8), (3, 5, 7))):
            for layout in ("rows", "columns"):
                check(name, group, inputs_for(name, group, sizes, layout=layout, has_bias=True), None, lane=1)


def layers(device: str) -> None:
    """Weights as a linear layer has them: gradients lie as the weight does, add up over calls, and again over backward passes."""
    with opened(device) as group:
        for name, candidate in product(OPERATORS, FEW):
            inputs = inputs_for(name, group, (6, 10, 12), seed=5, layout="columns", has_bias=True)
            wanted, _ = expected(name, inputs, None, group.rank)
            a, b, bias = operands(inputs, group.rank)
            assert b is not None
            weight = b.detach().t().requires_grad_()
            options = options_of(name, candidate, inputs)
            out = OPERATORS[name](a, weight.t(), group, bias=bias, **options)
            out = out + OPERATORS[name](a, weight.t(), group, bias=bias, **options)
            for number in (1, 2):
                go_back(out.sum(), retain_graph=number == 1)
                if number == 1:
                    assert grad_of(weight).is_contiguous(), name
                for leaf, grad in ((a, wanted[0]), (weight, wanted[1]), (bias, wanted[2])):
                    assert grad is not None
                    flat = grad_of(leaf).t() if leaf is weight else grad_of(leaf)
                    assert_equal(flat, 2 * number * grad, f"{name}, {candidate}, pass {number}")


def branches(device: str) -> None:
    """Several products of the same rows, as a query, key and value, on one lane, then a checkpoint: the ranks keep one order."""
    with opened(device) as group:
        for turn in range(3):
            inputs = [inputs_for("all_gather_matmul", group, (5, 4, 6), seed=30 + turn + k) for k in range(3)]
            back = inputs_for("matmul_reduce_scatter", group, (5, 6, 4), seed=40 + turn)
            wanted = reference_of_branches(inputs, back, group.rank)
            a = inputs[0].a[group.rank].detach().requires_grad_()
            weights = [each.b[group.rank].detach().requires_grad_() for each in inputs]
            last = back.b[group.rank].detach().requires_grad_()

            def body(
                a: torch.Tensor, last: torch.Tensor = last, weights: list[torch.Tensor] = weights, turn: int = turn
            ) -> torch.Tensor:
                q, k, v = (all_gather_matmul(a, weight, group, candidate="rounds") for weight in weights)
                options: dict[str, Any] = {"candidate": CANDIDATES[turn], "backward_candidate": "rounds"}
                return matmul_reduce_scatter(q * k + v, last, group, **options)

            for is_again in (False, True):
                for leaf in (a, last, *weights):
                    leaf.grad = None
                out = checkpoint(body, a, use_reentrant=False) if is_again else body(a)
                assert isinstance(out, torch.Tensor)
                go_back(out.sum())
                for got, grad in zip((a, *weights, last), wanted, strict=True):
                    assert_equal(grad_of(got), grad, f"branches, {is_again}")


def other_threads(device: str) -> None:
    """Backward in another thread than forward, and back again, on one lane."""
    with opened(device) as group:
        for turn, name in enumerate(OPERATORS):
            inputs = inputs_for(name, group, (6, 5, 7), seed=turn)
            wanted, _ = expected(name, inputs, None, group.rank)
            a, b, _ = operands(inputs, group.rank)
            out = OPERATORS[name](a, b, group, **options_of(name, "rounds(rounds=2)", inputs))
            thread = threading.Thread(target=go_back, args=(out.sum(),))
            thread.start()
            thread.join()
            if device != "cpu":
                torch.cuda.synchronize()
            assert wanted[0] is not None
            assert_equal(grad_of(a), wanted[0], name)


def meanwhile(device: str) -> None:
    """The caller's own work is done once, with every candidate, also where there is nothing to do."""
    with opened(device) as group:
        for function, candidate, sizes in product(
            (matmul_reduce_scatter, matmul_all_reduce), (*CANDIDATES, None), ((6, 5, 7), (0, 5, 7))
        ):
            inputs = inputs_for(function.__name__, group, sizes)
            _, outs = expected(function.__name__, inputs, None, group.rank)
            seen: list[int] = []
            a, b, _ = operands(inputs, group.rank, (False, False, False))
            assert a is not None
            assert b is not None
            out = function(a, b, group, candidate=candidate, meanwhile=lambda seen=seen: seen.append(1))  # type: ignore[misc]
            assert seen == [1], f"{function.__name__}, {candidate}, {sizes}"
            assert_equal(out, outs[0 if function is matmul_all_reduce else group.rank], str(candidate))


def refusals(device: str) -> None:
    """What has no gradient says so, and the group is as good as before."""
    with opened(device) as group:
        for name in OPERATORS:
            inputs = inputs_for(name, group, (6, 5, 7))
            a, b, _ = operands(inputs, group.rank)
            assert a is not None
            with torch.no_grad():
                out = OPERATORS[name](a, b, group)
                assert not out.requires_grad
            if name != "replicated_matmul":
                with pytest.raises(RuntimeError, match=rf"{name}\(\): functions with out=.* automatic differentiation"):
                    OPERATORS[name](a, b, group, out=out)
            out = OPERATORS[name](a, b, group)
            (grad,) = torch.autograd.grad(out.square().sum(), a, create_graph=True)
            assert grad.requires_grad
            with pytest.raises(RuntimeError, match=rf"the gradient of {name} has no gradient itself\nhint: "):
                go_back(grad.sum())
            check(name, group, inputs, "rounds")
        rows = torch.zeros(6 * group.num_ranks, 7, dtype=torch.float64, device=device_of(group))
        a, b, _ = operands(inputs_for("all_gather_matmul", group, (6, 5, 7)), group.rank)
        with pytest.raises(RuntimeError, match=r"functions with gathered=\.\.\. arguments don't support"):
            all_gather_matmul(a, b, group, gathered=rows)  # type: ignore[arg-type]


def rounding(device: str) -> None:
    """Real numbers: gradients are within the type's rounding of those in float64."""
    with opened(device) as group:
        for name, candidate, dtype in product(OPERATORS, FEW, DTYPES):
            inputs = inputs_for(
                name, group, (20, 24, 32), dtype, seed=3, is_exact=False, has_bias=True, layout="columns"
            )
            _, outs = expected(name, inputs, None, group.rank)
            weights = weights_for(outs, inputs.a[0], 5)
            wanted, _ = expected(name, inputs, weights, group.rank)
            size, _ = expected(name, absolute(inputs), [weight.abs() for weight in weights], group.rank)
            leaves = operands(inputs, group.rank)
            out = OPERATORS[name](leaves[0], leaves[1], group, bias=leaves[2], **options_of(name, candidate, inputs))
            go_back(out, weights[0 if name in ALIKE else group.rank])
            unit = torch.finfo(getattr(torch, dtype)).eps
            inner = torch.finfo(torch.float64 if dtype == "float64" else torch.float32).eps * 100
            for leaf, grad, most in zip(leaves, wanted, size, strict=True):
                assert grad is not None
                assert most is not None
                error = (grad_of(leaf).double().cpu() - grad).abs()
                assert (error <= most * ((group.num_ranks + 1) * unit + inner)).all(), f"{name}, {candidate}, {dtype}"


def mixed(device: str) -> None:
    """A forward by one candidate and a backward by another, given as values."""
    with opened(device) as group:
        for name in ("matmul_reduce_scatter", "all_gather_matmul", "matmul_all_to_all"):
            inputs = inputs_for(name, group, (6, 5, 7))
            wanted, _ = expected(name, inputs, None, group.rank)
            for first, second in product((Candidate("plain"), Candidate.of("rounds", rounds=2)), repeat=2):
                a, b, _ = operands(inputs, group.rank)
                before = group.lane().statistics().num_exchanges
                out = OPERATORS[name](a, b, group, candidate=first, backward_candidate=second)
                middle = group.lane().statistics().num_exchanges
                go_back(out.sum())
                after = group.lane().statistics().num_exchanges
                assert (middle > before, after > middle) == (first.name == "rounds", second.name == "rounds")
                assert wanted[0] is not None
                assert_equal(grad_of(a), wanted[0], f"{name}, {first}, {second}")


def replays(device: str) -> None:
    """Forward and backward captured into one graph, and replayed with other operands; gradients are poisoned before."""
    candidates = ("rounds", "rounds(rounds=3)") if device == "cpu" else FEW
    for name, candidate in product(OPERATORS, candidates):
        with opened(device, is_replayable=True) as group:
            inputs = inputs_for(name, group, (18, 12, 24), seed=1, has_bias=True)
            leaves = operands(inputs, group.rank)
            _, outs = expected(name, inputs, None, group.rank)
            weights = weights_for(outs, inputs.a[0], 6)
            own = weights[0 if name in ALIKE else group.rank]
            found: list[torch.Tensor] = []

            def body(
                name: str = name,
                candidate: str = candidate,
                group: PeerGroup = group,
                inputs: Inputs = inputs,
                leaves: list[Any] = leaves,
                own: torch.Tensor = own,
                found: list[torch.Tensor] = found,
            ) -> None:
                a, b, bias = leaves
                out = OPERATORS[name](a, b, group, bias=bias, **options_of(name, candidate, inputs))
                found[:] = torch.autograd.grad(out, leaves, own)

            body()
            launch, drop = captured(group, body)
            for seed in range(3):
                fresh = inputs_for(name, group, (18, 12, 24), seed=20 + seed, has_bias=True)
                with torch.no_grad():
                    refill(leaves, fresh, group.rank)
                    for grad in found:
                        grad.fill_(torch.nan)
                    launch()  # on a CPU the same calls of torch again
                group.check()
                wanted, _ = expected(name, fresh, weights, group.rank)
                check_grads(found, wanted, f"replay {seed} of {name}, {candidate}")
            drop()


def again(device: str) -> None:
    """The same tensors with other values, call after call, on lanes that can be replayed; what came out before stays as it was."""
    with opened(device, is_replayable=True) as group:
        for name, candidate in product(OPERATORS, (*FEW, None)):
            inputs = inputs_for(name, group, (18, 12, 24), seed=1, has_bias=True)
            leaves, kept = operands(inputs, group.rank), []
            for seed in range(5):
                fresh = inputs_for(name, group, (18, 12, 24), seed=20 + seed, has_bias=True)
                with torch.no_grad():
                    refill(leaves, fresh, group.rank)
                wanted, _ = expected(name, fresh, None, group.rank)
                out = OPERATORS[name](
                    leaves[0], leaves[1], group, bias=leaves[2], **options_of(name, candidate, inputs)
                )
                kept.append((torch.autograd.grad(out.sum(), leaves), wanted))  # type: ignore[arg-type]
            for seed, (found, wanted) in enumerate(kept):
                check_grads(found, wanted, f"{name}, {candidate}, call {seed}")


CASES: dict[str, Callable[[str], None]] = {
    each.__name__: each
    for each in (
        shapes,
        types,
        needs,
        gathered_again,
        reserved,
        uneven,
        small_slots,
        without_a_candidate,
        layers,
        branches,
        other_threads,
        meanwhile,
        refusals,
        rounding,
        mixed,
        replays,
        again,
    )
}
