"""Plans for a machine that is not there: a described cluster stands for it, and no actor is made.

While such a session runs, ``Cls.remote(...)`` gives handles whose methods can be bound, and nothing else: no constructor runs, no
process starts. The graph is checked and planned as always; where its actors would be, `schedule.placement` says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NoReturn

from crossfade.api.compiled import TRANSPORTS
from crossfade.api.options import CompileOptions
from crossfade.api.session import init, require
from crossfade.engines.inline import InlineEngine
from crossfade.engines.protocol import ActorSpec
from crossfade.errors import SessionError
from crossfade.graph.check import check
from crossfade.graph.nodes import MultiOutputNode, Node
from crossfade.plan.plan import Plan
from crossfade.schedule.compile import compile_plan
from crossfade.schedule.placement import place
from crossfade.topology import Topology


class _Elsewhere(InlineEngine):
    """Actors that are only names."""

    name = "elsewhere"

    def start_actor(self, actor: ActorSpec) -> None:
        """Nothing is constructed."""

    def has_ended(self, actor: str) -> bool:
        return False

    def call(self, actor: str, *_: Any, **__: Any) -> NoReturn:
        raise SessionError(
            f"actor {actor} is on a machine that is only described, and does nothing",
            hint="bind its methods into the graph; plan without a topology where the program has to call them first",
        )

    def open(self, plan: Plan, *_: Any, **__: Any) -> NoReturn:
        raise SessionError(
            "the graph is for a machine that is only described", hint="return the node before .compile()"
        )


def init_elsewhere(topology: Topology) -> None:
    """Starts a session whose resources are those of a described cluster."""
    hosts = topology.cluster.hosts
    num_cores = sum(host.group.num_cores for host in hosts)
    session = init(engine="inline", num_cpus=num_cores, num_gpus=len(topology.cluster.of_gpu))
    session.engine = _Elsewhere()


def plan_elsewhere(output: Node | MultiOutputNode, topology: Topology, options: CompileOptions) -> Plan:
    """The plan of a graph on a described cluster, in a session of `init_elsewhere`.

    Raises:
        GraphError: the graph has a mistake, or an actor has no room.
    """
    session = require()
    checked = check(output, session=session.id, transports=TRANSPORTS)
    places = place(topology, {name: info.gpus for name, info in session.actors.items()})
    plan, _ = compile_plan(
        replace(checked, devices=places.gpus),
        max_inflight=options.max_inflight,
        buffer_bytes=options.buffer_bytes,
        overlap=options.overlap,
        topology=topology,
        uuids=dict(enumerate(topology.cluster.gpu_names)),
        hosts=places.hosts,
        is_described=True,
    )
    return plan
