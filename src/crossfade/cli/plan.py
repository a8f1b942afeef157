"""``crossfade plan``: what every actor of a user's graph would do, here or on a described cluster, and what bounds it."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import crossfade
from crossfade.api import CompiledGraph
from crossfade.api.elsewhere import init_elsewhere, plan_elsewhere
from crossfade.api.options import CompileOptions
from crossfade.cli.exits import UsersMistake, told
from crossfade.cli.garbage import uncollected
from crossfade.cli.shown import print_bounds
from crossfade.cli.target import call_target, describe, read_cluster, read_figures
from crossfade.errors import ActorStartError, GraphError
from crossfade.graph.nodes import MultiOutputNode, Node
from crossfade.plan.picture import draw_timelines
from crossfade.plan.plan import Plan
from crossfade.plan.text import ring_bytes
from crossfade.schedule.bounds import predict_bounds
from crossfade.schedule.cost import CostModel
from crossfade.schedule.simulate import simulate
from crossfade.schedule.workload import Workload
from crossfade.topology import Topology, load_topology

MOST_ACTIONS_SHOWN = 500
"""Plans with more actions are not printed."""


@uncollected()
def show_plan(
    target: str,
    *,
    max_inflight: int,
    overlap: bool,
    svg: Path | None,
    topology: Path | None = None,
    workload: Path | None = None,
    costs: Path | None = None,
    is_json: bool = False,
) -> None:
    """Prints the plan of the graph that ``module:function`` returns, and what the simulator expects of it: see `main.plan`."""
    if svg is not None and not svg.name.lower().endswith(".svg"):
        raise UsersMistake(f"the picture is an SVG, not what {svg} is named for", hint="name a file that ends in .svg")
    cluster = None if topology is None else read_cluster(topology)
    model = CostModel() if costs is None else read_figures(CostModel, costs)
    given = None if workload is None else read_figures(Workload, workload)
    options = CompileOptions(max_inflight=max_inflight, overlap=overlap)
    # what the user's code prints is no part of the JSON
    printing = partial(redirect_stdout, sys.stderr) if is_json else nullcontext
    if cluster is not None:
        init_elsewhere(cluster)  # before the user's module is imported: it may start actors
        with printing():
            node, work = load_graph(target)
        try:
            plan = plan_elsewhere(node, cluster, options)
        except GraphError as error:
            raise UsersMistake.of(error, f"the graph of {target} cannot be compiled: ") from None
        model = replace(model, topology=cluster)
        _predict(target, plan, given or work, model, svg, is_json=is_json, cluster=cluster)
        return
    crossfade.init(engine="inline")
    if costs is None:
        model = replace(model, topology=load_topology() or Topology())
    with printing():
        node, work = load_graph(target)
        compiled = _compile(node, target, options)
    with compiled as graph:
        _predict(target, graph.plan, given or work, model, svg, is_json=is_json)


def _predict(
    target: str,
    plan: Plan,
    work: Workload | None,
    costs: CostModel,
    svg: Path | None,
    *,
    is_json: bool,
    cluster: Topology | None = None,
) -> None:
    workload = work or Workload()
    try:
        workload.check_names(plan)
    except ValueError as error:
        raise UsersMistake.of(error) from None
    one, bounds = predict_bounds(plan, workload, costs)
    num_actions = sum(map(len, plan.programs.values()))
    if is_json:
        counts = {"num_calls": len(plan.nodes), "num_actors": len(plan.programs) - 1, "num_actions": num_actions}
        print(json.dumps({**counts, **bounds.to_data(), "notes": one.notes}, indent=1))
    else:
        if num_actions <= MOST_ACTIONS_SHOWN:
            print(plan, end="\n\n")
        print(_counted(plan, cluster))
        num_bytes = sum(map(ring_bytes, plan.channels))
        print(f"rings take at least {num_bytes:,} bytes; larger values make larger slots when they come")
        assumed = "" if work else ", with methods that take no time and small values"
        print(f"predicted: {one.makespan_us:.1f} us for one execution{assumed}")
        if cluster is not None or work:
            print_bounds(bounds)
        for note in one.notes:
            print(f"note: {note}")
    if svg is not None:
        shown = simulate(plan, workload, costs, num_executions=min(plan.max_inflight, 3))
        title = target if work else f"{target}: methods take no time"
        with told(f"cannot write {svg}", hint="name a file in a folder that exists"):
            svg.write_text(draw_timelines([shown], title), encoding="utf-8")
        if not is_json:
            print(f"picture of the predicted timeline: {svg}")


def _counted(plan: Plan, cluster: Topology | None) -> str:
    counts = [(len(plan.nodes), "method call"), (len(plan.programs) - 1, "actor"), (len(plan.channels), "channel")]
    calls, actors, channels = (f"{number:,} {name}{'' if number == 1 else 's'}" for number, name in counts)
    text = f"{calls} on {actors}, {channels}"
    if cluster is not None:
        used, gpus = set(plan.hosts.values()), {gpu for each in plan.devices.values() for gpu in each}
        text += (
            f"; {len(used)} of {len(cluster.cluster.hosts)} hosts and {len(gpus)} of {len(cluster.cluster.of_gpu)} GPUs"
        )
    return text


def load_graph(target: str) -> tuple[Node | MultiOutputNode, Workload | None]:
    """Imports the module of ``module:function``, from the current directory too, and calls the function, which gives a node, or a
    node and a workload.
    """
    made = call_target(target, example="my_package.my_module:make_graph", returns="a node")
    is_pair = isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], Workload)
    node, workload = made if is_pair else (made, None)
    if isinstance(node, Node | MultiOutputNode):
        return node, workload
    raise UsersMistake(f"{target}() returned {describe(made)}, which is no node of a graph", hint=_hint_for(made))


def _compile(node: Node | MultiOutputNode, target: str, options: CompileOptions) -> CompiledGraph:
    try:
        graph: CompiledGraph = node.compile(max_inflight=options.max_inflight, overlap=options.overlap)
    except GraphError as error:
        raise UsersMistake.of(error, f"the graph of {target} cannot be compiled: ") from None
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
