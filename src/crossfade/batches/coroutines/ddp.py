"""DDP: batches of one step have one backward, or gradients would differ between ranks silently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from crossfade.errors import BatchesError


class OneBackward:
    """Raises in the second backward that comes to a DDP module's outputs of one run.

    DDP reduces each bucket of gradients once after its forward calls: in the first backward, without what a second one adds. What
    accumulates no gradients of its parameters, as `torch.autograd.grad` of an input, is none.
    """

    def __init__(self) -> None:
        self._tasks: dict[DistributedDataParallel, int] = {}  # the first one of each module

    def watch(self, module: DistributedDataParallel, output: Any) -> None:
        """Looks at the tensors of a module's output when their gradients come; not under ``no_sync``, which reduces none."""
        if not module.require_backward_grad_sync:
            return
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(partial(self._look, module))  # type: ignore[no-untyped-call,unused-ignore]

    def _look(self, module: DistributedDataParallel, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self._tasks.get(module, task) == task:
            if module not in self._tasks and _accumulates(module):
                self._tasks[module] = task
        elif _accumulates(module):
            raise BatchesError(
                "a second backward comes to batches of a module in DistributedDataParallel: it reduces gradients in the first of "
                "several backward calls only, and they would differ between ranks",
                hint="call backward once, on the sum of all batches' losses (InterleavedSteps.backward does)",
            )


def _accumulates(module: DistributedDataParallel) -> bool:
    """Whether the backward that is under way adds to the gradient of a parameter."""
    with torch.enable_grad():
        views: Iterator[Any] = (each.view_as(each) for each in module.parameters() if each.requires_grad)
        nodes = (view.grad_fn.next_functions[0][0] for view in views)
        return any(torch._C._will_engine_execute_node(node) for node in nodes)


@contextmanager
def one_backward(modules: Sequence[DistributedDataParallel]) -> Iterator[None]:
    """What these give in the block has one backward."""
    watcher = OneBackward()
    hooks = [
        module.register_forward_hook(lambda module, _, output: watcher.watch(module, output)) for module in modules
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
