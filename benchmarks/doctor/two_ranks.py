"""Planted causes between ranks.

What a cause costs depends on how long communication takes beside computation. On two GPUs of a host (NVLink, 300 GB/s for NCCL;
700 TFLOP/s, 500 for a whole training step) that is::

    a product of (rows, width) by (width, width)        2 rows width^2 / 700e12 s
    the sum of its result over ranks                    2 rows width / 300e9 s: as long, where width is 2,300
    a training step over `tokens`, for each parameter   6 tokens / 500e12 s
    the sum of its gradient                             2 / 300e9 s: a quarter, where tokens are 2,048

So chains of products are 2,048 to 4,096 wide, and data-parallel training has 2,048 tokens on each rank; layers are 5,120 wide and
more, or the host cannot launch as fast as they compute.

Without its cause a program is to have no other one. Its GPU takes longer than the host's launches, by half and more (300 of them
took 9 to 13 ms where hosts share their cores). Collectives are beside 16-bit products, which run at 0.5 to 0.7 of their speed
there, for a small part of the step.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.doctor.models import ConvNet, Transformer
from benchmarks.doctor.planted import Sizes, Step, convnet, train, transformer

__all__ = [
    "batches_in_sequence",
    "blocking_all_reduce",
    "contended",
    "healthy_ddp",
    "late_sums",
    "one_bucket",
    "slow_rank",
    "small_all_reduces",
    "small_before_large",
    "tensor_parallel",
    "two_backwards",
    "unused_parameters",
]

_TOKENS = 2048  # of a rank, in data-parallel training
_PREPARE_S = 2.5e-3


def _data_parallel(sizes: Sizes, *, num_passes: int = 1) -> tuple[Transformer, torch.Tensor]:
    """A transformer of 2 or 3 layers and few tokens: its gradients take a fifth of the step and more. Gives it and its input.

    With several passes over the model in a step each has three quarters as many tokens.
    """
    tokens = _TOKENS if num_passes == 1 else num_passes * _TOKENS * 3 // 4
    rows = max(num_passes, 2)
    if sizes.is_small:
        model, x = transformer(sizes)
        return model, x[:1].repeat(rows, 1, 1)
    width = 4096 + sizes.width
    with sizes.device:
        model = Transformer(width, sizes.num_layers // 2, num_heads=width // 128).to(sizes.dtype)
    return model, torch.randn(rows, tokens // rows, width, device=sizes.device, dtype=sizes.dtype)


def _convnet_of_20_ms(sizes: Sizes) -> tuple[ConvNet, torch.Tensor]:
    """A convolution network and as many images as an H100 trains in about 20 ms, which is twice as long as their launches take."""
    model, x = convnet(sizes)
    return model, x[: 21504 // (sizes.num_layers * (sizes.width // 8))]


class _Chain:
    """Products of (rows, width) by (width, width), each about 0.2 ms on an H100; 1.5 ms with 32-bit floats."""

    def __init__(self, sizes: Sizes, *, is_32_bit: bool = False) -> None:
        self.width = sizes.width if is_32_bit else 2 * sizes.width
        self.rows = 32 if sizes.is_small else (1 << (35 if is_32_bit else 36)) // self.width**2 // 1024 * 1024
        self._sizes = sizes
        self._dtype = torch.float32 if is_32_bit else sizes.dtype
        self.weight = self._random(self.width, self.width) / self.width**0.5

    def start(self) -> torch.Tensor:
        return self._random(self.rows, self.width)

    def megabytes(self, num: int) -> torch.Tensor:
        """A tensor of about that many MB, of at most 1 MB where sizes are small."""
        num = 1 if self._sizes.is_small else num
        return self._random(num, (1 << 20) // self.weight.element_size())

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self._sizes.device, dtype=self._dtype)


def blocking_all_reduce(sizes: Sizes, has_cause: bool) -> Step:
    """Gradients summed parameter by parameter, as they come; without the cause the sums are waited for at the end only."""
    model, x = _data_parallel(sizes)
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
    """In each layer a large gather for later, and a small sum that is needed at once, on one communicator or on two.

    The gather takes a sixth of the layer's products. These are of 32-bit floats, whose blocks come and go: a gather takes a fifth
    of the multiprocessors from them. 16-bit products, whose blocks stay, would lose half of their speed.
    """
    chain = _Chain(sizes, is_32_bit=True)
    x, large = chain.start(), chain.megabytes(224 + 8 * sizes.num_layers)
    gathered = large.new_empty(dist.get_world_size() * large.shape[0], large.shape[1])
    group = dist.group.WORLD if has_cause else dist.new_group()

    def step() -> None:
        y, later = x, None
        for _ in range(sizes.num_layers - 1):
            later = dist.all_gather_into_tensor(gathered, large, async_op=True)
            sums = y[:64].contiguous()
            soon = dist.all_reduce(sums, group=group, async_op=True)
            assert soon is not None
            soon.wait()
            y = y + sums.mean() * 1e-3
            for _ in range(4):
                y = y @ chain.weight
            y = y / (y.norm() / y.numel() ** 0.5)
        if later is not None:
            later.wait()

    return step


def slow_rank(sizes: Sizes, has_cause: bool) -> Step:
    """The last rank has some of the first one's rows too, or all have equally many."""
    model, x = transformer(sizes)
    rank = dist.get_rank()
    moved = max(len(x) // (2 if sizes.num_layers % 2 else 4), 1)
    if has_cause and rank == 0:
        x = x[moved:]
    if has_cause and rank == dist.get_world_size() - 1:
        x = torch.cat([x, x[:moved]])
    return train(nn.parallel.DistributedDataParallel(model), x)


def one_bucket(sizes: Sizes, has_cause: bool) -> Step:
    model, x = _data_parallel(sizes)
    size = 1 << 14 if has_cause else 25
    return train(nn.parallel.DistributedDataParallel(model, bucket_cap_mb=size), x)


def two_backwards(sizes: Sizes, has_cause: bool) -> Step:
    """A batch in four parts, whose gradients are summed by each backward pass or by the last one only."""
    model, x = _data_parallel(sizes, num_passes=4)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    *before, last = x.chunk(4)

    def step() -> None:
        optimizer.zero_grad()
        for part in before:
            with nullcontext() if has_cause else parallel.no_sync():
                parallel(part).square().mean().backward()
        parallel(last).square().mean().backward()
        optimizer.step()

    return step


def late_sums(sizes: Sizes, has_cause: bool) -> Step:
    """Gradients that are summed when the backward pass is over, or each as soon as it is there; waited for at the end in both."""
    model, x = _data_parallel(sizes)
    works: list[Any] = []

    def reduce(parameter: torch.Tensor) -> None:
        works.append(dist.all_reduce(parameter.grad, async_op=True))

    if not has_cause:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if has_cause:
            for parameter in model.parameters():
                reduce(parameter)
        while works:
            works.pop().wait()
        optimizer.step()

    return step


def unused_parameters(sizes: Sizes, has_cause: bool) -> Step:
    """The host prepares a batch while the GPU computes the step before, unless it waits for that step's gradients."""
    model, x = _convnet_of_20_ms(sizes)
    if not has_cause:
        model.without_unused()

    def prepare() -> torch.Tensor:
        end = time.perf_counter() + _PREPARE_S
        while time.perf_counter() < end:
            pass
        return x

    return train(nn.parallel.DistributedDataParallel(model, find_unused_parameters=has_cause), x, prepare)


def healthy_ddp(sizes: Sizes, has_cause: bool) -> Step:
    model, x = convnet(sizes)
    model.without_unused()
    return train(nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True), x)


