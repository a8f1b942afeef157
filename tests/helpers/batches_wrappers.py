"""Cases of interleaved batches under wrappers: DDP, FSDP, DTensor, batch norms, and whole training steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from crossfade import ops
from crossfade.batches import interleave, interleaved, yield_point
from crossfade.batches.carriers.process_groups import ProcessGroups
from crossfade.batches.choice.calibration import MOST_STEPS
from crossfade.batches.coroutines.parts import Run
from crossfade.batches.wrappers.fsdp import TESTED
from crossfade.errors import BatchesError
from tests.helpers.batches_models import (
    NEAR,
    WIDTH,
    all_mean,
    all_sum,
    assert_near,
    gradients,
    random_model,
    same_input,
    train,
)
from tests.helpers.ranks import Case

GROUPS = "process groups"


@contextmanager
def quiet() -> Iterator[None]:
    """torch warns of its own private names, and of what it does on a CPU."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Gathering(nn.Module):
    """The forum's model: all-gathers in the forward of a module in DDP."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH).double() for _ in range(3)])
        self.unused = nn.Linear(WIDTH, WIDTH).double()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = all_mean(torch.tanh(layer(x)))
        return x


def ddp(device: str) -> None:
    x = same_input(seed=dist.get_rank())
    kinds: list[dict[str, Any]] = [{"find_unused_parameters": True}, {"static_graph": True}, {}]
    for options in kinds:
        inner = Gathering()
        if not options:
            del inner.unused
        model = DistributedDataParallel(inner, **options)
        handle = interleave(model, way=GROUPS)
        with quiet():
            for _ in range(2):
                ours = train(handle, model, x)
                assert_near(ours, train(model, model, x))
                for each in ours[1]:
                    others = [torch.empty_like(each) for _ in range(dist.get_world_size())]
                    dist.all_gather(others, each)
                    assert all(torch.equal(each, other) for other in others)


def two_backward_calls_under_ddp(device: str) -> None:
    inner = Gathering()
    del inner.unused
    model = DistributedDataParallel(inner)
    steps = interleaved(way=GROUPS)
    with steps as run:
        parts = [run(lambda x: model(x).sum(), same_input(seed=seed)) for seed in (1, 2)]
    first, second = (part.result for part in parts)
    with quiet():
        first.backward()  # type: ignore[no-untyped-call,unused-ignore]
        with pytest.raises(BatchesError, match="several backward calls"):
            second.backward()  # type: ignore[no-untyped-call,unused-ignore]
    calls = [partial(lambda x: model(x).sum().backward(), same_input(seed=seed)) for seed in (1, 2)]
    with quiet(), pytest.raises(BatchesError, match="several backward calls"):
        Run(ProcessGroups()).go(calls)
    for way in ("one batch", GROUPS, None):
        handle = interleave(model, way=way)
        for _ in range(MOST_STEPS + 2 if way is None else 2):
            with quiet():
                halves = [half.sum() for half in handle(same_input(4)).chunk(2)]
                halves[0].backward(retain_graph=True)
                with pytest.raises(BatchesError, match="several backward calls"):
                    halves[1].backward()
        with quiet():  # a penalty on the input's gradient, whose first part accumulates none
            x = same_input(4).requires_grad_()
            (slope,) = torch.autograd.grad(handle(x).sum(), x, create_graph=True)
            slope.square().sum().backward()  # type: ignore[no-untyped-call,unused-ignore]
        with model.no_sync(), quiet():  # nothing is reduced
            halves = [half.sum() for half in handle(same_input(4)).chunk(2)]
            halves[0].backward(retain_graph=True)
            halves[1].backward()


def each_ddp_has_its_own_backward(device: str) -> None:
    """Two modules in DDP, each of which reduces its own gradients."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.each = nn.ModuleList([DistributedDataParallel(nn.Linear(WIDTH, 1).double()) for _ in range(2)])

        def forward(self, x: Tensor) -> list[Tensor]:
            return [each(x) for each in self.each]

    model = Both()
    for way in ("one batch", GROUPS):
        handle = interleave(model, way=way)
        for output in handle(same_input(4)):
            output.sum().backward()


def whole_steps(device: str) -> None:
    model = random_model(7)
    batches = [same_input(4, 1), same_input(2, 2)]
    weights = [float(len(each)) for each in batches]
    for way in ("one batch", GROUPS, None):
        steps = interleaved(way=way)
        for _ in range(MOST_STEPS + 1 if way is None else 2):
            with steps as run:
                for batch, weight in zip(batches, weights, strict=True):
                    run(lambda x: model(x).square().mean(), batch, weight=weight)
                loss = run.backward()  # type: ignore[no-untyped-call,unused-ignore]
            ours = gradients(model)
            whole = sum(
                model(each).square().mean() * (weight / 6.0) for each, weight in zip(batches, weights, strict=True)
            )
            assert isinstance(whole, Tensor)
            whole.backward()  # type: ignore[no-untyped-call,unused-ignore]
            assert_near((loss, ours), (whole.detach(), gradients(model)))
        assert steps.report().is_settled


def batch_norm_falls_back(device: str) -> None:
    model = nn.Sequential(random_model(3), nn.BatchNorm1d(WIDTH).double())
    x = same_input()
    handle = interleave(model, way=GROUPS)
    model.train()
    assert_near(train(handle, model, x), train(model, model, x))
    assert handle.report().way == "one batch"
    assert "BatchNorm1d '1'" in handle.report().reason
    model.eval()
    assert_near(train(handle, model, x), train(model, model, x))
    assert handle.report().way == GROUPS


