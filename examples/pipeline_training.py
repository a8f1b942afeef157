"""Pipeline-parallel training by actors, one forward, one backward (1F1B). Needs the extra ``torch``.

::

    python examples/pipeline_training.py [--steps 20] [--stages 2]

The layers of a byte-level transformer are split over stages, a batch into micro-batches. Every stage first runs as many forwards
as there are stages behind it, then a forward and a backward in turn, then the backwards that are left, so it holds the
activations of few micro-batches at a time. Activations and gradients are edges of one graph, which one execution runs
for one step of the optimiser. On each actor methods run in the order in which they were bound.

The losses equal those of the unsplit model bit for bit on the CPU, because nothing is computed otherwise: the same micro-batches
through the same layers, gradients added up in the order of the micro-batches. The unsplit model runs on an actor of the same
kind. On GPUs the same holds as long as the library chooses the same kernels in both processes; there losses may
differ by 1e-5 of their size before the program exits with 1, and it says what it saw.

Stages are actors with a GPU each where there are enough, else on the CPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from byte_model import add_up_in_order, documentation, make_layers, place, read_batches
from torch import Tensor, nn
from torch.nn import functional

import crossfade

SHAPE = (32, 32, 2, 4)  # bytes in a window, width, heads, blocks
MICRO_BATCH, NUM_MICRO_BATCHES = 4, 4
LEARNING_RATE = 0.1
GPU_LIMIT = 1e-5


class Stage:
    """Some of the layers in a row, their optimiser, and the micro-batches on their way through them."""

    def __init__(self, device: str, first: int, last: int) -> None:
        torch.set_num_threads(1)
        add_up_in_order()
        self.device = device
        self.layers = nn.Sequential(*make_layers(*SHAPE)[first:last]).to(device)
        self.optimiser = torch.optim.SGD(self.layers.parameters(), lr=LEARNING_RATE, momentum=0.9)
        self.saved: dict[int, tuple[Tensor, Tensor]] = {}

    def forward(self, micro: int, x: Tensor) -> Tensor:
        """A micro-batch through the layers; the first stage gets bytes."""
        x = x.to(self.device)
        if x.is_floating_point():
            x = x.detach().requires_grad_()
        y: Tensor = self.layers(x)
        self.saved[micro] = x, y
        return y.detach()

    def loss(self, micro: int, x: Tensor, wanted: Tensor) -> Tensor:
        """The last stage's forward: this micro-batch's part of the loss."""
        self.forward(micro, x)
        x, logits = self.saved[micro]
        y = functional.cross_entropy(logits.flatten(0, 1), wanted.to(self.device).flatten().long()) / NUM_MICRO_BATCHES
        self.saved[micro] = x, y
        return y.detach()

    def backward(self, micro: int, gradient: Tensor) -> Tensor | None:
        """Adds to the parameters' gradients; gives the gradient of what came in. The last stage is given its own loss."""
        x, y = self.saved.pop(micro)
        if y.dim() == 0:
            y.backward()  # type: ignore[no-untyped-call]
        else:
            y.backward(gradient)  # type: ignore[no-untyped-call]
        return x.grad

    def update(self, *_: Any) -> int:
        """The optimiser's step, when all backwards are done; the number of micro-batches that are still held."""
        self.optimiser.step()
        self.optimiser.zero_grad()
        return len(self.saved)

    def whole_step(self, inputs: Sequence[Tensor], wanted: Sequence[Tensor]) -> Tensor:
        """A step of the unsplit model."""
        losses = []
        for micro, pair in enumerate(zip(inputs, wanted, strict=True)):
            losses.append(self.loss(micro, *pair))
            self.backward(micro, losses[-1])
        self.update()
        return torch.stack(losses).cpu()


def orders(num_stages: int, num_micro: int) -> list[list[tuple[str, int]]]:
    """What each stage does, in 1F1B order: ("F" or "B", micro-batch)."""
    found = []
    for stage in range(num_stages):
        num_ahead = min(num_stages - 1 - stage, num_micro)
        order = [("F", micro) for micro in range(num_ahead)]
        for micro in range(num_micro - num_ahead):
            order += [("F", micro + num_ahead), ("B", micro)]
        found.append(order + [("B", micro) for micro in range(num_micro - num_ahead, num_micro)])
    return found


