"""Planted causes. Each program is a step with the cause, and the same step without it; sizes come from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.doctor.models import ConvNet, Transformer

__all__ = ["PROGRAMS", "Planted", "Sizes"]

Step = Callable[[], None]


@dataclass(frozen=True)
class Sizes:
    """What a seed chooses. ``scale`` makes all small enough for a CPU."""

    width: int
    num_layers: int
    batch: int
    length: int
    device: torch.device
    dtype: torch.dtype

    @classmethod
    def of(cls, seed: int, device: torch.device, *, is_small: bool = False) -> Sizes:
        chosen = random.Random(seed)
        if is_small:
            return cls(64, 2, 2, 16, device, torch.float32)
        width, batch = chosen.choice([(1536, 24), (2048, 16), (1024, 48), (1536, 10), (2048, 8), (1024, 20)])
        num_layers = chosen.choice([4, 5, 6])
        return cls(width, num_layers, batch, 1024, device, torch.bfloat16)


@dataclass(frozen=True)
class Planted:
    """A program.

    Attributes:
        name: what it is called.
        cause: what a doctor should say first, as `crossfade.profile.doctor.view.Cause` names it; empty for a healthy one.
        num_ranks: how many ranks it needs at least.
        make: gives the step with the cause (True) or without it.
    """

    name: str
    cause: str
    num_ranks: int
    make: Callable[[Sizes, bool], Step]


def _train(model: nn.Module, x: torch.Tensor, before: Callable[[], torch.Tensor] | None = None) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        value = x if before is None else before()
        optimizer.zero_grad()
        model(value).square().mean().backward()
        optimizer.step()

    return step


def _transformer(sizes: Sizes) -> tuple[Transformer, torch.Tensor]:
    model = Transformer(sizes.width, sizes.num_layers).to(sizes.device, sizes.dtype)
    return model, torch.randn(sizes.batch, sizes.length, sizes.width, device=sizes.device, dtype=sizes.dtype)


def _convnet(sizes: Sizes) -> tuple[ConvNet, torch.Tensor]:
    side = 16 if sizes.dtype is torch.float32 else 128
    model = ConvNet(sizes.width // 8, sizes.num_layers).to(sizes.device)
    return model, torch.randn(sizes.batch * 4, 3, side, side, device=sizes.device)


def healthy_transformer(sizes: Sizes, has_cause: bool) -> Step:
    return _train(*_transformer(sizes))


def healthy_convnet(sizes: Sizes, has_cause: bool) -> Step:
    return _train(*_convnet(sizes))


def item_each_layer(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _transformer(sizes)

    def between(x: torch.Tensor, number: int) -> torch.Tensor:
        mean = x.detach().abs().mean()
        return x * 0.5 if has_cause and mean.item() > 1e6 else x

    model.between = between
    return _train(model, x)


def item_each_step(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _transformer(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    seen: list[object] = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        if has_cause:
            seen.append(loss.item())
        else:
            seen[:] = [loss.detach()]
        optimizer.step()

    return step


def nonzero_each_layer(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _convnet(sizes)

    def between(x: torch.Tensor, number: int) -> torch.Tensor:
        is_kept = x.detach().flatten(1).sum(1) > -1e9
        rows = torch.nonzero(is_kept) if has_cause else torch.nonzero_static(is_kept, size=len(x))
        return x.index_select(0, rows[:, 0])

    model.between = between
    return _train(model, x)


def pageable_each_layer(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _transformer(sizes)
    noise = torch.randn(x.shape, dtype=sizes.dtype)
    if sizes.device.type == "cuda" and not has_cause:
        noise = noise.pin_memory()
    model.between = lambda x, _: x + noise.to(sizes.device, non_blocking=True)
    return _train(model, x)


def pageable_batch(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _convnet(sizes)
    batch = torch.randn(x.shape)
    if sizes.device.type == "cuda" and not has_cause:
        batch = batch.pin_memory()
    return _train(model, x, lambda: batch.to(sizes.device, non_blocking=True))


def free_each_layer(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _transformer(sizes)

    def between(x: torch.Tensor, number: int) -> torch.Tensor:
        if has_cause and x.is_cuda:
            torch.cuda.empty_cache()
        return x * 1.0

    model.between = between
    return _train(model, x)


def small_kernels(sizes: Sizes, has_cause: bool) -> Step:
    x = torch.randn(64, 64, device=sizes.device)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8 * sizes.num_layers))).to(
        sizes.device
    )
    step = _train(model, x)
    if has_cause or sizes.device.type != "cuda":
        return step
    parameters = [(parameter, torch.zeros_like(parameter)) for parameter in model.parameters()]
    for parameter, gradient in parameters:
        parameter.grad = gradient

    def static_step() -> None:
        for _, gradient in parameters:
            gradient.zero_()
        model(x).square().mean().backward()
        for parameter, gradient in parameters:
            parameter.data.add_(gradient, alpha=-1e-4)

    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(3):
            static_step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static_step()
    return graph.replay


def sync_each_step(sizes: Sizes, has_cause: bool) -> Step:
    inner = _train(*_transformer(sizes))

    def step() -> None:
        inner()
        if has_cause and sizes.device.type == "cuda":
            torch.cuda.synchronize()

    return step


def item_and_pageable(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _transformer(sizes)
    noise = torch.randn(x.shape, dtype=sizes.dtype)
    if sizes.device.type == "cuda" and not has_cause:
        noise = noise.pin_memory()

    def between(x: torch.Tensor, number: int) -> torch.Tensor:
        x = x + noise.to(sizes.device, non_blocking=True)
        mean = x.detach().abs().mean()
        return x * 0.5 if has_cause and mean.item() > 1e6 else x

    model.between = between
    return _train(model, x)


def blocking_all_reduce(sizes: Sizes, has_cause: bool) -> Step:
    """Gradients summed parameter by parameter, as they come; without the cause the sums are waited for at the end only."""
    model, x = _transformer(sizes)
    works: list[Any] = []

    def reduce(parameter: torch.Tensor) -> None:
        work = dist.all_reduce(parameter.grad, async_op=not has_cause)
        if work is not None:
            works.append(work)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        while works:
            works.pop().wait()
        optimizer.step()

    return step


def small_before_large(sizes: Sizes, has_cause: bool) -> Step:
    """In each layer a large gather for later, and a small sum that is needed soon, on one communicator or on two."""
    width = 2 * sizes.width
    weights = [
        torch.randn(width, width, device=sizes.device, dtype=sizes.dtype) / width**0.5 for _ in range(sizes.num_layers)
    ]
    x = torch.randn(width, width, device=sizes.device, dtype=sizes.dtype)
    large = torch.randn(width, 4 * width, device=sizes.device, dtype=sizes.dtype)
    gathered = torch.empty(dist.get_world_size() * width, 4 * width, device=sizes.device, dtype=sizes.dtype)
    group = dist.group.WORLD if has_cause else dist.new_group()

    def step() -> None:
        y, later = x, None
        for weight in weights:
            later = dist.all_gather_into_tensor(gathered, large, async_op=True)
            z = y @ weight
            sums = z[:64].contiguous()
            soon = dist.all_reduce(sums, group=group, async_op=True)
            y = y @ weight
            assert soon is not None
            soon.wait()
            y = y @ weight + sums.mean()
            y = y / (y.norm() / width)
        if later is not None:
            later.wait()

    return step


def slow_rank(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _transformer(sizes)
    parallel = nn.parallel.DistributedDataParallel(model)
    if has_cause and dist.get_rank() == dist.get_world_size() - 1:
        x = torch.cat([x, x])
    return _train(parallel, x)


def one_bucket(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _transformer(sizes)
    size = 1 << 14 if has_cause else 25
    return _train(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=size), x)


def unused_parameters(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _convnet(sizes)
    if not has_cause:
        model.without_unused()
    return _train(nn.parallel.DistributedDataParallel(model, find_unused_parameters=has_cause), x)


def healthy_ddp(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _convnet(sizes)
    model.without_unused()
    return _train(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), x)


def small_all_reduces(sizes: Sizes, has_cause: bool) -> Step:
    """Statistics of every layer summed one by one, or all at once."""
    model, x = _convnet(sizes)
    values = [torch.randn(256, device=sizes.device) for _ in range(16 * sizes.num_layers)]

    inner = _train(model, x)

    def step() -> None:
        inner()
        if has_cause:
            for value in values:
                dist.all_reduce(value)
        else:
            flat = torch.cat(values)
            dist.all_reduce(flat)

    return step


def batches_in_sequence(sizes: Sizes, has_cause: bool) -> Step:
    """Two batches on two streams, with a sum in each layer; launched whole, or layer by layer in turns."""
    width, num = 2 * sizes.width, sizes.num_layers
    weights = [torch.randn(width, width, device=sizes.device, dtype=sizes.dtype) / width**0.5 for _ in range(num)]
    batches = [
        torch.randn(sizes.batch * sizes.length // 2, width, device=sizes.device, dtype=sizes.dtype) for _ in range(2)
    ]
    streams: list[Any] = [torch.cuda.Stream() if sizes.device.type == "cuda" else None for _ in range(2)]  # type: ignore[no-untyped-call]
    groups = [dist.new_group() for _ in range(2)]

    def layer(number: int, place: int) -> None:
        with torch.cuda.stream(streams[place]):
            y = batches[place] @ weights[number]
            dist.all_reduce(y, group=groups[place])

    def step() -> None:
        order = (
            [(number, place) for place in range(2) for number in range(num)]
            if has_cause
            else [(number, place) for number in range(num) for place in range(2)]
        )
        for number, place in order:
            layer(number, place)
        for stream in streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

    return step


def contended(sizes: Sizes, has_cause: bool) -> Step:
    """Products beside sums that nobody waits for; without the cause the sums are left out of the products' way."""
    width = 2 * sizes.width
    weight = torch.randn(width, width, device=sizes.device, dtype=sizes.dtype) / width**0.5
    x, sums = (torch.randn(width, width, device=sizes.device, dtype=sizes.dtype) for _ in range(2))

    def step() -> None:
        y = x
        for _ in range(sizes.num_layers):
            work = dist.all_reduce(sums, async_op=True) if has_cause else None
            for _ in range(4):
                y = y @ weight
            if work is not None:
                work.wait()
            y = y / (y.norm() / width)

    return step


