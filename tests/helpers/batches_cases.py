"""Cases of interleaved batches that all ranks of a group run: order, gradients, wrappers, disagreement, calibration."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from crossfade.batches import interleave, yield_point
from crossfade.batches.carriers.process_groups import ProcessGroups
from crossfade.batches.choice.calibration import MOST_STEPS
from crossfade.batches.coroutines.parts import Run
from crossfade.errors import BatchesError
from tests.helpers.batches_captured import calls_on_cpu, captured_steps, whole_steps_on_cpu
from tests.helpers.batches_first_calls import FIRST_CALLS
from tests.helpers.batches_later import LATER, WAITS
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
from tests.helpers.batches_transformers import llama, llama_by_parallelize, mixtral
from tests.helpers.batches_watch import WATCHES
from tests.helpers.batches_wrappers import GROUPS, WRAPPERS, quiet
from tests.helpers.ranks import Case

NUM_RANDOM = 50


class Noting(torch.autograd.Function):
    """Notes which part and layer comes by, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, seen: list[str]) -> Tensor:
        ctx.said = name, seen
        seen.append(f"forward {name}")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Tensor) -> tuple[Tensor, None, None]:
        name, seen = ctx.said
        seen.append(f"backward {name}")
        return gradient[0], None, None


noted: Callable[[Tensor, str, list[str]], Tensor] = Noting.apply


def order(device: str) -> None:
    seen = list[str]()

    def part(index: int) -> Tensor:
        x = same_input().requires_grad_()
        for layer in "abc":
            x = noted(all_sum(x), f"{index}{layer}", seen)
        return x.sum()

    run = Run(ProcessGroups())
    outputs = run.go([lambda: part(0), lambda: part(1)])
    sum(outputs).backward()  # type: ignore[no-untyped-call,unused-ignore]
    forward = [f"forward {index}{layer}" for layer in "abc" for index in (0, 1)]
    assert seen == forward + [each.replace("forward", "backward") for each in reversed(forward)]
    assert [part.num_collectives for part in run.parts] == [3, 3]


def random_models(device: str, first: int = 0, number: int = NUM_RANDOM) -> None:
    for index in range(first, first + number):
        model, x = random_model(index), same_input(4 + index % 5, index)
        wanted = train(model, model, x)
        handle = interleave(model, num_batches=2 + index % 2, way=GROUPS if index % 4 else "copy engines")
        for _ in range(2):
            try:
                assert_near(train(handle, model, x), wanted)
            except AssertionError as error:
                raise AssertionError(f"random model {index}: {error}\n{model}") from error


def inference(device: str) -> None:
    model, x = random_model(3), same_input()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            wanted = model(x)
            output = interleave(model, way=GROUPS)(x)
            assert output.is_inference() == (mode is torch.inference_mode)
            assert torch.allclose(output, wanted, atol=NEAR)


def _split_in_turns(args: Any, kwargs: Any, number: int) -> Any:
    from crossfade.batches.tensors import Call

    return [Call((args[0][index::number],), kwargs, len(args[0][index::number])) for index in range(number)]


def own_split_and_join(device: str) -> None:
    model, x = random_model(3), same_input()

    def join(outputs: Any, num_rows: Any) -> Tensor:
        assert list(num_rows) == [3, 3]
        return torch.stack(list(outputs), 1).flatten(0, 1)

    handle = interleave(model, split=_split_in_turns, join=join, way=GROUPS)
    assert_near(train(handle, model, x), train(model, model, x))


def redistribute_inside_an_operator(device: str) -> None:
    mesh: DeviceMesh = init_device_mesh(device, (dist.get_world_size(),))
    full = torch.randn(WIDTH, WIDTH, dtype=torch.double, generator=torch.Generator().manual_seed(2))

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))

        def forward(self, x: Tensor) -> Tensor:
            rows = DTensor.from_local(x, mesh, [Replicate()])
            out = rows @ self.w
            sharded: Any = torch.tanh(out)
            full: Tensor = sharded.redistribute(placements=[Replicate()]).to_local()
            return full

    model, x = Inside(), same_input()
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            handle = interleave(model, way=GROUPS)
            if mode is torch.enable_grad:
                assert_near(train(handle, model, x), train(model, model, x))
            else:
                assert torch.allclose(handle(x), model(x), atol=NEAR)


