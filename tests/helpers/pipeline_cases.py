"""Pipelines of stages from `crossfade.pipelines.split` that all ranks of a group run; and what they are compared with."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class

import crossfade.p2p.backend
from crossfade.pipelines import SCHEDULES, Split, split
from crossfade.pipelines.orders import Kind, Pass, order_of, passes_of
from tests.helpers.pipeline_models import EncoderDecoder, Frozen, ResNet, Transformer
from tests.helpers.ranks import Case

NUM_MICROBATCHES = 4
SIZE = 2
"""Of a microbatch."""


@dataclass(frozen=True)
class Problem:
    """A model, a batch, and a loss that is the mean over the batch."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]  # of that many samples
    target: Callable[[int], Tensor]
    loss: Callable[[Any, Tensor], Tensor]


def _logits_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def _pair_loss(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs[0], target) + outputs[1].square().mean()


PROBLEMS = {
    "transformer": Problem(
        lambda: Transformer(50, 16, 4),
        lambda num: (torch.randint(50, (num, 16)),),
        lambda num: torch.randint(50, (num, 16)),
        _logits_loss,
    ),
    "resnet": Problem(
        lambda: ResNet(4, (1, 2, 1)),
        lambda num: (torch.randn(num, 3, 8, 8),),
        lambda num: torch.randint(10, (num,)),
        _logits_loss,
    ),
    "encoder_decoder": Problem(
        lambda: EncoderDecoder(4, 3),
        lambda num: (torch.randn(num, 3, 8, 8), torch.rand(num, 1, 1, 1)),
        lambda num: torch.randn(num, 3, 8, 8),
        _pair_loss,
    ),
    "frozen": Problem(
        lambda: Frozen(8),
        lambda num: (torch.randint(20, (num, 6)),),
        lambda num: torch.randint(5, (num,)),
        _logits_loss,
    ),
}


def seeded(problem: Problem) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    """The same model and batch on every rank."""
    torch.manual_seed(5)
    num = NUM_MICROBATCHES * SIZE
    return problem.make(), problem.inputs(num), problem.target(num)


def gradients_of_whole(problem: Problem) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of the microbatches, and the gradients of their mean, without a pipeline."""
    module, inputs, target = seeded(problem)
    losses = []
    for index in range(NUM_MICROBATCHES):
        part = slice(index * SIZE, (index + 1) * SIZE)
        loss = problem.loss(module(*(each[part] for each in inputs)), target[part])
        (loss / NUM_MICROBATCHES).backward()  # type: ignore[no-untyped-call,unused-ignore]
        losses.append(loss.item())
    gradients = {name: each.grad for name, each in module.named_parameters() if each.grad is not None}
    return losses, gradients


@contextmanager
def new_group(backend: str) -> Iterator[Any]:
    group = dist.new_group(backend=backend)
    yield group
    dist.destroy_process_group(group)


def _passes_of(stages: Sequence[Any]) -> list[Pass]:
    """Where the passes of some stages will be written down, as torch makes them."""
    done: list[Pass] = []

    def watch(stage: Any, name: str, kind: Callable[[dict[str, Any]], str]) -> None:
        original = getattr(stage, name)

        def called(chunk: int, *args: Any, **kwargs: Any) -> Any:
            done.append(Pass(Kind(kind(kwargs)), stage.stage_index, chunk))
            return original(chunk, *args, **kwargs)

        setattr(stage, name, called)

    for stage in stages:
        watch(stage, "forward_one_chunk", lambda _: "F")
        watch(stage, "backward_one_chunk", lambda kwargs: "B" if kwargs.get("full_backward", True) else "I")
        watch(stage, "backward_weight_one_chunk", lambda _: "W")
    return done


@cache
def _split(problem: Problem, num_stages: int) -> Split:
    """Nothing of it has been trained. (What takes long is torch's tracing.)"""
    module, inputs, target = seeded(problem)
    example = tuple(each[:SIZE] for each in inputs)
    return split(module, example, num_stages, num_passes=1, loss_fn=problem.loss, target=target[:SIZE])


def train(problem: Problem, name: str, group: Any) -> None:
    """One step by a schedule: losses and gradients are those of the model in one piece, and torch's order is the predicted one."""
    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
    is_single = name in ("GPipe", "1F1B")
    num_stages = num_ranks if is_single else 2 * num_ranks
    _, inputs, target = seeded(problem)
    cut = copy.deepcopy(_split(problem, num_stages))
    order = passes_of(order_of(name, num_stages, NUM_MICROBATCHES, num_ranks))
    mine = sorted({each.stage for each in order[rank]})
    stages = [cut.build_stage(index, group=group) for index in mine]
    schedule = get_schedule_class(name)(stages[0] if is_single else stages, NUM_MICROBATCHES, loss_fn=problem.loss)
    passes = _passes_of(stages)
    losses: list[Tensor] = []
    more = {"target": target, "losses": losses} if stages[-1].is_last else {}
    schedule.step(*(inputs if mine[0] == 0 else ()), **more)
    cut.sync_shared_gradients(stages)
    assert tuple(passes) == order[rank], name
    _compare(problem, stages, losses)


def _compare(problem: Problem, stages: Sequence[Any], losses: Sequence[Tensor]) -> None:
    wanted_losses, wanted = gradients_of_whole(problem)
    for loss, wanted_loss in zip(losses, wanted_losses, strict=False):
        assert abs(loss.item() - wanted_loss) < 1e-5
    assert bool(losses) == stages[-1].is_last
    if "embedding.weight" in wanted:  # the head's too
        wanted["head.weight"] = wanted["embedding.weight"]
    compared = 0
    for stage in stages:
        for name, parameter in stage.submod.named_parameters():
            torch.testing.assert_close(parameter.grad, wanted.get(name), rtol=1e-4, atol=1e-6)
            compared += parameter.requires_grad
    assert compared or wanted.keys() < dict(seeded(problem)[0].named_parameters()).keys()


def _case(device: str, *, problem: str, schedule: str, backend: str = crossfade.p2p.backend.NAME) -> None:
    assert device == "cpu"
    with new_group(backend) as group:
        train(PROBLEMS[problem], schedule, group)


CASES: dict[str, Case] = {
    **{f"transformer by {name}": partial(_case, problem="transformer", schedule=name) for name in SCHEDULES},
    **{f"encoder-decoder by {name}": partial(_case, problem="encoder_decoder", schedule=name) for name in SCHEDULES},
    "frozen by 1F1B": partial(_case, problem="frozen", schedule="1F1B"),
    "frozen by ZBVZeroBubble": partial(_case, problem="frozen", schedule="ZBVZeroBubble"),
    "resnet by 1F1B, gloo": partial(_case, problem="resnet", schedule="1F1B", backend="gloo"),
    "resnet by Interleaved1F1B, gloo": partial(_case, problem="resnet", schedule="Interleaved1F1B", backend="gloo"),
    "resnet by ZBVZeroBubble": partial(_case, problem="resnet", schedule="ZBVZeroBubble"),
    "transformer by InterleavedZeroBubble, gloo": partial(
        _case, problem="transformer", schedule="InterleavedZeroBubble", backend="gloo"
    ),
}
