"""Ray's import paths, and what is said about names that are not at them."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

import pytest

import crossfade
from crossfade import exceptions
from crossfade.api.options import CompileOptions
from crossfade.dag.context import DAGContext
from crossfade.not_here import _NAMES
from crossfade.util.scheduling_strategies import (
    Exists,
    In,
    NodeAffinitySchedulingStrategy,
    NodeLabelSchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)
from tests.helpers.sessions import opened

MODULES = sorted(_NAMES)
SOURCE = Path(crossfade.__file__).parent
FACADES = ("actor", "collective", "dag", "exceptions", "experimental", "util")


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("dag", "InputNode MultiOutputNode DAGNode ClassMethodNode InputAttributeNode DAGContext"),
        ("dag.input_node", "InputNode InputAttributeNode"),
        ("dag.output_node", "MultiOutputNode"),
        ("dag.compiled_dag_node", "CompiledDAG"),
        ("dag.context", "DAGContext"),
        ("exceptions", "RayError RaySystemError RayTaskError RayChannelError"),
        ("util.scheduling_strategies", "PlacementGroupSchedulingStrategy NodeAffinitySchedulingStrategy"),
        ("experimental.channel", "Communicator CPUCommunicator TorchTensorType"),
        ("experimental.channel.communicator", "Communicator"),
        ("experimental.channel.cpu_communicator", "CPUCommunicator"),
    ],
)
def test_a_name_is_where_ray_has_it(module: str, names: str) -> None:
    found = import_module(f"crossfade.{module}")
    assert all(getattr(found, name) for name in names.split())


def test_packages_have_their_modules_as_attributes() -> None:
    assert crossfade.dag.context.DAGContext is DAGContext
    assert crossfade.util.scheduling_strategies.In is In


def test_every_module_at_rays_import_paths_refuses_other_names() -> None:
    files = [SOURCE / f"{name}.py" for name in FACADES if (SOURCE / f"{name}.py").exists()]
    files += [path for name in FACADES for path in (SOURCE / name).rglob("*.py")]
    paths = [path.relative_to(SOURCE.parent).with_suffix("").parts for path in files]
    modules = {".".join(parts).removesuffix(".__init__") for parts in paths}
    assert modules | {"crossfade"} == set(MODULES)


@pytest.mark.parametrize("module", MODULES)
def test_an_unknown_name_gets_a_hint_however_it_is_asked_for(module: str) -> None:
    found = import_module(module)
    with pytest.raises(AttributeError, match=f"^module '{module}' has no attribute 'no_such_name'\nhint: ."):
        found.no_such_name  # noqa: B018
    for statement in (f"from {module} import no_such_name", f"import {module}.no_such_name"):
        with pytest.raises(ImportError, match=f"^module '{module}' has no attribute 'no_such_name'\nhint: ."):
            exec(statement)
    assert not hasattr(found, "no_such_name")
    assert not hasattr(found, "__no_such_name__")


@pytest.mark.parametrize("module", MODULES)
def test_a_name_that_only_ray_has_says_what_to_do_instead(module: str) -> None:
    for name, hint in _NAMES[module].items():
        with pytest.raises(ImportError) as caught:
            exec(f"from {module} import {name}")
        assert str(caught.value) == f"module {module!r} has no attribute {name!r}\nhint: {hint}"
        assert name not in getattr(import_module(module), "__all__", ())


@pytest.mark.parametrize(
    ("statement", "hint"),
    [
        ("from crossfade.exceptions import RayTaskEror", "did you mean 'RayTaskError'?"),
        ("import crossfade.util.collective", "crossfade.collective"),
        ("from crossfade.util.placement_group import placement_group", "leave it out"),
        ("import crossfade.experimental.internal_kv", "constructors"),
        ("from crossfade.dag import FunctionNode", "a method of an actor's class"),
        ("from crossfade import get_runtime_context", "os.getpid()"),
    ],
)
def test_what_an_import_says(statement: str, hint: str) -> None:
    with pytest.raises(ImportError, match="\nhint: ") as caught:
        exec(statement)
    assert hint in str(caught.value)


def test_imports_of_others_are_python_s_own_business() -> None:
    for name in ("no_such_package", "json.no_such_module", "crossfade.graph.no_such_module"):
        with pytest.raises(ModuleNotFoundError) as caught:
            import_module(name)
        assert str(caught.value) == f"No module named {name!r}"
    assert sys.meta_path[-1].find_spec("no_such_package", None) is None


def test_ray_system_error_catches_what_it_does_in_ray() -> None:
    caught = (
        exceptions.RayChannelError,
        exceptions.RayChannelTimeoutError,
        exceptions.RayCgraphCapacityExceeded,
        exceptions.SessionError,
    )
    assert all(issubclass(each, exceptions.RaySystemError) for each in caught)
    others = (exceptions.RayTaskError, exceptions.RayActorError, exceptions.GraphError)
    assert not any(issubclass(each, exceptions.RaySystemError) for each in others)


# Settings


@pytest.fixture
def context(monkeypatch: pytest.MonkeyPatch) -> DAGContext:
    monkeypatch.setattr(DAGContext, "_current", None)
    return DAGContext.get_current()


def test_the_context_begins_with_this_library_s_own_defaults(
    context: DAGContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_CGRAPH_submit_timeout", "3")
    assert CompileOptions.of({}) == CompileOptions()
    assert context is DAGContext.get_current()
    assert context == DAGContext()
    assert (context.submit_timeout, context.get_timeout, context.teardown_timeout) == (None, None, None)


def test_what_is_set_in_the_context_counts_where_an_option_is_left_out(context: DAGContext) -> None:
    context.submit_timeout, context.max_inflight_executions = 3, 5
    context.buffer_size_bytes, context.overlap_gpu_communication = 500, False
    chosen = CompileOptions.of({"_max_inflight_executions": 7})
    assert chosen == CompileOptions(submit_timeout=3, max_inflight=7, buffer_bytes=500, overlap=False)
    assert CompileOptions.of({"submit_timeout": None}).submit_timeout is None
    context.submit_timeout = -1
    assert CompileOptions.of({}).submit_timeout is None
    context.get_timeout = context.teardown_timeout = context.read_iteration_timeout = context.max_buffered_results = 1
    context.max_inflight_executions = 0
    with pytest.raises(ValueError, match="max_inflight is 0\nhint: "):
        CompileOptions.of({})


inline = opened(engine="inline")


@pytest.mark.usefixtures("inline")
def test_scheduling_strategies_are_accepted_and_decide_nothing() -> None:
    class Worker:
        def one(self) -> int:
            return 1

    strategies = (
        PlacementGroupSchedulingStrategy(None, placement_group_bundle_index=0),
        NodeAffinitySchedulingStrategy(node_id="ab" * 28, soft=False),
        NodeLabelSchedulingStrategy({"region": In("us")}, soft={"gpu": Exists()}),
        "SPREAD",
    )
    for strategy in strategies:
        actor = crossfade.remote(Worker).options(scheduling_strategy=strategy).remote()
        assert crossfade.get(actor.one.remote()) == 1