def one_part_in_another_mode(device: str) -> None:
    """The first half of the rows runs without gradients, or cast, or as the second does."""
    model, x = random_model(11), same_input()

    def part(rows: Tensor, mode: Callable[[], Any]) -> Tensor:
        with mode():
            out = model(rows)
        copied: Tensor = out * 1.0
        return copied

    modes: list[Callable[[], Any]] = [torch.no_grad, torch.enable_grad, lambda: torch.autocast("cpu", torch.bfloat16)]
    for mode in modes:
        outputs = Run(ProcessGroups()).go([partial(part, x[:3], mode), partial(part, x[3:], torch.enable_grad)])
        assert outputs[0].requires_grad == (mode is not torch.no_grad)
        outputs[1].sum().backward()  # type: ignore[no-untyped-call,unused-ignore]
        ours = gradients(model)
        model(x[3:]).sum().backward()  # type: ignore[no-untyped-call,unused-ignore]
        assert_near((outputs[1].detach(), ours), (model(x[3:]).detach(), gradients(model)))


def ranks_that_disagree(device: str) -> None:
    rank = dist.get_rank()

    def fails(model: nn.Module, said: str) -> None:
        begin_s = time.monotonic()
        with pytest.raises(BatchesError, match=said):
            interleave(model, way=GROUPS, timeout_s=20)(same_input())
        assert time.monotonic() - begin_s < 10

    class Uneven(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(2 + rank):
                x = all_sum(x)
            return x

    fails(Uneven(), "the ranks disagree")

    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return all_sum(x) if rank else all_mean(x)

    fails(Other(), "all_?reduce.*all_?gather|all_?gather.*all_?reduce")
    with pytest.raises(BatchesError, match="the ranks disagree"):
        interleave(random_model(3), way=GROUPS)(same_input(4 + 2 * rank))


def a_rank_that_raises(device: str) -> None:
    rank = dist.get_rank()

    class Raising(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = all_sum(x)
            if rank:
                raise KeyError("mine")
            return all_sum(x)

    handle = interleave(Raising(), way=GROUPS, timeout_s=20)
    with pytest.raises(KeyError if rank else BatchesError, match="mine"):
        handle(same_input())


def other_shapes_on_each_rank(device: str) -> None:
    model, rank = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), Pooling()), dist.get_rank()
    x = same_input(4 + 2 * rank, rank)
    handle = interleave(model, way=GROUPS, per_shape=False)
    for _ in range(2):
        wanted = torch.cat([model(each) for each in x.tensor_split(2)])
        assert torch.allclose(handle(x), wanted, atol=NEAR)


class Pooling(nn.Module):
    """A collective whose size does not depend on the rows."""

    def forward(self, x: Tensor) -> Tensor:
        return x + all_sum(x.mean(0))


def batches_of_different_length(device: str) -> None:
    """A model whose number of collectives depends on the data, alike on all ranks."""

    class Adaptive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(int(x[0, 0])):
                x = all_sum(x) / dist.get_world_size()
            return x

    x = same_input()
    x[:3, 0], x[3:, 0] = 1.0, 4.0
    handle = interleave(Adaptive(), way=GROUPS)
    output = handle(x)
    assert torch.allclose(output, x, atol=NEAR)
    assert handle.report().counts.collectives == (1, 4)
    assert any("different numbers of collectives: 1, 4" in note for note in handle.report().notes)


def calibration(device: str) -> None:
    model, x = random_model(12), same_input()
    handle = interleave(model)
    wanted = train(model, model, x)
    for _ in range(MOST_STEPS + 1):
        assert_near(train(handle, model, x), wanted)
    first = handle.report()
    assert first.is_settled
    assert set(first.measured_ms) == {"one batch", GROUPS}
    ways = [None] * dist.get_world_size()
    dist.all_gather_object(ways, (first.way, sorted(first.measured_ms.items())))
    assert len(set(map(str, ways))) == 1
    more = same_input(8)
    assert_near(train(handle, model, more), train(model, model, more))
    assert not handle.report().is_settled
    train(handle, model, x)
    assert handle.report().is_settled