def fsdp1_falls_back(device: str) -> None:
    with quiet():
        model = FullyShardedDataParallel(nn.Linear(WIDTH, WIDTH).double(), device_id=torch.device("cpu"))
        handle = interleave(model, way=GROUPS)
        handle(same_input())
    assert handle.report().way == "one batch"
    assert "FSDP1" in handle.report().reason


class Summing(nn.Module):
    def __init__(self, collective: bool) -> None:
        super().__init__()
        self.linear, self.collective = nn.Linear(WIDTH, WIDTH).double(), collective

    def forward(self, x: Tensor) -> Tensor:
        out = torch.tanh(self.linear(x))
        return x + (all_sum(out) if self.collective else out)


def fsdp2(device: str) -> None:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    x = same_input(seed=dist.get_rank()).to(device)
    for collective in (False, True):
        models = list[Any]()
        for _ in range(2):
            torch.manual_seed(5)
            model: Any = nn.Sequential(*(Summing(collective) for _ in range(3))).to(device)
            for block in model:
                fully_shard(block, mesh=mesh)
            models.append(fully_shard(model, mesh=mesh))
        serial, shared = models
        handle = interleave(shared, way=GROUPS)
        with quiet():
            for _ in range(3):
                assert_near(train(handle, shared, x), train(serial, serial, x))
            report = handle.report()
            if torch.__version__.startswith(TESTED):
                assert report.way == GROUPS, report
                assert sum(report.counts.collectives) == (6 if collective else 0)
            with torch.no_grad():
                assert torch.allclose(handle(x), serial(x), atol=NEAR)
            assert_near(train(shared, shared, x), train(serial, serial, x))  # and without us, as before


class Tensors(nn.Module):
    """A layer of attention's kind and an MLP, sharded by DTensor."""

    def __init__(self, checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH).double(), nn.Linear(4 * WIDTH, WIDTH).double()
        self.q, self.o = nn.Linear(WIDTH, WIDTH).double(), nn.Linear(WIDTH, WIDTH).double()
        self.checkpointed = checkpointed

    def _attention(self, x: Tensor) -> Tensor:
        out: Tensor = self.o(torch.tanh(self.q(x)))
        return out

    def forward(self, x: Tensor) -> Tensor:
        mixed: Any = checkpoint(self._attention, x, use_reentrant=False) if self.checkpointed else self._attention(x)
        x = x + mixed
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


def dtensor_parallel(device: str) -> None:
    x = same_input()
    for checkpointed in (False, True):
        plain, model = Tensors(), Tensors(checkpointed)
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel(), "q": ColwiseParallel(), "o": RowwiseParallel()}
        parallelize_module(model, mesh, plan)
        handle = interleave(model, way=GROUPS)
        for _ in range(2):
            assert_near(train(handle, model, x), train(plain, plain, x))
        counts = handle.report().counts
        assert sum(counts.stops) >= 4, handle.report()


class Fused(nn.Module):
    """Products with their collectives, by `crossfade.ops`: by copies, or by torch.distributed's."""

    def __init__(self, candidate: str) -> None:
        super().__init__()
        self.candidate = candidate
        torch.manual_seed(dist.get_rank())
        self.weights = nn.ParameterList([torch.randn(WIDTH, WIDTH, dtype=torch.float64) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for into, out_of in zip(self.weights[::2], self.weights[1::2], strict=True):
            x = torch.tanh(ops.matmul_all_reduce(torch.tanh(x @ into), out_of, candidate=self.candidate))
        return x


class Beside(nn.Module):
    """A caller's work in the middle of an operator's exchange."""

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.eye(WIDTH, dtype=x.dtype)

        def meanwhile() -> None:
            yield_point()
            with quiet():
                dist.all_reduce(torch.ones(3))

        rows = ops.matmul_reduce_scatter(x, weight, candidate="rounds", meanwhile=meanwhile)
        return ops.all_gather_matmul(torch.tanh(rows), weight, candidate="rounds")


def an_operator_is_not_left_in_the_middle(device: str) -> None:
    model, x = Beside(), same_input(8)
    handle = interleave(model, way=GROUPS)
    with torch.no_grad():
        for _ in range(4):
            assert torch.allclose(handle(x), model(x))
    assert handle.report().counts.stops == (2, 2)


def fused_products(device: str) -> None:
    """Parts change behind each, also where a gradient is wanted; in a backward they do not."""
    x = same_input(8)
    for candidate in ("rounds", "plain"):
        model = Fused(candidate)
        handle = interleave(model, way=GROUPS)
        for _ in range(3):
            assert_near(train(handle, model, x), train(model, model, x))
        with torch.no_grad():
            assert torch.allclose(handle(x), model(x))
        counts = handle.report().counts
        assert counts.collectives == counts.stops == (2, 2), (candidate, counts)


WRAPPERS: dict[str, Case] = {
    case.__name__: case
    for case in (
        fused_products,
        an_operator_is_not_left_in_the_middle,
        dtensor_parallel,
        ddp,
        two_backward_calls_under_ddp,
        each_ddp_has_its_own_backward,
        whole_steps,
        batch_norm_falls_back,
        fsdp1_falls_back,
        fsdp2,
    )
}
