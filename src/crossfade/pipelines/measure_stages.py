"""The second look: how long whole stages take, as torch's schedules run them.

All stages run one after the other, forward to the end and backward to the front, on values that are cut off from autograd in
between, as they are between ranks. The backward pass is torch's own, in one part and in two (`stage_backward` and, for schedules
that put off the gradients of weights, `stage_backward_input` and `stage_backward_weight`), and adds to gradients that are there,
as it does for all microbatches but the first.

On a GPU each pass is measured in two ways: how long the host takes to enqueue it, and how long the GPU takes when all is enqueued
before it begins. In a training step the host may be ahead of the GPU or behind it, so a stage has both times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import NamedTuple, TypeAlias

import torch
from torch import fx

from crossfade.pipelines.timing import Loss, PassTime, Stopwatch
from crossfade.pipelines.torch_names import backward_functions, pipe_split_operator

_FORWARD, _BACKWARD, _WEIGHT = range(3)
_AHEAD = 1.5
"""How much longer than the host takes a GPU is busy with something else, so that it is behind."""

Tensors: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class RunnableStage:
    """A stage as something to call."""

    run: Callable[[Tensors], Tensors]  # what the stage before it returned, or the module's inputs, to what it returns
    parameters: list[torch.nn.Parameter]
    buffers: list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What one stage takes for one microbatch: medians, in microseconds and bytes."""

    forward: PassTime
    """Of the last stage with the loss, where one was given."""
    backward: PassTime
    """The whole backward pass."""
    input: PassTime | None
    """The part of it that a schedule with a divided backward pass does first; None where torch cannot divide it."""
    weight: PassTime | None
    """The other part."""
    activation_bytes: int
    """What stays from the forward pass to the backward pass: what autograd saves, and what comes in and goes out."""
    sent_bytes: int
    """What goes to the next stage; 0 for the last."""
    returned_bytes: int
    """Gradients that go to the stage before; 0 for the first."""

    @property
    def time_us(self) -> float:
        """How long one of many microbatches takes: host and GPU run ahead of each other, so the busier one counts."""
        return sum(self.busier_us)

    @property
    def busier_us(self) -> tuple[float, float]:
        """Forward and backward, of the host or of the GPU, whichever is busier over both."""
        host_us = self.forward.host_us, self.backward.host_us
        device_us = self.forward.device_us, self.backward.device_us
        return max(host_us, device_us, key=sum)


def mean_times(seen: Sequence[StageTimes]) -> StageTimes:
    """What several ranks measured of one stage, as one: the means of times. What is None for one of them is None."""

    def mean(times: Sequence[PassTime]) -> PassTime:
        return PassTime(fmean(each.host_us for each in times), fmean(each.device_us for each in times))

    inputs = [each.input for each in seen if each.input is not None]
    weights = [each.weight for each in seen if each.weight is not None]
    is_divided = len(weights) == len(seen)
    return replace(
        seen[0],
        forward=mean([each.forward for each in seen]),
        backward=mean([each.backward for each in seen]),
        input=mean(inputs) if is_divided else None,
        weight=mean(weights) if is_divided else None,
    )


def runnable_stages(module: fx.GraphModule) -> list[RunnableStage]:
    """The stages of a graph that has its cuts in it (`crossfade.pipelines.stages`)."""
    attributes: list[fx.Node] = []
    stages: list[list[fx.Node]] = [[]]
    for node in module.graph.nodes:
        if node.op == "get_attr":
            attributes.append(node)
        elif node.target is pipe_split_operator():
            stages.append([])
        elif node.op.startswith("call_"):
            stages[-1].append(node)
    last = module.graph.output_node()
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    found = []
    for nodes, following in zip(stages, [*stages[1:], [last]], strict=True):
        outputs = list(last.all_input_nodes) if following == [last] else _crossing(nodes, following)
        found.append(_runnable(module, attributes, nodes, inputs, outputs))
        inputs = outputs
    return found


