"""A byte-level transformer, split over two actors and run over text files. Needs the extra ``torch``.

::

    python examples/pipeline_inference.py [FILE ...] [--engine inline] [--transport gloo]

The first actor has the embedding and the first half of the blocks, the second one the other half and the head. Batches
are streamed: while the second actor works on one, the first works on the next. The logits of every batch equal those
of the unsplit model bit for bit, or the program says which do not and exits with 1.

The weights are random, from a fixed seed, so the next-byte loss lies near that of guessing, ln 256 = 5.545.

The model and its letters are in ``byte_model.py``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from byte_model import documentation, make_layers, read_batches
from torch import Tensor, nn
from torch.nn import functional

import crossfade


class Stage:
    """Some of the model's layers, in a row."""

    def __init__(self, shape: Sequence[int], first: int, last: int) -> None:
        torch.set_num_threads(1)
        self.layers = nn.Sequential(*make_layers(*shape)[first:last])

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y: Tensor = self.layers(x)
        return y


def stream(graph: crossfade.CompiledGraph, batches: Sequence[Tensor], num_inflight: int) -> list[Tensor]:
    """The logits of all batches, with so many of them under way at once."""
    refs: deque[Any] = deque()
    results: list[Tensor] = []
    for batch in batches:
        if len(refs) == num_inflight:
            results.append(refs.popleft().get())
        refs.append(graph.execute(batch[:, :-1]))
    return results + [ref.get() for ref in refs]


def timed(function: Callable[[], list[Tensor]], num_tokens: int) -> tuple[list[Tensor], float]:
    """What the function returns, and tokens per second."""
    start_s = time.perf_counter()
    results = function()
    return results, num_tokens / (time.perf_counter() - start_s)


def mean_loss(batches: Sequence[Tensor], results: Sequence[Tensor]) -> float:
    """The next-byte loss, in nats a byte."""
    losses = [
        functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten().long())
        for batch, logits in zip(batches, results, strict=True)
    ]
    return float(torch.stack(losses).mean())


def run_whole(shape: Sequence[int], batches: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """Logits and tokens per second of the unsplit model, in this process."""
    whole = Stage(shape, 0, shape[-1] + 2)
    whole.forward(batches[0][:, :-1])  # the first call is slower
    return timed(lambda: [whole.forward(batch[:, :-1]) for batch in batches], batches[0][:, 1:].numel() * len(batches))


def run_split(
    shape: Sequence[int], batches: Sequence[Tensor], options: argparse.Namespace
) -> tuple[list[Tensor], float]:
    """Logits and tokens per second of the same model on two actors."""
    crossfade.init(engine=options.engine)
    actor_class = crossfade.remote(Stage)
    half = 1 + shape[-1] // 2
    front = actor_class.remote(shape, 0, half)
    back = actor_class.remote(shape, half, shape[-1] + 2)
    with crossfade.InputNode() as tokens:
        hidden: Any = front.forward.bind(tokens)
        output: Any = back.forward.bind(hidden.with_tensor_transport(options.transport))
    with output.compile(max_inflight=options.inflight) as graph:
        stream(graph, batches[:1], 1)
        measured = timed(lambda: stream(graph, batches, options.inflight), batches[0][:, 1:].numel() * len(batches))
    crossfade.shutdown()
    return measured


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[Tensor]]:
    """The options and the batches; exits with 2 and a message if they make no sense."""
    parser = argparse.ArgumentParser(description="A small transformer over two actors, equal to the unsplit one.")
    parser.add_argument("files", nargs="*", type=Path, help="text to read; this repository's documentation by default")
    parser.add_argument("--engine", choices=("local", "inline"), default="local", help="where the actors run")
    parser.add_argument("--transport", choices=("auto", "shm", "gloo"), default="auto", help="between the two actors")
    for name, default, what in (
        ("window", 128, "bytes in a window"),
        ("batch", 8, "windows in a batch"),
        ("batches", 32, "most batches to run"),
        ("inflight", 4, "batches under way at once"),
        ("width", 128, "width of the model"),
        ("heads", 4, "heads of the attention; a divisor of the width"),
        ("blocks", 4, "blocks, half of them on each actor; at least 2"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{what} ({default})")
    options = parser.parse_args(arguments)
    sizes = (options.window, options.batch, options.batches, options.inflight, options.heads)
    if min(sizes) < 1 or options.blocks < 2 or options.width < 1 or options.width % options.heads:
        parser.error("sizes are 1 or more, --blocks is 2 or more, and --heads divides --width")
    files = options.files or documentation()
    try:
        return options, read_batches(files, options.window, options.batch, options.batches)
    except (OSError, ValueError) as error:
        parser.error(str(error))


def main(arguments: Sequence[str]) -> int:
    """Runs both, compares every batch, and prints; 1 if a batch differs."""
    options, batches = parse(arguments)
    shape = (options.window, options.width, options.heads, options.blocks)
    expected, whole_rate = run_whole(shape, batches)
    results, split_rate = run_split(shape, batches, options)
    print(f"{len(batches)} batches of {options.batch} windows of {options.window} bytes, {options.inflight} in flight")
    print(f"unsplit     loss {mean_loss(batches, expected):.6f}  {whole_rate:10,.0f} tokens/s")
    print(f"two actors  loss {mean_loss(batches, results):.6f}  {split_rate:10,.0f} tokens/s")
    unequal = [index for index, pair in enumerate(zip(expected, results, strict=True)) if not torch.equal(*pair)]
    if unequal:
        print(f"these batches differ: {unequal}")
        return 1
    print(f"all {len(batches)} batches equal bit for bit")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