def hides(device: str) -> None:
    """Recorded spans: communication that the other part's computation hides."""

    class Slow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = all_sum(x) * 0.5
                (torch.ones(200, 200) @ torch.ones(200, 200)).sum()
                yield_point()
            return x

    handle = interleave(Slow(), way=GROUPS)
    for _ in range(3):
        handle(same_input())
    report = handle.report()
    assert report.communication_ms is not None
    assert report.hidden_ms is not None
    assert report.exposed_ms is not None
    assert report.communication_ms == pytest.approx(report.hidden_ms + report.exposed_ms)
    assert [each.part for each in report.timeline].count(0) == 3
    assert report.counts.collectives == (6, 6)


def coalesced(device: str) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            one, other = x.detach().clone(), x.detach() * 2
            with quiet():
                dist.all_reduce_coalesced([one, other])
            return x + one + other

    model, x = Both(), same_input()
    assert torch.allclose(interleave(model, way=GROUPS)(x), model(x), atol=NEAR)


class Experts(nn.Module):
    """Each row goes to a rank that its own values choose, so ranks exchange parts of different lengths."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x[:, 0] > 0.3 * dist.get_rank()).long()
        order, sent = chosen.argsort(stable=True), chosen.bincount(minlength=dist.get_world_size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        lengths, own = received.tolist(), sent.tolist()
        rows = x.new_empty(sum(lengths), WIDTH)
        dist.all_to_all_single(rows, x[order], lengths, own)
        back, out = torch.empty_like(x), torch.empty_like(x)
        dist.all_to_all_single(back, rows * (1 + dist.get_rank()), own, lengths)
        out[order] = back
        return x + out


def exchanges_of_different_lengths(device: str) -> None:
    model, x = Experts(), same_input(12, dist.get_rank())
    for way in (GROUPS, "copy engines"):
        handle = interleave(model, way=way)
        for _ in range(2):
            assert torch.allclose(handle(x), model(x), atol=NEAR)


def subgroups(device: str) -> None:
    """Groups of a mesh: each rank has one of its own beside the common one."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    own = groups[dist.get_rank()]

    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = x.clone()
            dist.all_reduce(x, group=own)
            dist.all_reduce(x)
            return x

    model, x = Two(), same_input()
    handle = interleave(model, way=GROUPS)
    with torch.no_grad():
        assert torch.allclose(handle(x), model(x), atol=NEAR)
        assert torch.allclose(handle(x), model(x), atol=NEAR)


def meet(device: str) -> None:
    """All ranks are here before any leaves the group: one that has left it ends threads that another still talks to."""
    dist.barrier()


CASES: dict[str, Case] = {
    **WRAPPERS,
    **FIRST_CALLS,
    "captured_steps": captured_steps,
    "captured_calls": calls_on_cpu,
    "captured_whole_steps": whole_steps_on_cpu,
    "order": order,
    "inference": inference,
    "own_split_and_join": own_split_and_join,
    "redistribute_inside_an_operator": redistribute_inside_an_operator,
    "one_part_in_another_mode": one_part_in_another_mode,
    "other_shapes_on_each_rank": other_shapes_on_each_rank,
    "batches_of_different_length": batches_of_different_length,
    "calibration": calibration,
    "hides": hides,
    "coalesced": coalesced,
    "subgroups": subgroups,
    "exchanges_of_different_lengths": exchanges_of_different_lengths,
    "random_models": random_models,
    **WAITS,
    "llama": llama,
    "llama_by_parallelize": llama_by_parallelize,
    "mixtral": mixtral,
    # these leave collectives that nobody waits for
    **LATER,
    **WATCHES,
    "a_rank_that_raises": a_rank_that_raises,
    "ranks_that_disagree": ranks_that_disagree,
    "meet": meet,
}