def _crossing(nodes: Sequence[fx.Node], following: Sequence[fx.Node]) -> list[fx.Node]:
    users = set(following)
    return [node for node in nodes if not users.isdisjoint(node.users)]


def _runnable(
    module: fx.GraphModule,
    attributes: Sequence[fx.Node],
    nodes: Sequence[fx.Node],
    inputs: Sequence[fx.Node],
    outputs: Sequence[fx.Node],
) -> RunnableStage:
    used = {each for node in nodes for each in node.all_input_nodes}
    own = [node for node in attributes if node in used]

    def run(values: Tensors) -> Tensors:
        interpreter = fx.Interpreter(module, garbage_collect_values=False)
        interpreter.env.update(zip(inputs, values, strict=True))
        for node in (*own, *nodes):
            interpreter.env[node] = interpreter.run_node(node)
        return tuple(interpreter.env[node] for node in outputs)

    tensors = {id(t): t for t in (fx.Interpreter(module).fetch_attr(str(node.target)) for node in own)}.values()
    parameters = [each for each in tensors if isinstance(each, torch.nn.Parameter)]
    buffers = [each for each in tensors if isinstance(each, torch.Tensor) and not isinstance(each, torch.nn.Parameter)]
    return RunnableStage(run, parameters, buffers)


def measure_stages(
    stages: Sequence[RunnableStage],
    inputs: Tensors,
    loss: Loss,
    device: torch.device,
    num_passes: int,
    *,
    divides: bool = True,
) -> list[StageTimes]:
    """Runs all stages ``num_passes`` times in each way, the divided backward pass too if it ``divides``, after one pass of each
    that does not count.
    """
    whole = _measure(stages, inputs, loss, device, num_passes, is_divided=False)
    try:
        halves = _measure(stages, inputs, loss, device, num_passes, is_divided=True) if divides else None
    except (RuntimeError, KeyError, AssertionError):  # torch cannot divide this one
        halves = None
    sizes = _Pass(stages, loss, device)
    with sizes.counting_memory():
        sizes.forward(inputs)
    sizes.backward(is_divided=False)  # frees what was saved
    return [
        StageTimes(
            forward=whole.forwards[index],
            backward=whole.backwards[index],
            input=halves.backwards[index] if halves else None,
            weight=halves.weights[index] if halves else None,
            activation_bytes=sizes.kept_bytes(index),
            sent_bytes=sum(each.nbytes for each in sizes.outputs[index]) if index + 1 < len(stages) else 0,
            returned_bytes=sum(each.nbytes for each in sizes.inputs[index] if each.requires_grad) if index else 0,
        )
        for index in range(len(stages))
    ]


def _measure(
    stages: Sequence[RunnableStage],
    inputs: Tensors,
    loss: Loss,
    device: torch.device,
    num_passes: int,
    *,
    is_divided: bool,
) -> _Times:
    """The medians of all stages' passes."""

    def run(num: int, behind: _Times | None = None) -> list[_Times]:
        passes = (_Pass(stages, loss, device, behind) for _ in range(num))
        return [each.run(inputs, is_divided=is_divided) for each in passes]

    def of_all(choose: Callable[[Sequence[PassTime]], PassTime], seen: Sequence[_Times]) -> _Times:
        """What is chosen for each stage and kind of pass."""
        kinds = zip(*seen, strict=True)
        return _Times(*([choose(each) for each in zip(*times, strict=True)] for times in kinds))

    seen = run(num_passes + 1)[1:]
    if device.type == "cuda":
        seen += run(num_passes, of_all(_longest, seen))
    return of_all(_median, seen)


class _Times(NamedTuple):
    """For each stage, what its passes took."""

    forwards: list[PassTime]
    backwards: list[PassTime]  # or their first parts
    weights: list[PassTime]  # their second parts


def _longest(times: Sequence[PassTime]) -> PassTime:
    return PassTime(host_us=max(each.host_us for each in times))


def _median(times: Sequence[PassTime]) -> PassTime:
    """Of some the host was timed, of the others the GPU."""
    host_us = [each.host_us for each in times if not each.device_us]
    device_us = [each.device_us for each in times if each.device_us]
    return PassTime(median(host_us or [0.0]), median(device_us or [0.0]))


