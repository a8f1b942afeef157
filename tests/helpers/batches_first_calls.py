"""Cases of what first calls find out: outputs that cannot be joined, splits that fail, modules that must not be interleaved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.checkpoint import checkpoint

from crossfade.batches import InterleavedSteps, interleave, interleaved
from crossfade.batches.choice.calibration import MOST_STEPS
from crossfade.errors import BatchesError
from tests.helpers.batches_models import NEAR, WIDTH, assert_near, gradients, random_model, same_input, train
from tests.helpers.batches_wrappers import GROUPS, Summing, quiet
from tests.helpers.ranks import Case

COPIES = "copy engines"


class Giving(nn.Module):
    """Has a collective, and gives what a function makes of its sum."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make
        self.weight = nn.Parameter(torch.ones(3, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        out = x.clone()
        dist.all_reduce(out)
        return self.make(out)


class _Own:
    """An object that only its maker can compare."""


def outputs_that_do_not_join(device: str) -> None:
    """The whole batch's output comes in each call, and from the first interleaved one on the whole batch is run."""
    makes: list[tuple[Callable[[Tensor], Any], str]] = [
        (lambda y: _Own(), "different objects"),
        (lambda y: y if len(y) > 2 else None, "different objects"),
        (lambda y: y[:1], "outputs of shapes"),
        (lambda y: y.new_ones(len(y) * 2 if len(y) > 3 else len(y)), "other shapes"),
        (lambda y: [y] * len(y), "different structures"),
    ]
    x = same_input(5).to(device)
    for make, why in makes:
        handle = interleave(Giving(make))
        with torch.no_grad():
            outputs = [handle(x) for _ in range(MOST_STEPS + 2)]
        assert {type(each) for each in outputs} == {type(make(x))}
        assert all(not isinstance(each, Tensor) or each.shape == make(x).shape for each in outputs)
        assert why in handle.report().reason
        assert handle.report().way == "one batch"


def an_output_that_all_parts_share(device: str) -> None:
    """A parameter is given as it is."""
    module = Giving(lambda y: None)
    module.make = lambda y: (y, module.weight)
    for way in (GROUPS, None):
        handle = interleave(module, way=way)
        for _ in range(MOST_STEPS + 1):
            assert handle(same_input(6))[1] is module.weight


def lengths_that_change(device: str) -> None:
    """From call to call, on both ranks alike: another call's output says nothing of this one's."""
    model = random_model(3)
    handle = interleave(model, per_shape=False)
    for number in range(MOST_STEPS + 1):
        assert_near(train(handle, model, same_input(6 + number)), train(model, model, same_input(6 + number)))
    assert handle.report().is_settled
    assert GROUPS in handle.report().measured_ms


def a_split_that_raises_at_first(device: str) -> None:
    """On one rank or on all; handles that are made later work."""
    rank = dist.get_rank()
    for num_failing in (1, dist.get_world_size()):

        def split(args: Any, kwargs: Any, number: int, num_failing: int = num_failing) -> Sequence[Any]:
            if rank < num_failing:
                raise KeyError("mine")
            return [(args, kwargs, 1)] * number

        handle = interleave(Giving(lambda y: y), split=split, timeout_s=20)
        error, said = (KeyError, "mine") if rank < num_failing else (BatchesError, "split raises KeyError")
        for _ in range(2 if num_failing > 1 else 1):
            with pytest.raises(error, match=said):
                handle(same_input())
        later = interleave(random_model(3), way=GROUPS)
        assert_near(train(later, later.module, same_input()), train(later.module, later.module, same_input()))
    handle = interleave(Giving(lambda y: y), split=lambda *_: [((), {}, 1)] * 3)
    with pytest.raises(BatchesError, match="split gives 3 parts"):
        handle(same_input())
    handle = interleave(Giving(lambda y: y), split=lambda *_: [(1, 2)] * 2)
    with pytest.raises(TypeError, match="num_rows") as caught:
        handle(same_input())
    assert "a list of (args, kwargs, rows)" in caught.value.__notes__[0]


def batch_norms_that_are_switched(device: str) -> None:
    """After the first call, in a module that is in training all the while."""
    model = nn.Sequential(random_model(3), nn.BatchNorm1d(WIDTH).double())
    handle, x = interleave(model, way=GROUPS), same_input()
    for trains, way in ((False, GROUPS), (True, "one batch"), (False, GROUPS)):
        model[1].train(trains)
        assert_near(train(handle, model, x), train(model, model, x))
        assert handle.report().way == way


def sharded_modules_in_whole_steps(device: str) -> None:
    """Batches of FSDP are one behind the other, and the report says so; asked for, they are an error, on all ranks."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    x = same_input(seed=dist.get_rank()).to(device)
    place = torch.device(device, torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    for kind in ("FSDP2", "FSDP2, compiled", "FSDP1"):
        inner: Any = nn.Sequential(Summing(False), Summing(True)).to(device)
        with quiet():
            model: Any = (
                FullyShardedDataParallel(inner, device_id=place) if kind == "FSDP1" else fully_shard(inner, mesh=mesh)
            )
            if "compiled" in kind:
                model = torch.compile(model, backend="eager")

            def loss_of(rows: Tensor, model: Any = model) -> Any:
                return model(rows).square().mean()

            steps, losses = interleaved(), list[Tensor]()
            for rows in (4, 2):
                for _ in range(MOST_STEPS + 2):
                    with steps as run:
                        run(loss_of, x[:rows])
                        run(loss_of, -x[:rows])
                        losses.append(run.backward())
                assert "sharded by FSDP" in steps.report().reason
                assert steps.report().way == "one batch"
            with torch.no_grad():
                wanted = (loss_of(x[:2]) + loss_of(-x[:2])) / 2
            assert torch.allclose(losses[-1], wanted, atol=NEAR)
            with pytest.raises(BatchesError, match="sharded by FSDP"):
                _step(interleaved(way=GROUPS), partial(loss_of, x), partial(loss_of, -x))


def uneven_exchanges_by_copies(device: str) -> None:
    """Sizes that are equal on one rank only: all ranks take the same way."""
    rank = dist.get_rank()
    counts = [[1, 1], [1, 3]][rank]

    def exchange(rows: Tensor) -> Tensor:
        out = torch.empty(sum(counts), WIDTH, dtype=rows.dtype)
        dist.all_to_all_single(out, rows.new_ones(sum(counts), WIDTH) * (rank + 1), counts, counts)
        return rows + out.sum()

    model = Giving(exchange)
    for way in (GROUPS, COPIES):
        handle = interleave(model, way=way)
        with torch.no_grad():
            for _ in range(3):
                assert torch.equal(handle(same_input()), model(same_input()))


def _step(steps: InterleavedSteps, *losses: Any, later: Any = None) -> None:
    with steps as run:
        for loss in losses:
            run(loss)
        run.backward()
        if later is not None:
            run(later)


def steps_that_are_wrong(device: str) -> None:
    steps, x = interleaved(way=GROUPS), same_input().requires_grad_()
    with pytest.raises(BatchesError, match="has no batch"):
        _step(steps)
    with pytest.raises(TypeError, match="run\\(loss_of, batch\\)"):
        _step(steps, x)
    with pytest.raises(BatchesError, match="single number"):
        _step(steps, lambda: {"loss": x.sum()})
    with pytest.raises(BatchesError, match="have run already"):
        _step(steps, x.sum, later=x.sum)


def a_handle_in_a_checkpoint(device: str) -> None:
    """The whole batch is run, in the forward too: what is run again has to save the same tensors."""
    model = random_model(3)
    handle = interleave(model, way=GROUPS)
    for number in range(4):
        x, again = same_input().requires_grad_(), same_input().requires_grad_()
        out: Any = checkpoint(handle, x, use_reentrant=False)
        out.square().mean().backward()
        ours = gradients(model)
        wanted = model(again)
        wanted.square().mean().backward()
        assert x.grad is not None
        assert again.grad is not None
        assert_near((out.detach(), [x.grad, *ours]), (wanted.detach(), [again.grad, *gradients(model)]))
        if number == 1:
            with pytest.raises(BatchesError, match="nothing has been called"):
                handle.report()
            handle(same_input())
            model.zero_grad()
    assert handle.report().way == GROUPS


FIRST_CALLS: dict[str, Case] = {
    case.__name__: case
    for case in (
        outputs_that_do_not_join,
        an_output_that_all_parts_share,
        lengths_that_change,
        a_split_that_raises_at_first,
        batch_norms_that_are_switched,
        sharded_modules_in_whole_steps,
        uneven_exchanges_by_copies,
        steps_that_are_wrong,
        a_handle_in_a_checkpoint,
    )
}
