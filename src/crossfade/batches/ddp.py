"""DDP: batches of one step have one backward, or gradients would differ between ranks silently."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from crossfade.errors import BatchesError


class OneBackward:
    """Raises in the second backward that comes to a DDP module's outputs of one run.

    DDP reduces each bucket of gradients once after its forward calls: in the first backward, without what a second one adds.
    """

    def __init__(self) -> None:
        self._task: int | None = None

    def watch(self, module: DistributedDataParallel, output: Any) -> None:
        """Looks at the tensors of a module's output when their gradients come; not under ``no_sync``, which reduces none."""
        if not module.require_backward_grad_sync:
            return
        for leaf in pytree.tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
                leaf.register_hook(self._look)  # type: ignore[no-untyped-call,unused-ignore]

    def _look(self, _: torch.Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self._task is None:
            self._task = task
        elif task != self._task:
            raise BatchesError(
                "a second backward comes to batches of a module in DistributedDataParallel: it reduces gradients in the first of "
                "several backward calls only, and they would differ between ranks",
                hint="call backward once, on the sum of all batches' losses (InterleavedSteps.backward does)",
            )


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