def tensor_parallel(sizes: Sizes, has_cause: bool) -> Step:
    """Sums whose results are needed at once: nothing can be won by waiting later."""
    model, x = _transformer(sizes)

    def between(x: torch.Tensor, number: int) -> torch.Tensor:
        with torch.no_grad():
            y = x.clone()
            dist.all_reduce(y)
            return y / dist.get_world_size()

    model.between = between

    def step() -> None:
        with torch.no_grad():
            model(x)

    return step


PROGRAMS: tuple[Planted, ...] = (
    Planted("healthy_transformer", "", 1, healthy_transformer),
    Planted("healthy_convnet", "", 1, healthy_convnet),
    Planted("item_each_layer", "implicit_synchronisation", 1, item_each_layer),
    Planted("item_each_step", "implicit_synchronisation", 1, item_each_step),
    Planted("nonzero_each_layer", "implicit_synchronisation", 1, nonzero_each_layer),
    Planted("sync_each_step", "implicit_synchronisation", 1, sync_each_step),
    Planted("pageable_each_layer", "pageable_copy", 1, pageable_each_layer),
    Planted("pageable_batch", "pageable_copy", 1, pageable_batch),
    Planted("free_each_layer", "allocator", 1, free_each_layer),
    Planted("small_kernels", "launch_bound", 1, small_kernels),
    Planted("item_and_pageable", "pageable_copy", 1, item_and_pageable),
    Planted("blocking_all_reduce", "blocking_collective", 2, blocking_all_reduce),
    Planted("small_before_large", "communicator_order", 2, small_before_large),
    Planted("slow_rank", "late_peer", 2, slow_rank),
    Planted("one_bucket", "ddp_buckets", 2, one_bucket),
    Planted("unused_parameters", "find_unused_parameters", 2, unused_parameters),
    Planted("small_all_reduces", "small_messages", 2, small_all_reduces),
    Planted("batches_in_sequence", "launch_order", 2, batches_in_sequence),
    Planted("contended", "contention", 2, contended),
    Planted("healthy_ddp", "", 2, healthy_ddp),
    Planted("tensor_parallel", "", 2, tensor_parallel),
)
