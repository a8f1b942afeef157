"""What is wrong about a program is a ValueError or a TypeError where it was written, as in Ray."""

from __future__ import annotations

import pickle
import string
from typing import Any

import pytest

import crossfade
from crossfade.collective import allreduce
from crossfade.exceptions import RayError
from tests.helpers.sessions import NUMPY, on_each_engine

engine = on_each_engine(preload=NUMPY)

pytestmark = pytest.mark.timeout(60)


class Worker:
    def __init__(self, scale: int = 1) -> None:
        self.scale = scale

    def add(self, x: Any, y: Any = 0) -> Any:
        return self.scale * (x + y)

    def name(self) -> str:
        return "worker"


Remote: Any = crossfade.remote(Worker)


def test_mistakes_in_a_graph_are_value_errors(engine: str) -> None:
    a, b = Remote.remote(), Remote.remote()
    inp, again = crossfade.InputNode(), crossfade.InputNode()
    node, asked, idle = a.add.bind(inp), a.add.bind(again.x), again.y
    for wrong in (
        lambda: asked.compile(),
        lambda: b.add.bind(node, a.add.bind(crossfade.InputNode())).compile(),
        lambda: crossfade.MultiOutputNode([]).compile(),
        lambda: crossfade.MultiOutputNode([node, inp]).compile(),
        lambda: crossfade.MultiOutputNode([3]).compile(),  # type: ignore[list-item]
        lambda: inp.compile(),
        lambda: b.add.bind({node}),
        lambda: allreduce.bind([node, a.add.bind(1)]),
        lambda: allreduce.bind([node, inp]),
        lambda: allreduce.bind([node, b.add.bind(1)], op="som"),
        lambda: allreduce.bind([node, b.add.bind(1)], transport="sham"),
        lambda: b.add.bind(node).with_tensor_transport("sham").compile(),
    ):
        with pytest.raises(ValueError, match="hint: "):
            wrong()
    assert idle is again.y
    with pytest.raises(crossfade.GraphError) as caught:
        crossfade.MultiOutputNode([node, inp]).compile()
    assert isinstance(caught.value, RayError)
    copied = pickle.loads(pickle.dumps(caught.value))
    assert (type(copied), str(copied), copied.hint) == (crossfade.GraphError, str(caught.value), caught.value.hint)
    with node.compile() as graph:
        assert graph.execute(3).get() == 3


def test_what_is_no_reference_cannot_be_got() -> None:
    rays: Any = type("ObjectRef", (), {"__module__": "ray._raylet"})()
    for refs, hint in ((rays, "ray.get"), ([rays], "ray.get"), (3, "pass a reference"), ({}, "pass a reference")):
        with pytest.raises(TypeError, match=rf"^cannot get .*\nhint: {hint}"):
            crossfade.get(refs)


def test_a_graph_error_from_a_method_is_all_that_it_was(engine: str) -> None:
    class Compiler:
        def compile(self) -> None:
            raise crossfade.UnknownTransport("no such thing", hint="take another")

    compiler: Any = crossfade.remote(Compiler).remote()
    for kind in (ValueError, crossfade.GraphError, crossfade.TaskError):
        with pytest.raises(kind, match="no such thing"):
            crossfade.get(compiler.compile.remote())


def test_arguments_that_do_not_fit_are_refused_at_once(engine: str) -> None:
    worker: Any = Remote.options(name="known").remote(2)
    inp = crossfade.InputNode()
    for handle in (worker, crossfade.get_actor("known")):
        for put in (handle.add.bind, handle.add.remote, handle.add.options(num_returns=2).bind):
            for args, kwargs in (((), {}), ((1, 2, 3), {}), ((1,), {"z": 2}), ((1,), {"x": 2})):
                with pytest.raises(TypeError, match=r"(?s)fit known\.add: .*\nhint: it is known\.add\(x, y=0\)"):
                    put(*args, **kwargs)
        with pytest.raises(TypeError, match="too many positional arguments"):
            handle.name.bind(inp)
        assert crossfade.get(handle.add.remote(crossfade.put(3), y=4)) == 14
    with worker.add.bind(inp, y=inp).compile() as graph:
        assert graph.execute(3).get() == 12


def test_arguments_that_do_not_fit_a_constructor_are_refused_and_nothing_is_booked() -> None:
    crossfade.init(num_cpus=1, engine="inline")
    try:
        for args, kwargs in (((1, 2), {}), ((), {"skale": 3})):
            with pytest.raises(TypeError, match=r"hint: it is Worker\(scale=1\)"):
                Remote.options(num_cpus=1).remote(*args, **kwargs)
        assert crossfade.get(Remote.options(num_cpus=1).remote(scale=3).add.remote(2)) == 6
    finally:
        crossfade.shutdown()


def test_a_call_that_nothing_reads_is_not_left_out_in_silence(engine: str) -> None:
    a, b = Remote.remote(), Remote.remote()
    with crossfade.InputNode() as inp:
        b.add.bind(inp, 5)
        node = a.add.bind(inp)
    with pytest.raises(ValueError, match=r"nothing uses Worker1\.add\(inp, 5\).*\n.*MultiOutputNode") as caught:
        node.compile()
    assert isinstance(caught.value, crossfade.GraphError)
    with crossfade.MultiOutputNode([node, b.add.bind(inp, 5)]).compile() as graph:
        assert crossfade.get(graph.execute(1)) == [1, 6]


def test_graphs_that_are_over_and_dropped_leave_nothing(engine: str) -> None:
    a, b = Remote.remote(), Remote.remote()
    inp = crossfade.InputNode()
    middle = a.add.bind(inp)
    for offset in range(3):
        with b.add.bind(middle, offset).compile() as graph:
            assert graph.execute(1).get() == 1 + offset
        del graph
        with pytest.raises(ValueError, match="max_inflight"):
            b.add.bind(middle, offset).compile(max_inflight=0)
    with a.add.bind(inp, 1).compile() as graph:
        assert graph.execute(1).get() == 2


def test_every_compiled_graph_has_an_id(engine: str) -> None:
    worker = Remote.remote()
    node = worker.add.bind(crossfade.InputNode())
    with node.compile() as first, node.compile() as second:
        ids = [first.get_id(), first.get_id(), second.get_id()]
        assert ids[0] == ids[1] != ids[2]
        assert all(isinstance(each, str) and set(each) <= set(string.hexdigits) for each in ids)
    assert first.get_id() == ids[0]


def test_teardown_with_kill_actors_ends_idle_actors_too(engine: str) -> None:
    a, b, outside = Remote.remote(), Remote.remote(), Remote.remote()
    graph = b.add.bind(a.add.bind(crossfade.InputNode())).compile()
    assert graph.execute(1).get() == 1
    graph.teardown(kill_actors=True)
    for actor in (a, b):
        with pytest.raises(crossfade.ActorDiedError):
            crossfade.get(actor.name.remote())
    assert crossfade.get(outside.name.remote()) == "worker"
