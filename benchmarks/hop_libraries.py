"""What differs between the libraries that `benchmarks.hop_worker` measures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

MAX_INFLIGHT = 8


class Library(Protocol):
    """What differs between the two libraries."""

    def start(self, actor: type) -> None: ...
    def stop(self) -> None: ...
    def new_actor(self) -> Any: ...
    def kill(self, actor: Any) -> None: ...
    def input_node(self) -> Any: ...
    def outputs(self, nodes: Sequence[Any]) -> Any: ...
    def compile(self, dag: Any) -> Any: ...
    def get(self, result: Any) -> Any: ...


class Crossfade:
    """crossfade; ``blocking`` waits without spinning first."""

    def __init__(self, *, blocking: bool) -> None:
        import crossfade

        self._crossfade: Any = crossfade
        self._options = {"spin_us": 0} if blocking else {}

    def start(self, actor: type) -> None:
        self._crossfade.init(**self._options)
        self._actor_class = self._crossfade.remote(actor)
        self.get: Callable[[Any], Any] = self._crossfade.get

    def stop(self) -> None:
        self._crossfade.shutdown()

    def new_actor(self) -> Any:
        return self._actor_class.remote()

    def kill(self, actor: Any) -> None:
        self._crossfade.kill(actor)

    def input_node(self) -> Any:
        return self._crossfade.InputNode()

    def outputs(self, nodes: Sequence[Any]) -> Any:
        return self._crossfade.MultiOutputNode(list(nodes))

    def compile(self, dag: Any) -> Any:
        return dag.compile(max_inflight=MAX_INFLIGHT)


class Ray:
    """Ray Compiled Graph."""

    def __init__(self) -> None:
        os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_CGRAPH_get_timeout="60", RAY_CGRAPH_submit_timeout="60")
        import ray
        import ray.dag

        self._ray: Any = ray

    def start(self, actor: type) -> None:
        self._ray.init(
            address="local",
            num_cpus=16,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            _node_ip_address="127.0.0.1",
        )
        self._actor_class = self._ray.remote(actor)
        self.get: Callable[[Any], Any] = self._ray.get

    def stop(self) -> None:
        self._ray.shutdown()

    def new_actor(self) -> Any:
        return self._actor_class.remote()

    def kill(self, actor: Any) -> None:
        self._ray.kill(actor)

    def input_node(self) -> Any:
        return self._ray.dag.InputNode()

    def outputs(self, nodes: Sequence[Any]) -> Any:
        return self._ray.dag.MultiOutputNode(list(nodes))

    def compile(self, dag: Any) -> Any:
        return dag.experimental_compile(_max_inflight_executions=MAX_INFLIGHT)


LIBRARIES: Mapping[str, Callable[[], Library]] = {
    "crossfade": lambda: Crossfade(blocking=False),
    "blocking": lambda: Crossfade(blocking=True),
    "ray": Ray,
}
