"""Graphs that are torn down or dropped while something is under way, and time limits that never pass."""

from __future__ import annotations

import gc
import io
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.api import session as sessions
from tests.helpers.doers import Actor, graph_of
from tests.helpers.ended import await_no_process
from tests.helpers.sessions import NUMPY, opened

local = opened(preload=NUMPY)

pytestmark = pytest.mark.timeout(90)


def test_teardown_says_what_it_waits_for(local: None, pipe: Path) -> None:
    actor = Actor.options(name="first").remote()
    graph = graph_of(actor, "read")
    ref = graph.execute(str(pipe))
    with pytest.raises(crossfade.TeardownTimeout, match=r"first runs first.read \(node n0\)"):
        _teardown_once_running(graph)
    end(graph, ref, actor, pipe)


def end(graph: crossfade.CompiledGraph, ref: Any, actor: Any, pipe: Path) -> None:
    """The graph is torn down, and the method that it waits for comes to its end."""
    with pytest.raises(crossfade.SessionError, match="torn down"):
        ref.get()
    pipe.write_text("done")
    graph.teardown(timeout=20)
    assert actor.echo.remote(1).get() == 1


def _teardown_once_running(graph: crossfade.CompiledGraph) -> None:
    """The method has begun when somebody can open the other end of the pipe; here the dump tells."""
    await_method("first.read")
    graph.teardown(timeout=0.05)


def await_method(name: str) -> None:
    for _ in range(1000):
        if f"runs {name}" in crossfade.dump(io.StringIO(), stacks=False):
            break


def test_teardown_ends_a_busy_actor_on_request(local: None, pipe: Path) -> None:
    actor, other = Actor.remote(), Actor.remote()
    pid = actor.pid.remote().get()
    graph = graph_of(actor, "read")
    graph.execute(str(pipe))
    graph.teardown(kill_actors=True, timeout=0.05)
    await_no_process(pid, 1.0)
    with pytest.raises(crossfade.ActorDiedError):
        actor.echo.remote(1).get()
    assert other.echo.remote(1).get() == 1


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_with_block_does_not_wait_for_a_method(
    local: None, pipe: Path, kind: type[BaseException]
) -> None:
    actor = Actor.options(name="first").remote()
    graph = graph_of(actor, "read")
    ref = graph.execute(str(pipe))
    await_method("first.read")
    with pytest.raises(kind, match="seen") as seen, graph:
        raise kind("seen")
    assert "first runs first.read (node n0)" in "".join(seen.value.__notes__)
    end(graph, ref, actor, pipe)


def test_a_with_block_without_an_error_waits_for_a_method(local: None, pipe: Path) -> None:
    actor = Actor.options(name="first").remote()
    writer = threading.Timer(0.1, pipe.write_text, ["done"])
    with graph_of(actor, "read") as graph:
        graph.execute(str(pipe))
        await_method("first.read")
        writer.start()
    writer.join()
    assert actor.echo.remote(1).get() == 1


def test_teardown_frees_a_thread_that_waits_for_a_result(local: None, pipe: Path) -> None:
    actor = Actor.remote()
    graph = graph_of(actor, "read", max_inflight=1)
    ref = graph.execute(str(pipe))
    errors: list[BaseException] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        try:
            ref.get()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    with pytest.raises(crossfade.TeardownTimeout):
        graph.teardown(timeout=0.2)
    thread.join(10)
    assert isinstance(errors[0], crossfade.SessionError)
    pipe.write_text("")
    graph.teardown()


def test_a_graph_that_was_dropped_is_taken_from_its_actors_at_the_next_compile(local: None) -> None:
    actor = Actor.remote()
    for number in range(5):
        assert graph_of(actor, "echo").execute(number).get() == number
        gc.collect()
    graph = graph_of(actor, "echo")
    assert graph.execute(0).get() == 0  # the actor has seen all messages before that
    assert "1 graph," in crossfade.dump(io.StringIO(), stacks=False)
    engine: Any = graph._session.engine
    engine.doorbell.pump()
    assert len(engine._plans) == 1


def test_results_come_when_the_graph_was_dropped_before_them(local: None) -> None:
    actor = Actor.remote()

    def start(size: int) -> Any:
        return graph_of(actor, "array").execute(size)  # nobody has the graph any more

    sizes = [80_000, 10, 3_000_000, 0]
    refs = [start(size) for size in sizes]
    gc.collect()
    engine: Any = sessions.require().engine
    assert [len(ref.get(timeout=30)) for ref in refs] == sizes
    assert len(refs[0].get()) == sizes[0]
    graph_of(actor, "echo").teardown()
    assert not engine._plans, "their values are there, so nothing keeps the plans open"


def test_a_reference_without_its_graph_is_shown_and_ends_with_the_session(local: None) -> None:
    ref = graph_of(Actor.remote(), "echo").execute(1)
    gc.collect()
    assert "graph 0, open, 1 in flight: execution 0" in crossfade.dump(io.StringIO(), stacks=False)
    crossfade.shutdown()
    with pytest.raises(crossfade.SessionError, match="the session was shut down"):
        ref.get()
    crossfade.init()


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, sys.maxsize, 3e6])
def test_a_very_long_time_limit_is_one(local: None, pipe: Path, timeout: float) -> None:
    actor = Actor.remote()
    graph = graph_of(actor, "read", submit_timeout=timeout)
    ref = graph.execute(str(pipe))
    results: list[Any] = []
    waits = [
        threading.Thread(target=lambda: results.append(ref.get(timeout=timeout))),
        threading.Thread(target=lambda: results.append(crossfade.get(ref, timeout=timeout))),
        threading.Thread(target=lambda: results.append(crossfade.wait([ref], timeout=timeout)[0][0].get())),
    ]
    for each in waits:
        each.start()
    called = actor.echo.remote("called")
    pipe.write_text("so")
    assert called.get(timeout=timeout) == "called"
    for each in waits:
        each.join(30)
    assert results == ["so"] * 3
    graph.teardown(timeout=timeout)


def test_a_teardown_takes_the_time_limits_of_a_get(local: None, pipe: Path) -> None:
    actor = Actor.remote()
    graph = graph_of(actor, "read")
    graph.execute(str(pipe))
    with pytest.raises(ValueError, match=r"timeout is -2\nhint: "):
        graph.teardown(timeout=-2)
    threading.Timer(0.2, pipe.write_text, ["so"]).start()
    graph.teardown(timeout=-1)  # for ever, as in Ray
    assert actor.echo.remote(1).get() == 1
