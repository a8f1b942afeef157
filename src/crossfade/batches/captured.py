"""A call as a CUDA graph: inputs are copied into its own, it is replayed, and copies of its outputs are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from crossfade.peers.replays import stop_recording


class CapturedCall:
    """One call, captured for arguments of one signature. It needs no gradient, and keeps no state on the CPU.

    Args:
        call: of the arguments; it has run before, so that nothing is made for the first time in the capture.
    """

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        self._inputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        own_args, own_kwargs = pytree.tree_unflatten(self._inputs, spec)
        self._graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        pool: Any = torch.cuda.graph_pool_handle()
        caller = torch.cuda.current_stream()
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                self._output = call(*own_args, **own_kwargs)
        except BaseException:
            torch.cuda.set_stream(caller)  # torch leaves its own one current where the end of the capture fails
            stop_recording(torch.cuda.current_device(), pool)
            raise

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for own, given in zip(self._inputs, pytree.tree_leaves((args, kwargs)), strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(given)
        self._graph.replay()
        return pytree.tree_map_only(torch.Tensor, torch.clone, self._output)
