"""The first look: how long each operation of a traced module takes, forward and backward, and what it keeps.

The whole module runs a few times, forward one operation after another, backward in one go. What an operation's backward pass takes
is what autograd's nodes take that its forward pass made, the accumulation of its parameters' gradients included: a hook before
and one behind each node read the clock. What an operation keeps are the tensors that autograd saves while it runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import fx

from crossfade.pipelines.graph import TracedGraph
from crossfade.pipelines.timing import Loss, now_us, tensors_in


@dataclass(frozen=True, slots=True)
class MeasuredOperation:
    """One operation, for one microbatch."""

    forward_us: float
    backward_us: float
    saved: dict[str, int]  # bytes of what autograd keeps for it, by names of pieces of memory


@dataclass(frozen=True)
class MeasuredOperations:
    """All operations of a module, in order, and what was seen of them."""

    operations: list[MeasuredOperation]
    changed_buffers: tuple[str, ...]  # names of the buffers that a forward pass changes


def measure_operations(
    traced: TracedGraph, inputs: Sequence[Any], loss: Loss, device: torch.device, num_passes: int
) -> MeasuredOperations:
    """Runs the module, which has no cuts, ``num_passes`` times after one that does not count; the medians count. The loss counts
    with the last operation.
    """
    before = {name: buffer.clone() for name, buffer in traced.module.named_buffers()}
    passes = [_Pass(traced, device) for _ in range(num_passes + 1)]
    for each in passes:
        each.run_all(inputs, loss)
    counted = passes[1:]
    operations = [
        MeasuredOperation(
            median(each.forward_us[place] for each in counted),
            median(each.backward_us[place] for each in counted),
            passes[-1].saved[place],
        )
        for place in range(len(traced.operations))
    ]
    changed = tuple(name for name, b in traced.module.named_buffers() if not torch.equal(before[name], b))
    return MeasuredOperations(operations, changed)


class _Pass(fx.Interpreter):
    """One pass, forward and backward."""

    def __init__(self, traced: TracedGraph, device: torch.device) -> None:
        super().__init__(traced.module)
        self._traced, self._device = traced, device
        self._place = 0
        state = (*traced.module.parameters(), *traced.module.buffers())
        self._held = {tensor.untyped_storage().data_ptr() for tensor in state}
        self._owners: dict[torch.autograd.graph.Node, int] = {}
        self._started_us = 0.0
        self.forward_us: defaultdict[int, float] = defaultdict(float)
        self.backward_us: defaultdict[int, float] = defaultdict(float)
        self.saved: defaultdict[int, dict[str, int]] = defaultdict(dict)

    def run_all(self, inputs: Sequence[Any], loss: Loss) -> None:
        """The forward pass, the loss, the backward pass."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda tensor: tensor):
            outputs = tensors_in(self.run(*inputs, enable_io_processing=False))
            start_us = now_us(self._device)
            roots = [root for root in loss.roots(outputs) if root.requires_grad]
            self.forward_us[self._place] += now_us(self._device) - start_us
            self._own(roots)
        self.env.clear()
        removes = [
            handle.remove
            for node in self._owners
            for handle in (
                node.register_prehook(self._start),
                node.register_hook(partial(self._end, self._owners[node])),
            )
        ]
        if roots:
            torch.autograd.backward(roots, [torch.ones_like(root) for root in roots])
        for remove in removes:
            remove()
        self._owners.clear()

    def run_node(self, n: fx.Node) -> Any:
        """Runs a node; of an operation, the time and what autograd made of it."""
        self._place = self._traced.place.get(n, self._place) if n.op.startswith("call_") else self._place
        start_us = now_us(self._device)
        result = super().run_node(n)
        if n.op.startswith("call_"):
            self.forward_us[self._place] += now_us(self._device) - start_us
            self._own(tensors_in(result))
        return result

    def _own(self, tensors: Sequence[torch.Tensor]) -> None:
        """What autograd has new, behind some tensors, belongs to the operation at hand."""
        found = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        while found:
            node = found.pop()
            if node not in self._owners:
                self._owners[node] = self._place
                found += [each for each, _ in node.next_functions if each is not None]

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._held:
            self.saved[self._place][f"saved {storage.data_ptr():x}"] = storage.nbytes()
        return tensor.detach()  # an output that autograd saves would keep itself alive

    def _start(self, *_: Any) -> None:
        self._started_us = now_us(self._device)

    def _end(self, place: int, *_: Any) -> None:
        self.backward_us[place] += now_us(self._device) - self._started_us
