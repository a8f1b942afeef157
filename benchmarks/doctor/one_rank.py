"""Planted causes of one GPU: the host waits, copies, allocates, or launches too slowly."""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from benchmarks.doctor.planted import Sizes, Step, convnet, train, transformer

__all__ = [
    "free_each_layer",
    "healthy_convnet",
    "healthy_transformer",
    "item_and_pageable",
    "item_each_layer",
    "item_each_step",
    "nonzero_each_layer",
    "pageable_batch",
    "pageable_each_layer",
    "small_kernels",
    "sync_each_step",
    "two_streams",
    "waiting_stream",
]


def healthy_transformer(sizes: Sizes, has_cause: bool) -> Step:
    return train(*transformer(sizes))


def healthy_convnet(sizes: Sizes, has_cause: bool) -> Step:
    return train(*convnet(sizes))


def item_each_layer(sizes: Sizes, has_cause: bool) -> Step:
    model, x = transformer(sizes)

    def between(x: torch.Tensor, number: int) -> torch.Tensor:
        mean = x.detach().abs().mean()
        return x * 0.5 if has_cause and mean.item() > 1e6 else x

    model.between = between
    return train(model, x)


def item_each_step(sizes: Sizes, has_cause: bool) -> Step:
    model, x = transformer(sizes)
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
    model, x = convnet(sizes)

    def between(x: torch.Tensor, number: int) -> torch.Tensor:
        is_kept = x.detach().flatten(1).sum(1) > -1e9
        rows = torch.nonzero(is_kept) if has_cause else torch.nonzero_static(is_kept, size=len(x))
        return x.index_select(0, rows[:, 0])

    model.between = between
    return train(model, x)


def pageable_each_layer(sizes: Sizes, has_cause: bool) -> Step:
    model, x = transformer(sizes)
    noise = torch.randn(x.shape, dtype=sizes.dtype)
    if sizes.device.type == "cuda" and not has_cause:
        noise = noise.pin_memory()
    model.between = lambda x, _: x + noise.to(sizes.device, non_blocking=True)
    return train(model, x)


def pageable_batch(sizes: Sizes, has_cause: bool) -> Step:
    model, x = convnet(sizes)
    batch = torch.randn(x.shape)
    if sizes.device.type == "cuda" and not has_cause:
        batch = batch.pin_memory()
    return train(model, x, lambda: batch.to(sizes.device, non_blocking=True))


def free_each_layer(sizes: Sizes, has_cause: bool) -> Step:
    model, x = transformer(sizes)

    def between(x: torch.Tensor, number: int) -> torch.Tensor:
        if has_cause and x.is_cuda:
            torch.cuda.empty_cache()
        return x * 1.0

    model.between = between
    return train(model, x)


def small_kernels(sizes: Sizes, has_cause: bool) -> Step:
    x = torch.randn(64, 64, device=sizes.device)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(8 * sizes.num_layers))).to(
        sizes.device
    )
    step = train(model, x)
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
    inner = train(*transformer(sizes))

    def step() -> None:
        inner()
        if has_cause and sizes.device.type == "cuda":
            torch.cuda.synchronize()

    return step


def item_and_pageable(sizes: Sizes, has_cause: bool) -> Step:
    model, x = transformer(sizes)
    noise = torch.randn(x.shape, dtype=sizes.dtype)
    if sizes.device.type == "cuda" and not has_cause:
        noise = noise.pin_memory()

    def between(x: torch.Tensor, number: int) -> torch.Tensor:
        x = x + noise.to(sizes.device, non_blocking=True)
        mean = x.detach().abs().mean()
        return x * 0.5 if has_cause and mean.item() > 1e6 else x

    model.between = between
    return train(model, x)


def two_streams(sizes: Sizes, has_cause: bool) -> Step:
    """Two batches on two streams, and a check for NaN behind each layer.

    ``if not torch.isfinite(y).all()`` waits for the stream, so the other stream's layer is not launched before this one is done.
    Each product takes about 0.1 ms on an H100: the host launches faster than that unless it waits.
    """
    rows = 16 if sizes.is_small else (1 << 31) // sizes.width**2 // 128 * 128
    weights = [torch.randn(sizes.width, sizes.width, device=sizes.device) / sizes.width**0.5 for _ in range(4)]
    batches = [torch.randn(rows, sizes.width, device=sizes.device) for _ in range(2)]
    streams: list[Any] = [torch.cuda.Stream() if sizes.device.type == "cuda" else None for _ in range(2)]  # type: ignore[no-untyped-call]

    def layer(y: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            y = torch.tanh(y @ weight)
        is_finite = torch.isfinite(y).all()
        if has_cause and not is_finite:
            raise FloatingPointError("not a number")
        return y

    def step() -> None:
        results = list(batches)
        for stream in streams:
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
        for _ in range(sizes.num_layers):
            for place, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    results[place] = layer(results[place])
        for stream in streams:
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)

    return step


def waiting_stream(sizes: Sizes, has_cause: bool) -> Step:
    """The next input of each layer is copied from pinned memory beside its products, on a stream that waits for the default stream.

    Some libraries make such streams; without the cause it is one of torch's.
    """
    is_gpu = sizes.device.type == "cuda"
    rows = 32 if sizes.is_small else 4096
    weights = [torch.randn(sizes.width, sizes.width, device=sizes.device) / sizes.width**0.5 for _ in range(3)]
    source = torch.randn(rows, sizes.width)
    source = source.pin_memory() if is_gpu else source
    targets = [torch.empty(rows, sizes.width, device=sizes.device) for _ in range(2)]
    stream: Any = None
    if is_gpu:
        stream = _stream_that_waits(sizes.device) if has_cause else torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def step() -> None:
        for number in range(sizes.num_layers):
            with torch.cuda.stream(stream) if is_gpu else nullcontext():
                targets[(number + 1) % 2].copy_(source, non_blocking=True)
            y = targets[number % 2]
            for weight in weights:
                y = torch.tanh(y @ weight)

    return step


def _stream_that_waits(device: torch.device) -> Any:
    """A stream of ``cudaStreamCreate``, without cudaStreamNonBlocking."""
    handle = ctypes.c_ulonglong(0)
    error = torch.cuda.cudart().cudaStreamCreate(ctypes.addressof(handle))  # type: ignore[no-untyped-call]
    if int(error):
        raise RuntimeError(f"cudaStreamCreate failed: {error}")
    return torch.cuda.ExternalStream(handle.value, device=device)  # type: ignore[no-untyped-call]
