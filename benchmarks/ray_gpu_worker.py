"""Ray Compiled Graph's worker of ``gpu_overlap`` and ``gpu_hops``: ``python -m benchmarks.ray_gpu_worker DEVICE``.

An actor of Ray's takes part in one compiled graph, so a worker has one way of running the overlap program, or one case of the hops.
Taking graphs down has hung: whoever started this process ends it, and its group, after a while.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu_programs import MAX_INFLIGHT, MEASURES
from benchmarks.gpu_steps import own_replies, serve


class Ray:
    """As `gpu_programs.Library` has it."""

    may_share = False

    def __init__(self, device: str) -> None:
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_CGRAPH_get_timeout="60", RAY_CGRAPH_submit_timeout="60")
        import ray
        import ray.dag

        self._ray: Any = ray
        self.device = device
        ray.init(
            address="local",
            num_cpus=8,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
        )

    def new_actor(self, cls: type, *args: Any) -> Any:
        return self._ray.remote(num_cpus=1, num_gpus=1 if self.device == "cuda" else 0)(cls).remote(*args)

    def call(self, method: Any, *args: Any) -> Any:
        return self._ray.get(method.remote(*args), timeout=120)

    def kill(self, actor: Any) -> None:
        self._ray.kill(actor)

    def input_node(self) -> Any:
        return self._ray.dag.InputNode()

    def hinted(self, node: Any) -> Any:
        if self.device == "cuda":
            return node.with_tensor_transport("nccl", _static_shape=True, _direct_return=True)
        return node.with_tensor_transport("auto")

    def outputs(self, nodes: Sequence[Any]) -> Any:
        return self._ray.dag.MultiOutputNode(list(nodes))

    def compile(self, dag: Any, *, overlap: bool) -> Any:
        more = {"_overlap_gpu_communication": overlap} if self.device == "cuda" else {}
        return dag.experimental_compile(_max_inflight_executions=MAX_INFLIGHT, **more)

    def get(self, result: Any) -> Any:
        return self._ray.get(result, timeout=60)

    def version(self) -> str:
        return str(self._ray.__version__)


def main() -> None:
    replies = own_replies()
    library = Ray(sys.argv[1])
    measures = {**MEASURES, "version": lambda state, request: {"version": library.version()}}
    serve({"library": library}, measures, replies)
    library._ray.shutdown()


if __name__ == "__main__":
    main()
