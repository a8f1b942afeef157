"""``crossfade plan``: what every actor of a user's graph would do."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import crossfade
from crossfade.api import CompiledGraph
from crossfade.cli.exits import UsersMistake, told
from crossfade.errors import ActorStartError, GraphError, MissingDependency
from crossfade.graph.nodes import MultiOutputNode, Node
from crossfade.plan.picture import draw_timelines
from crossfade.plan.text import ring_bytes
from crossfade.schedule.cost import CostModel
from crossfade.topology import Topology, load_topology

__all__ = ["load_graph", "show_plan"]

MISSING_HINT = "install what is missing into the environment of this command"


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
    module_name, colon, function_name = target.partition(":")
    if not colon or not module_name or not function_name:
        raise UsersMistake(
            f"{target!r} is not of the form MODULE:FUNCTION", hint="for example my_package.my_module:make_graph"
        )
    if "/" in module_name or module_name.endswith(".py"):
        dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
        raise UsersMistake(f"{module_name!r} is a file, not a module", hint=f"write {dotted}:{function_name}")
    function = _find_function(_import(module_name), module_name, function_name)
    with _users_code(f"{target}()"):
        made = function()
    if isinstance(made, Node | MultiOutputNode):
        return made
    if inspect.iscoroutine(made):
        made.close()  # or Python says that nobody awaited it
        raise UsersMistake(
            f"{target} is an async function, which is not awaited here",
            hint="name a plain function that returns a node",
        )
    raise UsersMistake(f"{target}() returned {_describe(made)}, which is no node of a graph", hint=_hint_for(made))


def _import(name: str) -> Any:
    with told("the current folder cannot be found", hint="run the command in a folder that exists"):
        sys.path.insert(0, str(Path.cwd()))
    importlib.invalidate_caches()
    try:
        with _users_code(f"importing {name}", is_import=True):
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise UsersMistake(
                f"there is no module {error.name!r}",
                hint="run the command in the folder that holds it, or install its package",
            ) from None
        raise UsersMistake(f"importing {name} failed: {error}", hint=MISSING_HINT) from None


def _find_function(module: Any, module_name: str, name: str) -> Callable[[], Any]:
    function = getattr(module, name, None)
    if function is None:
        own = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module_name
        ]
        raise UsersMistake(
            f"module {module_name} has no {name!r}", hint=f"its functions are {', '.join(own) or '(none)'}"
        )
    if not callable(function):
        raise UsersMistake(
            f"{module_name}:{name} is {_describe(function)}, and cannot be called",
            hint="name a function that returns a node",
        )
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise UsersMistake(
            f"{module_name}:{name} needs arguments: {error}", hint="name a function that takes none"
        ) from None
    except ValueError:
        pass  # written in C, without a signature
    return function  # type: ignore[no-any-return]


@contextmanager
def _users_code(what: str, *, is_import: bool = False) -> Iterator[None]:
    """Around code of the user's: what it raises is told in one line, with the place.

    A module that an import does not find is left to the import's caller.
    """
    try:
        yield
    except (MissingDependency, UsersMistake):
        raise
    except (Exception, SystemExit) as error:
        is_missing = isinstance(error, ModuleNotFoundError)
        if is_missing and is_import:
            raise
        name = type(error).__name__
        message, _, hint = str(error).partition("\nhint: ")
        if isinstance(error, crossfade.SessionError) and "initialised already" in message:
            hint = "this command has called crossfade.init() already: leave it to the program's main part"
        if not hint and is_missing:
            hint = MISSING_HINT
        raise UsersMistake(
            f"{what} raised {name}: {message}{_place(error)}",
            hint=hint or "see whether the function works in a Python shell",
        ) from None


def _place(error: BaseException) -> str:
    """Where the user's code was, if it was the user's code that raised."""
    own = Path(crossfade.__file__).parent
    frames = [
        f
        for f in traceback.extract_tb(error.__traceback__)
        if not Path(f.filename).is_relative_to(own) and "importlib" not in f.filename
    ]
    if isinstance(error, SyntaxError) or not frames:
        return ""
    return f"\n  at {frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line}"


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


def _describe(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _hint_for(made: object) -> str:
    if isinstance(made, CompiledGraph):
        return "return the node itself, before .compile(): this command compiles it"
    if isinstance(made, tuple | list) and made and all(isinstance(each, Node) for each in made):
        return "return crossfade.MultiOutputNode([...]) of them"
    return "return what the last method.bind(...) returned, or a MultiOutputNode"