def build(stages: Sequence[Any]) -> Any:
    """One step of training; each stage's nodes are bound in its order, as soon as what they need is bound."""
    last = len(stages) - 1
    left = orders(len(stages), NUM_MICRO_BATCHES)
    forwards: list[dict[int, Any]] = [{} for _ in stages]
    backwards: list[dict[int, Any]] = [{} for _ in stages]
    with crossfade.InputNode() as inp:

        def source_of(at: int, what: str, micro: int) -> Any:
            if what == "F":
                return inp[micro] if at == 0 else forwards[at - 1].get(micro)
            return forwards[at].get(micro) if at == last else backwards[at + 1].get(micro)

        while any(left):
            for at, order in enumerate(left):
                while order and (source := source_of(at, *order[0])) is not None:
                    what, micro = order.pop(0)
                    if what == "B":
                        backwards[at][micro] = stages[at].backward.bind(micro, source)
                    elif at == last:
                        forwards[at][micro] = stages[at].loss.bind(micro, source, inp[NUM_MICRO_BATCHES + micro])
                    else:
                        forwards[at][micro] = stages[at].forward.bind(micro, source)
        updates = [stage.update.bind(*done.values()) for stage, done in zip(stages, backwards, strict=True)]
        return crossfade.MultiOutputNode([*forwards[last].values(), *updates])


Step = tuple[list[Tensor], list[Tensor]]
"""What goes in, and what is wanted, for each micro-batch."""


def read_steps(num_steps: int) -> list[Step]:
    """Batches cut into micro-batches; the text is gone through again where it is too short."""
    batches = read_batches(documentation(), SHAPE[0], MICRO_BATCH * NUM_MICRO_BATCHES, num_steps)
    pieces = [torch.split(batch, MICRO_BATCH) for batch in batches]
    steps = [([piece[:, :-1] for piece in each], [piece[:, 1:] for piece in each]) for each in pieces]
    return [steps[number % len(steps)] for number in range(num_steps)]


def train_whole(steps: Sequence[Step], device: str, num_gpus: int) -> list[Tensor]:
    """The losses of the unsplit model, for each step those of its micro-batches."""
    whole = crossfade.remote(num_gpus=num_gpus)(Stage).remote(device, 0, SHAPE[-1] + 2)
    losses = [crossfade.get(whole.whole_step.remote(*step)) for step in steps]
    crossfade.kill(whole)  # its GPU is needed
    return losses


def train_split(steps: Sequence[Step], device: str, num_gpus: int, num_stages: int) -> tuple[list[Tensor], float]:
    """The same from actors, and milliseconds per step."""
    cuts = [round(stage * (SHAPE[-1] + 2) / num_stages) for stage in range(num_stages + 1)]
    stage_class = crossfade.remote(num_gpus=num_gpus)(Stage)
    stages = [stage_class.remote(device, *cuts[stage : stage + 2]) for stage in range(num_stages)]
    losses = []
    with build(stages).compile() as graph:
        start_s = time.perf_counter()
        for inputs, wanted in steps:
            results = crossfade.get(graph.execute(*inputs, *wanted))
            losses.append(torch.stack(results[:NUM_MICRO_BATCHES]))
            if any(results[NUM_MICRO_BATCHES:]):
                raise RuntimeError("a stage still holds a micro-batch after its step")
        return losses, (time.perf_counter() - start_s) / len(steps) * 1e3


def main(arguments: Sequence[str]) -> int:
    """Trains both, compares every loss, and prints; 1 if they differ by more than they may."""
    parser = argparse.ArgumentParser(description="1F1B training by actors, equal to training the unsplit model.")
    parser.add_argument("--steps", type=int, default=20, help="steps of the optimiser")
    parser.add_argument("--stages", type=int, choices=(2, 3, 4), default=2, help="actors")
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error("--steps is at least 1")
    device, num_gpus = place(options.stages)
    steps = read_steps(options.steps)
    expected = train_whole(steps, device, num_gpus)
    losses, step_ms = train_split(steps, device, num_gpus, options.stages)
    crossfade.shutdown()
    differences = [float(((a - b) / a).abs().max()) for a, b in zip(expected, losses, strict=True)]
    print(f"{options.stages} stages on {device}, {NUM_MICRO_BATCHES} micro-batches a step, {step_ms:.1f} ms a step")
    print(f"loss {float(losses[0].sum()):.4f} before the first step, {float(losses[-1].sum()):.4f} before the last")
    if max(differences) == 0:
        print(f"all losses of {len(steps)} steps equal the unsplit model's bit for bit")
        return 0
    first = next(number for number, difference in enumerate(differences) if difference)
    print(f"losses differ by up to {max(differences):.1e} of their size, first in step {first}")
    return 0 if device == "cuda" and max(differences) <= GPU_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
