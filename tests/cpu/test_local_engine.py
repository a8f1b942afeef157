"""Executions on actors that are processes, and in one thread: refs, room, errors, values, several graphs, what is recorded."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfade
from tests.helpers import doers
from tests.helpers.doers import graph_of
from tests.helpers.kept_actors import ENGINES, crew_of, kept_crews


class Doer(doers.Doer):
    def __init__(self, greeting: str = "hello") -> None:
        self._greeting = greeting
        self._thread = threading.get_ident()

    def greet(self, name: str) -> str:
        return f"{self._greeting} {name}"

    def add(self, a: Any, b: Any = 0) -> Any:
        return a + b

    @crossfade.method(num_returns=2)
    def halves(self, values: list[Any]) -> tuple[list[Any], list[Any]]:
        middle = len(values) // 2
        return values[:middle], values[middle:]

    def fail(self, value: Any) -> Any:
        raise FileNotFoundError(2, "no such thing", str(value))

    def generator(self, value: Any) -> Any:
        return (item for item in (value,))

    def on_constructor_thread(self, _: Any) -> bool:
        return threading.get_ident() == self._thread and threading.current_thread() is threading.main_thread()


Actor = crossfade.remote(Doer)


kept = kept_crews(ENGINES, lambda: (Actor.remote("good day"), Actor.remote()))
actors = crew_of(*ENGINES)
"""Two actors, on each engine in turn."""
processes = crew_of("local")
"""Two actors that are processes."""


def test_ordinary_calls(actors: Any) -> None:
    actor = actors[0]
    assert crossfade.get(actor.greet.remote("you")) == "good day you"
    assert crossfade.get(actor.halves.remote([1, 2, 3])) == [[1], [2, 3]]
    assert crossfade.get(actor.add.remote(actor.add.remote(1, 2), b=4)) == 7
    ref = actor.fail.remote(1)
    for _ in range(2):
        with pytest.raises(FileNotFoundError) as caught:
            ref.get()
        assert isinstance(caught.value, crossfade.TaskError)
        assert caught.value.errno == 2


def test_methods_run_on_the_main_thread(processes: Any) -> None:
    actor = processes[0]
    with graph_of(actor, "on_constructor_thread") as graph:
        assert graph.execute(0).get() is True
    assert actor.on_constructor_thread.remote(0).get() is True


def test_refs_in_any_order_and_more_than_once(actors: Any) -> None:
    with graph_of(actors[0], "echo", max_inflight=5) as graph:
        refs = [graph.execute(number) for number in range(5)]
        assert [ref.get() for ref in reversed(refs)] == [4, 3, 2, 1, 0]
        assert crossfade.get(refs) == [0, 1, 2, 3, 4]
    assert crossfade.get(refs) == [0, 1, 2, 3, 4]  # what was got outlives the graph


def test_capacity(actors: Any) -> None:
    with graph_of(actors[0], "echo", max_inflight=2) as graph:
        refs = [graph.execute(0), graph.execute(1)]
        with pytest.raises(crossfade.CapacityExceeded, match="max_inflight is 2"):
            graph.execute(2)
        assert refs[0].get() == 0
        assert graph.execute(3).get() == 3
        for number in range(20):
            graph.execute(number)  # dropped: makes room by itself
        assert graph.execute("end").get() == "end"


def test_a_get_that_timed_out_may_be_repeated(processes: Any, pipe: Path) -> None:
    with graph_of(processes[0], "read") as graph:
        ref = graph.execute(str(pipe))
        for _ in range(2):
            with pytest.raises(crossfade.GetTimeoutError):
                ref.get(timeout=0.05)
        pipe.write_text("done")
        assert ref.get(timeout=30) == "done"


def test_submit_timeout(processes: Any, pipe: Path) -> None:
    with graph_of(processes[0], "read", max_inflight=1, submit_timeout=0.05) as graph:
        graph.execute(str(pipe))
        with pytest.raises(crossfade.ChannelTimeout, match=r"0\.05 s"):
            graph.execute(str(pipe))
        pipe.write_text("done")


def test_an_exception_reaches_what_depends_on_it_and_the_graph_goes_on(actors: Any) -> None:
    a, b = actors
    with crossfade.InputNode() as inp:
        bad = b.echo.bind(a.fail.bind(inp))
        good = b.add.bind(inp, b=[inp])
        dag = crossfade.MultiOutputNode([bad, good, a.echo.bind(inp)])
    with dag.compile() as graph:
        for _ in range(3):
            refs = graph.execute([1])
            with pytest.raises(FileNotFoundError) as caught:
                refs[0].get()
            assert isinstance(caught.value, crossfade.TaskError)
            assert "in fail" in caught.value.remote_traceback
            assert "fail" in caught.value.node
            assert crossfade.get(refs[1:]) == [[1, [1]], [1]]


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_node(actors: Any) -> None:
    a, b = actors
    with b.echo.bind(a.generator.bind(crossfade.InputNode())).compile() as graph:
        for number in (1, 2):
            with pytest.raises(TypeError, match=r"generator(.|\n)*hint: .*make a list") as caught:
                graph.execute(number).get()
            assert ".generator (node n0), pickling what it returned" in caught.value.node  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"^\w+\.generator, pickling what it returned,(.|\n)*hint: .*make a list"):
        a.generator.remote(1).get()


def test_an_argument_that_cannot_be_pickled_is_refused(actors: Any) -> None:
    actor = actors[0]
    with crossfade.InputNode() as inp:
        dag = actor.add.bind(inp.a, b=inp.b)
    with dag.compile() as graph:
        for bad in ({"a": (n for n in range(0)), "b": 1}, {"a": 1, "b": (n for n in range(0))}):
            with pytest.raises(TypeError, match="generator"):
                graph.execute(**bad)
            assert graph.execute(a=1, b=2).get() == 3


def test_arrays_arrive_as_read_only_views_and_may_be_kept(processes: Any) -> None:
    with graph_of(processes[0], "echo", max_inflight=2) as graph:
        kept = [graph.execute(np.full(100_000, number)).get() for number in range(12)]
        for number, array in enumerate(kept):
            assert not array.flags.writeable
            assert (array == number).all()


def test_several_graphs_share_actors_and_one_graph_compiles_again(actors: Any) -> None:
    a, b = actors
    there = b.add.bind(a.echo.bind(crossfade.InputNode()), b=1)
    back = a.add.bind(b.echo.bind(crossfade.InputNode()), b=2)
    graphs = [there.compile(), back.compile(), there.compile(max_inflight=1)]
    for number in range(20):
        refs = [graph.execute(number) for graph in graphs]
        assert crossfade.get(refs) == [number + 1, number + 2, number + 1]
        assert a.echo.remote(number).get() == number
    for graph in graphs:
        graph.teardown()
        graph.teardown()
    assert there.compile().execute(1).get() == 2


def test_a_graph_without_input(actors: Any) -> None:
    a, b = actors
    with b.add.bind(a.add.bind(1, 2), b=3).compile() as graph:
        assert [graph.execute().get() for _ in range(3)] == [6, 6, 6]
        with pytest.raises(TypeError, match="no arguments"):
            graph.execute(1)


def test_a_time_limit_that_is_no_number_is_refused(actors: Any) -> None:
    first, _ = actors[:2]
    graph = first.echo.bind(crossfade.InputNode()).compile()
    ref = graph.execute(5)
    waits: list[Any] = [partial(crossfade.get, ref), first.echo.remote(1).get, graph.teardown]
    for wait in waits:
        with pytest.raises(TypeError, match="timeout is '1'\nhint: it is seconds"):
            wait(timeout="1")
    assert ref.get(timeout=30) == 5
    graph.teardown()


def test_the_timeline_has_every_action(actors: Any) -> None:
    a, b = actors
    with b.add.bind(a.echo.bind(crossfade.InputNode()), b=1).compile(record=True) as graph:
        for number in range(5):
            assert graph.execute(number).get() == number + 1
        timeline = graph.timeline()
    assert graph.timeline() == timeline  # also after teardown
    done = {(span.actor, span.label, span.execution) for span in timeline.spans if span.kind != "wait"}
    for party, actions in graph.plan.programs.items():
        for action in actions:
            if party != "driver" or action.verb != "free":
                for execution in range(5):
                    assert (party, str(action), execution) in done
    with graph_of(a, "echo") as silent, pytest.raises(crossfade.GraphError, match="record=True"):
        silent.timeline()


def test_a_method_that_an_error_passes_by_has_not_computed(actors: Any) -> None:
    a, b = actors
    with b.add.bind(a.fail.bind(crossfade.InputNode()), b=1).compile(record=True) as graph:
        with pytest.raises(FileNotFoundError):
            graph.execute(0).get()
        computed = [span.what for span in graph.timeline().spans if span.kind == "compute" and "run" in span.label]
    assert [what.split(".")[1] for what in computed] == ["fail"]


def test_statistics(actors: Any) -> None:
    actor = actors[0]
    with graph_of(actor, "echo") as graph:
        refs = [graph.execute(number) for number in range(3)]
        crossfade.get(refs)
        statistics = graph.statistics()
    assert (statistics.num_submitted, statistics.num_finished, statistics.num_inflight) == (3, 3, 0)
    (name,) = set(statistics.actors) - {"driver"}
    assert statistics.actors[name].num_rounds == 3
    assert statistics.actors["driver"].channels["write i0"]["num_values"] == 3
