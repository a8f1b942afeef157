"""``crossfade plan``: what every actor of a user's graph would do."""

from __future__ import annotations

from pathlib import Path

import crossfade
from crossfade.api import CompiledGraph
from crossfade.cli.exits import UsersMistake, told
from crossfade.cli.target import call_target, describe
from crossfade.errors import ActorStartError, GraphError
from crossfade.graph.nodes import MultiOutputNode, Node
from crossfade.plan.picture import draw_timelines
from crossfade.plan.text import ring_bytes
from crossfade.schedule.cost import CostModel
from crossfade.topology import Topology, load_topology

__all__ = ["load_graph", "show_plan"]


def show_plan(target: str, *, max_inflight: int, overlap: bool, svg: Path | None) -> None:
    """Prints the plan of the graph that a function returns, and what the simulator expects of it."""
    if svg is not None and not svg.name.lower().endswith(".svg"):
        raise UsersMistake(f"the picture is an SVG, not what {svg} is named for", hint="name a file that ends in .svg")
    crossfade.init(engine="inline")  # before the user's module is imported: it may start actors
    node = load_graph(target)
    with _compile(node, target, max_inflight=max_inflight, overlap=overlap) as graph:
        print(graph.plan)
        costs = CostModel(topology=load_topology() or Topology())
        timeline = graph.predicted_timeline(costs=costs, num_executions=min(max_inflight, 3))
        one = graph.predicted_timeline(costs=costs)
        num_actors = len(graph.plan.programs) - 1
        counts = [
            (len(graph.plan.nodes), "method call"),
            (num_actors, "actor"),
            (len(graph.plan.channels), "channel"),
        ]
        calls, actors, channels = (f"{number} {name}{'' if number == 1 else 's'}" for number, name in counts)
        print(f"\n{calls} on {actors}, {channels}")
        num_bytes = sum(map(ring_bytes, graph.plan.channels))
        print(f"rings take at least {num_bytes:,} bytes; larger values make larger slots when they come")
        print(f"predicted: {one.makespan_us:.1f} us for one execution, with methods that take no time and small values")
        for note in timeline.notes:
            print(f"note: {note}")
        if svg is not None:
            with told(f"cannot write {svg}", hint="name a file in a folder that exists"):
                svg.write_text(draw_timelines([timeline], f"{target}: methods take no time"), encoding="utf-8")
            print(f"picture of the predicted timeline: {svg}")


def load_graph(target: str) -> Node | MultiOutputNode:
    """Imports the module of ``module:function``, from the current directory too, and calls the function, which gives a node."""
    made = call_target(target, example="my_package.my_module:make_graph", returns="a node")
    if isinstance(made, Node | MultiOutputNode):
        return made
    raise UsersMistake(f"{target}() returned {describe(made)}, which is no node of a graph", hint=_hint_for(made))


def _compile(node: Node | MultiOutputNode, target: str, *, max_inflight: int, overlap: bool) -> CompiledGraph:
    try:
        graph: CompiledGraph = node.compile(max_inflight=max_inflight, overlap=overlap)
    except GraphError as error:
        message, _, hint = str(error).partition("\nhint: ")
        raise UsersMistake(f"the graph of {target} cannot be compiled: {message}", hint=hint or "see above") from None
    except ActorStartError as error:
        headline = str(error).partition("\n")[0]
        raise UsersMistake(headline, hint="this command runs constructors, so they must succeed") from None
    return graph


def _hint_for(made: object) -> str:
    if isinstance(made, CompiledGraph):
        return "return the node itself, before .compile(): this command compiles it"
    if isinstance(made, tuple | list) and made and all(isinstance(each, Node) for each in made):
        return "return crossfade.MultiOutputNode([...]) of them"
    return "return what the last method.bind(...) returned, or a MultiOutputNode"
