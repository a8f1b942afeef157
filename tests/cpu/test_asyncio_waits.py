"""Event loops: waits that are cancelled, threads and loops that share a graph, deaths and shutdown while something is awaited."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.api.asynchronous import LoopWatch
from tests.helpers.awaiting import SESSIONS, call, result_of, run, write
from tests.helpers.calm import calm_s
from tests.helpers.doers import Actor, graph_of
from tests.helpers.kept_actors import crew_of, kept_crews
from tests.helpers.threads import together

pytestmark = pytest.mark.timeout(90)


kept = kept_crews(SESSIONS, lambda: (Actor.remote(), Actor.remote()))
processes = crew_of("spin", "sleep")
"""Two actors that are processes."""


@pytest.fixture(params=["spin", "sleep"])
def own(request: pytest.FixtureRequest) -> Iterator[None]:
    """A session that a test may end."""
    crossfade.init(**SESSIONS[request.param])
    yield
    crossfade.shutdown()


# Cancelling


def test_a_cancelled_wait_loses_nothing(processes: Any, pipe: Path) -> None:
    graph = graph_of(processes[0], "read", max_inflight=2)

    async def work() -> None:
        future = await graph.execute_async(pipe)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(result_of(future), 0.05)
        await asyncio.to_thread(write, pipe, "done")
        assert await future == "done"

    run(work())


def test_a_cancelled_wait_for_room_starts_nothing_that_somebody_has_to_get(processes: Any, pipe: Path) -> None:
    graph = graph_of(processes[0], "read", max_inflight=1)

    async def work() -> None:
        first = await graph.execute_async(pipe)
        waiting = [asyncio.create_task(graph.execute_async(pipe)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        assert all(
            isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*waiting, return_exceptions=True)
        )
        await asyncio.to_thread(write, pipe, "one")
        assert await first == "one"
        assert graph.statistics().num_submitted == 1

    run(work())


def test_a_storm_of_cancellations(processes: Any) -> None:
    graph = graph_of(processes[0], "echo", max_inflight=3)
    chooser = random.Random(1)

    async def work() -> None:
        async def one(number: int) -> None:
            value = np.full(chooser.choice((1, 5_000)), number)
            assert (await call(graph, value))[0] == number

        for _ in range(30):
            tasks = [asyncio.create_task(one(number)) for number in range(30)]
            for task in chooser.sample(tasks, 15):
                if chooser.random() < 0.5:
                    await asyncio.sleep(0)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
        assert await call(graph, 7) == 7

    run(work())
    assert graph.execute(8).get() == 8


# Threads and loops together


def test_loops_in_threads_and_threads_that_block_share_a_graph(processes: Any) -> None:
    """Nobody takes a wake-up, or a result, away from another."""
    graph = graph_of(processes[0], "echo", max_inflight=64)

    async def awaiting(base: int) -> None:
        for number in range(base, base + 300, 3):
            assert await asyncio.gather(*[call(graph, number + n) for n in range(3)]) == [number + n for n in range(3)]

    def blocking(base: int) -> None:
        for number in range(base, base + 300):
            assert graph.execute(number).get(timeout=60) == number

    together(lambda n: blocking(1000 * n) if n % 2 else run(awaiting(1000 * n)), range(4))


def test_a_loop_is_told_what_another_thread_took_in(processes: Any, pipe: Path) -> None:
    actor = processes[0]
    graph = graph_of(actor, "read")

    async def work() -> None:
        first, second = await graph.execute_async(pipe), await graph.execute_async(pipe)
        waiting = asyncio.create_task(result_of(first))
        await asyncio.sleep(0)
        other = asyncio.create_task(asyncio.to_thread(second.get))
        await asyncio.to_thread(write, pipe, "one")
        assert await waiting == "one"
        await asyncio.to_thread(write, pipe, "two")
        assert await other == "two"

    run(work())


def test_one_loop_after_another(processes: Any) -> None:
    graph = graph_of(processes[0], "echo")
    num_descriptors = 0
    for number in range(20):
        assert run(call(graph, number)) == number
        if number == 2:
            num_descriptors = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors + 2


def test_a_blocking_get_inside_a_loop(processes: Any) -> None:
    """As in a notebook, where a loop runs all the time."""
    graph = graph_of(processes[0], "echo")

    async def work() -> None:
        future = await graph.execute_async(1)
        assert graph.execute(2).get() == 2
        assert await future == 1
        assert crossfade.get([graph.execute(n) for n in range(5)]) == list(range(5))

    run(work())


def test_a_result_that_another_thread_takes_in_just_before_it_is_awaited(
    processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look that did not find it, and before the watch has taken note of it."""
    graph = graph_of(processes[0], "echo")

    async def work() -> None:
        future = graph.execute(7)
        begin = LoopWatch._begin

        def begin_late(self: LoopWatch, executions: Any) -> None:
            thread = threading.Thread(target=future.get)
            thread.start()
            thread.join()
            begin(self, executions)

        looks = iter([False])
        monkeypatch.setattr(type(future), "is_ready", lambda ref: next(looks, None) is None or ref._execution.values)
        monkeypatch.setattr(LoopWatch, "may_look", lambda watch, executions: False)
        monkeypatch.setattr(LoopWatch, "_begin", begin_late)
        assert await asyncio.wait_for(result_of(future), 20) == 7

    run(work())