class _Pass:
    """One microbatch, through all stages and back."""

    def __init__(
        self, stages: Sequence[RunnableStage], loss: Loss, device: torch.device, behind: _Times | None = None
    ) -> None:
        """``behind``: how long the host takes at most, if the GPU is to be behind it, and its times are to be taken."""
        self._stages, self._loss, self._behind = stages, loss, behind
        self._watch = Stopwatch(device)
        self._whole, self._input, self._weight = backward_functions()
        self.inputs: list[Tensors] = []
        self.outputs: list[Tensors] = []
        self._saved: list[dict[int, int]] = []
        num = len(stages)
        self._times = _Times(*([PassTime()] * num for _ in range(3)))

    def run(self, inputs: Tensors, *, is_divided: bool) -> _Times:
        """Forward and backward; returns what they took."""
        self.forward(inputs)
        self.backward(is_divided=is_divided)
        self.inputs.clear()
        self.outputs.clear()
        return self._times

    def forward(self, values: Tensors) -> None:
        """All stages, from the first to the last, and the loss."""
        for index, stage in enumerate(self._stages):
            if index:
                values = tuple(each.detach().requires_grad_(each.is_floating_point()) for each in values)
            self.inputs.append(values)
            self._saved.append({})
            with self._timed(_FORWARD, index):
                values = stage.run(values)
                if index + 1 == len(self._stages):
                    values = self._loss.roots(values)
            self.outputs.append(values)

    def backward(self, *, is_divided: bool) -> None:
        """All stages, from the last to the first. Where the backward pass is divided, the first stage does all of it as the second
        part.
        """
        ones = [torch.ones_like(each) for each in self.outputs[-1]]
        gradients: Sequence[torch.Tensor | None] = ones
        for index in reversed(range(len(self._stages))):
            outputs, inputs = self.outputs[index], list(self.inputs[index])
            if is_divided and gradients is ones:  # instead of a loss: torch detaches it in place, which a view refuses
                outputs = tuple(each.clone() for each in outputs)
            if is_divided and index:
                weights = self._stages[index].parameters
                with self._timed(_BACKWARD, index):
                    gradients, groups = self._input(list(outputs), gradients, inputs, iter(weights))
                with self._timed(_WEIGHT, index):
                    self._weight(iter(weights), groups)
            elif any(each.requires_grad for each in outputs):
                with self._timed(_WEIGHT if is_divided else _BACKWARD, index):
                    gradients = self._whole(outputs, tuple(gradients), inputs)
            gradients = [
                torch.zeros_like(value) if gradient is None else gradient
                for value, gradient in zip(inputs, gradients, strict=False)
            ]

    @contextmanager
    def _timed(self, kind: int, index: int) -> Iterator[None]:
        """Takes the time of what is done inside: of the host, or of a GPU that is behind it."""
        self._watch.start(_AHEAD * self._behind[kind][index].host_us if self._behind else 0.0)
        yield
        self._times[kind][index] = self._watch.stop()

    def counting_memory(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Inside, what autograd saves is counted; there is no way back."""
        kept: list[torch.Tensor] = []  # so that no two of them have one address

        def save(tensor: torch.Tensor) -> int:
            storage = tensor.untyped_storage()
            self._saved[-1][storage.data_ptr()] = storage.nbytes()
            kept.append(tensor.detach())
            return len(kept)

        return torch.autograd.graph.saved_tensors_hooks(save, lambda place: kept[place - 1])

    def kept_bytes(self, index: int) -> int:
        """What a stage keeps for its backward pass, its parameters and buffers left out."""
        stage = self._stages[index]
        kept = dict(self._saved[index])
        kept |= {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
            for t in (*self.inputs[index], *self.outputs[index])
        }
        for tensor in (*stage.parameters, *stage.buffers):
            kept.pop(tensor.untyped_storage().data_ptr(), None)
        return sum(kept.values())
