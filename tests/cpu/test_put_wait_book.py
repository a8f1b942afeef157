"""put, wait, get_actor, and what actors book: on both engines where that makes sense."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.api import session as sessions
from crossfade.host.processes import await_end
from tests.helpers import doers
from tests.helpers.doers import graph_of
from tests.helpers.sessions import NUMPY, on_each_engine, opened


class Doer(doers.Doer):
    def is_read_only(self, array: Any) -> bool:
        return not array.flags.writeable


Actor = crossfade.remote(Doer)


class BadConstructor:
    def __init__(self) -> None:
        raise LookupError("nothing here")


engine = on_each_engine(num_cpus=2, num_gpus=1, resources={"license": 1}, preload=NUMPY)
local = opened(num_cpus=2, preload=NUMPY)


def test_what_was_put_comes_back_as_a_read_only_value_of_its_own(engine: str) -> None:
    array = np.arange(1000)
    ref = crossfade.put(array)
    array[0] = 7  # too late
    first, second = ref.get(), crossfade.get(ref)
    assert first[0] == 0
    assert not first.flags.writeable
    mutable = crossfade.put([1])
    mutable.get().append(2)
    assert mutable.get() == [1]
    assert first is not second


def test_a_put_value_is_an_argument_of_everything(engine: str) -> None:
    actor = Actor.remote()
    ref = crossfade.put(np.ones(1000))
    assert crossfade.get(actor.is_read_only.remote(ref)) is True
    graph = crossfade.MultiOutputNode([actor.echo.bind(ref), actor.echo.bind(crossfade.InputNode())]).compile()
    assert graph.execute(ref)[1].get().shape == (1000,)
    assert graph.execute(actor.echo.remote(2))[0].get().shape == (1000,)
    with crossfade.InputNode() as inp:
        parts = actor.echo.bind([inp.x, inp.y]).compile()
    assert parts.execute(x=crossfade.put(1), y=crossfade.put("two")).get() == [1, "two"]
    assert parts.execute(crossfade.put({"x": 3, "y": 4})).get() == [3, 4]


def test_a_reference_inside_a_value_is_refused_with_a_hint(engine: str) -> None:
    actor = Actor.remote()
    with pytest.raises(TypeError, match="make it an argument by itself"):
        actor.echo.remote([crossfade.put(1)])
    with pytest.raises(TypeError, match="a reference already"):
        crossfade.put(crossfade.put(1))


def test_wait_keeps_the_order_and_consumes_nothing(engine: str) -> None:
    actor = Actor.remote()
    with graph_of(actor, "echo") as graph:
        refs = [graph.execute(1), actor.echo.remote(2), crossfade.put(3), graph.execute(4)]
        ready, rest = crossfade.wait(refs, num_returns=4)
        assert ready == refs
        assert rest == []
        ready, rest = crossfade.wait(refs, num_returns=2, fetch_local=False)
        assert ready == refs[:2]
        assert rest == refs[2:]
        assert crossfade.get(refs) == [1, 2, 3, 4]


def test_errors_count_as_ready(engine: str) -> None:
    actor, doomed = Actor.remote(), Actor.remote()
    with graph_of(actor, "fail") as graph, graph_of(doomed, "echo") as dead:
        assert dead.execute(1).get() == 1
        refs = [graph.execute(1), actor.fail.remote(2)]
        assert crossfade.wait(refs, num_returns=2, timeout=30) == (refs, [])
        dying = dead.execute(1)
        crossfade.kill(doomed)
        assert crossfade.wait([dying], timeout=30) == ([dying], [])
        with pytest.raises(LookupError):
            refs[0].get()


def test_wait_gives_what_is_ready_when_the_time_is_over(local: None, pipe: Path) -> None:
    slow, quick = Actor.remote(), Actor.remote()
    with graph_of(slow, "read") as graph:
        refs = [graph.execute(str(pipe)), quick.echo.remote(2)]
        assert crossfade.wait(refs) == ([refs[1]], [refs[0]])
        assert crossfade.wait(refs, num_returns=2, timeout=0.05) == ([refs[1]], [refs[0]])
        assert crossfade.wait(refs[:1], timeout=0) == ([], refs[:1])
        pipe.write_text("now")
        assert crossfade.wait(refs, num_returns=2) == (refs, [])
        assert refs[0].get() == "now"


def test_waiting_takes_no_cpu(local: None, pipe: Path) -> None:
    slow, other = Actor.remote(), Actor.remote()
    with graph_of(slow, "read") as graph, graph_of(other, "echo") as second:
        assert second.execute(0).get() == 0
        refs = [graph.execute(str(pipe)), slow.echo.remote(1)]
        start = time.process_time()
        crossfade.wait(refs, timeout=1.0)
        assert time.process_time() - start < 0.2
        pipe.write_text("")


def _wait_for(ref: Any, found: list[Any]) -> None:
    found.append(crossfade.wait([ref]))


@pytest.mark.timeout(60)
def test_a_result_that_another_thread_takes_in_wakes_wait(local: None, tmp_path: Path) -> None:
    actor = Actor.remote()
    with graph_of(actor, "read") as graph:
        for number in range(20):
            pipe = tmp_path / str(number)
            os.mkfifo(pipe)
            ref = graph.execute(str(pipe))
            getters = [threading.Thread(target=ref.get, args=(30,)) for _ in range(2)]
            found: list[Any] = []
            waiters = [threading.Thread(target=_wait_for, args=(ref, found)) for _ in range(2)]
            threads = [getters[0], waiters[0], waiters[1], getters[1]]
            for thread in threads if number % 2 else reversed(threads):
                thread.start()
            pipe.write_text("x")
            for thread in threads:
                thread.join(20)
                assert not thread.is_alive()
            assert found == [([ref], [])] * 2


def test_a_teardown_wakes_wait(local: None, pipe: Path) -> None:
    actor = Actor.remote()
    graph = graph_of(actor, "read")
    ref = graph.execute(str(pipe))
    found: list[Any] = []
    waiter = threading.Thread(target=lambda: found.append(crossfade.wait([ref])))
    waiter.start()
    ender = threading.Thread(target=graph.teardown)
    ender.start()
    waiter.join(20)
    assert found == [([ref], [])]
    pipe.write_text("")
    ender.join(20)


def test_what_wait_refuses(engine: str) -> None:
    ref = crossfade.put(1)
    with pytest.raises(TypeError, match="a list of references"):
        crossfade.wait(ref)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="twice"):
        crossfade.wait([ref, ref])
    for num_returns in (0, 2):
        with pytest.raises(ValueError, match="from 1 to"):
            crossfade.wait([ref], num_returns=num_returns)
    for timeout in (-1, float("nan")):
        with pytest.raises(ValueError, match=f"timeout is {timeout}\nhint: it is seconds"):
            crossfade.wait([ref], timeout=timeout)
    with pytest.raises(TypeError, match="timeout is '3'\nhint: it is seconds, 0 or more, or None for ever"):
        crossfade.wait([ref], timeout="3")  # type: ignore[arg-type]


def test_get_actor(engine: str) -> None:
    named = Actor.options(name="scribe", namespace="anything").remote()
    plain = Actor.remote()
    assert crossfade.get_actor("scribe").echo.remote(1).get() == 1
    assert crossfade.get_actor("Doer0", namespace="x").echo.remote(2).get() == 2
    assert crossfade.get_actor("scribe") == named == Actor.options(name="scribe", get_if_exists=True).remote()
    assert {named: 1}[crossfade.get_actor("scribe")] == 1
    assert len({named, plain, crossfade.get_actor("scribe"), crossfade.get_actor("Doer0")}) == 2
    assert named != plain
    assert named != "scribe"
    with pytest.raises(crossfade.SessionError, match="named 'scribe' already"):
        Actor.options(name="scribe").remote()
    crossfade.kill(named)
    with pytest.raises(crossfade.UnknownActor, match="alive are Doer0") as caught:
        crossfade.get_actor("scribe")
    assert isinstance(caught.value, ValueError)
    again = Actor.options(name="scribe", get_if_exists=True).remote()
    assert repr(again) == "ActorHandle(scribe-2)"
    assert again != named
    assert crossfade.get_actor("scribe").echo.remote(3).get() == 3
    with pytest.raises(crossfade.ActorDiedError):
        named.echo.remote(1).get()
    assert plain.echo.remote(1).get() == 1


def test_get_actor_without_a_session() -> None:
    with pytest.raises(
        ValueError, match="no actor named 'x' is alive\nhint: no actor of this process's session is alive"
    ):
        crossfade.get_actor("x")


def test_what_does_not_fit_is_refused_and_comes_back(engine: str) -> None:
    first = Actor.options(num_cpus=1.5).remote()
    with pytest.raises(crossfade.ActorStartError, match=r"num_cpus=1, and 0\.5 of 2 is free: Doer0 holds 1\.5"):
        Actor.options(num_cpus=1).remote()
    Actor.options(num_cpus=0.5, num_gpus=0.5, resources={"license": 1}).remote()
    with pytest.raises(crossfade.ActorStartError, match="license=1, and 0 of 1"):
        Actor.options(resources={"license": 1}).remote()
    for _ in range(3):
        Actor.remote()  # books nothing
    crossfade.kill(first)
    Actor.options(num_cpus=1.5).remote().echo.remote(1).get()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["local", "inline"])
def test_the_gpus_of_actors_are_in_the_plan_and_free_again_after_their_death(name: str) -> None:
    crossfade.init(engine=name, num_gpus=3, preload=NUMPY)
    try:
        one, half, other_half = (Actor.options(num_gpus=amount).remote() for amount in (1, 0.5, 0.5))
        two = Actor.options(num_gpus=1).remote()
        assert [actor._info.gpus for actor in (one, half, other_half, two)] == [(0,), (1,), (1,), (2,)]
        with graph_of(one, "echo") as graph:
            assert graph.plan.devices == {one._info.id: (0,)}
            assert graph.execute(3).get() == 3
        with pytest.raises(crossfade.ActorStartError, match="and 0 of 3 is free"):
            Actor.options(num_gpus=0.5).remote()
        crossfade.kill(half)
        with pytest.raises(crossfade.ActorStartError, match=r"asks for num_gpus=1, and 0\.5 of 3 is free"):
            Actor.options(num_gpus=1).remote()
        assert Actor.options(num_gpus=0.5).remote()._info.gpus == (1,)
        crossfade.kill(one)
        assert Actor.options(num_gpus=1).remote()._info.gpus == (0,)
        assert Actor.remote()._info.gpus == ()
    finally:
        crossfade.shutdown()


@pytest.mark.timeout(60)
def test_what_a_dead_actor_held_is_found_free_though_nobody_looked(local: None) -> None:
    whole = Actor.options(num_cpus=2)
    for _ in range(3):
        actor = whole.remote()
        process = sessions.require().engine.processes.living[actor._info.id]  # type: ignore[attr-defined]
        watch = os.pidfd_open(process.pid)
        actor.leave.remote(5)
        _await_end(watch)
    refused = whole.remote()
    assert refused.echo.remote(1).get() == 1


def _await_end(watch: int) -> None:
    assert await_end(watch, 20)
    os.close(watch)


@pytest.mark.timeout(60)
def test_an_actor_that_could_not_start_holds_nothing(engine: str) -> None:
    bad = crossfade.remote(num_cpus=2)(BadConstructor).remote()
    if engine == "local":
        _await_end(os.pidfd_open(sessions.require().engine.processes.living[bad._info.id].pid))  # type: ignore[attr-defined]
        with pytest.raises(TypeError):
            Actor.options(num_gpus=1).remote(number for number in range(3))
    Actor.options(num_cpus=2).remote().echo.remote(1).get()
    Actor.options(num_gpus=1).remote()


def test_by_default_there_are_as_many_cpus_as_cores() -> None:
    crossfade.init(engine="inline")
    try:
        num_cores = len(os.sched_getaffinity(0))
        Actor.options(num_cpus=num_cores).remote()
        with pytest.raises(crossfade.ActorStartError, match="Doer0 holds"):
            Actor.options(num_cpus=0.1).remote()
    finally:
        crossfade.shutdown()


def test_init_takes_rays_options_and_refuses_unknown_ones() -> None:
    try:
        crossfade.init("local", engine="inline", namespace="n", logging_level=20, include_dashboard=False)
        assert crossfade.init(ignore_reinit_error=True) is sessions.require()
    finally:
        crossfade.shutdown()
    with pytest.raises(TypeError, match="did you mean 'num_cpus'"):
        crossfade.init(num_cpu=1)
    with pytest.raises(TypeError, match="actors inherit the driver's environment"):
        crossfade.init(runtime_env={})
    with pytest.raises(ValueError, match="actors run on this machine"):
        crossfade.init("ray://elsewhere:1")
    with pytest.raises(ValueError, match="0 or more"):
        crossfade.init(num_cpus=-1)
    assert not crossfade.is_initialized()


def test_options_of_actors_and_methods_take_rays_names(engine: str) -> None:
    actor = Actor.options(max_concurrency=1, max_restarts=0, lifetime="detached", memory=1).remote()
    assert actor.echo.options(name="task", enable_task_events=False).remote(1).get() == 1
    assert [ref.get() for ref in actor.echo.options(num_returns=2).remote((1, 2))] == [1, 2]
    with pytest.raises(TypeError, match="unknown option of a method 'num_return'\nhint: did you mean 'num_returns'"):
        actor.echo.options(num_return=2)
    with pytest.raises(ValueError, match="1 or more"):
        actor.echo.options(num_returns=0)
    with pytest.raises(TypeError, match="unknown actor option 'num_cpu'"):
        Actor.options(num_cpu=1)
    with pytest.raises(ValueError, match="needs a name"):
        Actor.options(get_if_exists=True)