def small_all_reduces(sizes: Sizes, has_cause: bool) -> Step:
    """Statistics, 256 KB each, summed one by one, or all at once."""
    model, x = _convnet_of_20_ms(sizes)
    num = 64 if sizes.is_small else 1 << 16
    values = [torch.randn(num, device=sizes.device) for _ in range(32 if sizes.is_small else 384)]
    inner = train(model, x)

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
    """Two batches on two streams, three products and a sum in each layer; launched whole, or layer by layer in turns.

    Their sums have one communicator, so those of the batch that is launched second come after all of the first one's. A layer has
    several products because a sum finds no free multiprocessor before one of the other batch's has ended.
    """
    chain = _Chain(sizes)
    batches = [chain.start() for _ in range(2)]
    streams: list[Any] = [torch.cuda.Stream() if sizes.device.type == "cuda" else None for _ in range(2)]  # type: ignore[no-untyped-call]
    results = list(batches)

    def layer(place: int) -> None:
        with torch.cuda.stream(streams[place]):
            y = results[place]
            for _ in range(3):
                y = y @ chain.weight
            work = dist.all_reduce(y, async_op=True)
            assert work is not None
            work.wait()
            results[place] = y

    def step() -> None:
        num = sizes.num_layers
        results[:] = batches
        for stream in streams:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
        order = [place for place in range(2) for _ in range(num)] if has_cause else [0, 1] * num
        for place in order:
            layer(place)
        for stream in streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

    return step


def contended(sizes: Sizes, has_cause: bool) -> Step:
    """Products beside sums that nobody waits for; without the cause the sums are left out of the products' way."""
    chain = _Chain(sizes)
    x, sums = chain.start(), chain.megabytes(64 + 16 * sizes.num_layers)

    def step() -> None:
        y = x
        for _ in range(sizes.num_layers):
            work = dist.all_reduce(sums, async_op=True) if has_cause else None
            for _ in range(5):
                y = y @ chain.weight
            if work is not None:
                work.wait()
            y = y / (y.norm() / y.numel() ** 0.5)

    return step


def tensor_parallel(sizes: Sizes, has_cause: bool) -> Step:
    """Sums whose results are needed at once: nothing can be won by waiting later."""
    model, x = transformer(sizes)

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
