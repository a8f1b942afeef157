"""crossfade's worker of ``gpu_overlap`` and ``gpu_hops``: ``python -m benchmarks.gpu_worker DEVICE TRANSPORT``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch

import crossfade
from benchmarks.gpu_actors import Sender
from benchmarks.gpu_programs import MAX_INFLIGHT, MEASURES, NUM_SENDERS
from benchmarks.gpu_steps import own_replies, serve


class Crossfade:
    """As `gpu_programs.Library` has it."""

    may_share = True

    def __init__(self, device: str, transport: str) -> None:
        self.device = device
        self._transport = transport
        crossfade.init()

    def new_actor(self, cls: type, *args: Any) -> Any:
        return crossfade.remote(num_gpus=self._gpus_for(cls))(cls).remote(*args)

    def _gpus_for(self, cls: type) -> float:
        """One each; the senders share one where there are too few, and all share the only one."""
        if self.device != "cuda":
            return 0
        if torch.cuda.device_count() == 1:
            return 0.25
        return 0.3 if cls is Sender and torch.cuda.device_count() <= NUM_SENDERS else 1

    def call(self, method: Any, *args: Any) -> Any:
        return crossfade.get(method.remote(*args))

    def kill(self, actor: Any) -> None:
        crossfade.kill(actor)

    def input_node(self) -> Any:
        return crossfade.InputNode()

    def hinted(self, node: Any) -> Any:
        return node.with_tensor_transport(self._transport, static_shape=True, direct_return=True)

    def outputs(self, nodes: Sequence[Any]) -> Any:
        return crossfade.MultiOutputNode(list(nodes))

    def compile(self, dag: Any, *, overlap: bool) -> Any:
        return dag.compile(overlap=overlap, max_inflight=MAX_INFLIGHT)

    def get(self, result: Any) -> Any:
        return crossfade.get(result)


def main() -> None:
    replies = own_replies()
    serve({"library": Crossfade(*sys.argv[1:3])}, MEASURES, replies)
    crossfade.shutdown()


if __name__ == "__main__":
    main()