def test_a_look_that_finds_the_lock_taken_is_made_up_for(processes: Any, pipe: Path) -> None:
    """A thread looks, the value comes and rings, the loop finds the lock taken; only then the thread lets go of it."""
    graph = graph_of(processes[0], "read")

    async def work() -> None:
        future = await graph.execute_async(pipe)
        waiting = asyncio.create_task(result_of(future))
        await asyncio.sleep(0)
        executions = future._executions
        holding, let_go = threading.Event(), threading.Event()

        def look_slowly() -> None:
            with executions._collecting:
                holding.set()
                let_go.wait()
            executions.watchers.notify_missed()

        thread = threading.Thread(target=look_slowly)
        thread.start()
        holding.wait()
        await asyncio.to_thread(write, pipe, "x")
        await asyncio.sleep(0.1)  # the ring comes to nothing meanwhile
        let_go.set()
        assert await asyncio.wait_for(waiting, 20) == "x"
        thread.join()

    run(work())


def test_waits_that_timed_out_leave_nothing(processes: Any, pipe: Path) -> None:
    graph = graph_of(processes[0], "read")

    async def work() -> None:
        future = await graph.execute_async(pipe)
        for _ in range(20):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(result_of(future), 0.001)
        session: Any = graph._session
        watch = session.watches[asyncio.get_running_loop()]
        assert not watch._awaited
        assert not watch._watched
        assert session.engine.doorbell._num_loops == 0
        await asyncio.to_thread(write, pipe, "x")
        assert await future == "x"

    run(work())


def test_a_loop_that_ends_while_something_is_awaited_is_not_rung_any_more(processes: Any, pipe: Path) -> None:
    graph = graph_of(processes[0], "read")

    async def work() -> Any:
        future = await graph.execute_async(pipe)
        task = asyncio.create_task(result_of(future))
        await asyncio.sleep(0)
        return future, task

    future, _ = run(work())
    session: Any = graph._session
    assert session.engine.doorbell._num_loops == 0
    write(pipe, "x")
    assert future.get() == "x"


# The end of something


def test_an_actor_that_dies_while_it_is_awaited(processes: Any, pipe: Path) -> None:
    actor, other = Actor.options(name="first").remote(), processes[0]
    graph, apart = graph_of(actor, "read", max_inflight=1), graph_of(other, "echo")
    pid = actor.pid.remote().get()

    async def work() -> None:
        future = await graph.execute_async(pipe)
        waiting = [asyncio.create_task(result_of(future)) for _ in range(3)]
        room = asyncio.create_task(graph.execute_async(pipe))
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        start = calm_s()
        for error in await asyncio.gather(*waiting, room, return_exceptions=True):
            assert isinstance(error, crossfade.ActorDiedError), error
            assert "first is dead: it was killed by SIGKILL" in str(error)
        assert calm_s() - start < 1.0
        with pytest.raises(crossfade.ActorDiedError):
            await actor.echo.remote(1)
        assert await call(apart, 1) == 1

    run(work())


@pytest.mark.parametrize("how", ["shutdown", "teardown"])
def test_the_end_while_something_is_awaited(own: None, pipe: Path, how: str) -> None:
    graph = graph_of(Actor.remote(), "read", max_inflight=1)

    async def work() -> None:
        future = await graph.execute_async(pipe)
        waiting = asyncio.create_task(result_of(future))
        room = asyncio.create_task(graph.execute_async(pipe))
        await asyncio.sleep(0)
        end = crossfade.shutdown if how == "shutdown" else lambda: graph.teardown(kill_actors=True, timeout=0)
        await asyncio.to_thread(end)
        for error in await asyncio.gather(waiting, room, return_exceptions=True):
            assert isinstance(error, crossfade.SessionError), error

    run(work())
