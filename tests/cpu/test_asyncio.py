"""Event loops: many executions at once, cancellation, deaths and shutdown while something is awaited, idle loops."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import threading
import time
from collections.abc import Coroutine, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.api.asynchronous import LoopWatch
from crossfade.api.session import Session
from tests.helpers.calm import calm_s
from tests.helpers.graphs import kept_session, session_of

pytestmark = pytest.mark.timeout(90)


class Doer:
    """Does what tests need."""

    def echo(self, value: Any) -> Any:
        return value

    def add(self, one: Any, other: Any) -> Any:
        return one + other

    @crossfade.method(num_returns=2)
    def both(self, value: Any) -> Any:
        return value, -value

    def fail(self, value: Any) -> Any:
        raise KeyError(value)

    def pid(self) -> int:
        return os.getpid()

    def read(self, path: Path) -> str:
        """Returns once somebody has written to a named pipe and closed it."""
        with open(path) as pipe:
            return pipe.read()


Actor = crossfade.remote(Doer)


SESSIONS: dict[str, dict[str, Any]] = {
    "spin": {"spin_us": 60.0},
    "sleep": {"spin_us": 0.0},
    "inline": {"engine": "inline"},
}
"""Processes that look for work before they sleep, or sleep at once; and none."""

Kept = tuple[Session, tuple[Any, Any]]


@pytest.fixture(scope="module")
def kept() -> Iterator[dict[str, Kept]]:
    """Sessions with two actors each."""
    with ExitStack() as stack:
        made: dict[str, Kept] = {}
        for name, options in SESSIONS.items():
            session = stack.enter_context(kept_session(**options))
            with session_of(session):
                made[name] = session, (Actor.remote(), Actor.remote())
        yield made


@pytest.fixture(params=["spin", "inline"], ids=["local", "inline"])
def actors(request: pytest.FixtureRequest, kept: dict[str, Kept]) -> Iterator[tuple[Any, Any]]:
    """Two actors on each engine in turn, whose session is the program's."""
    session, both = kept[request.param]
    with session_of(session):
        yield both


@pytest.fixture(params=["spin", "sleep"])
def processes(request: pytest.FixtureRequest, kept: dict[str, Kept]) -> Iterator[tuple[Any, Any]]:
    """Two actors that are processes, whose session is the program's."""
    session, both = kept[request.param]
    with session_of(session):
        yield both


@pytest.fixture(params=["spin", "sleep"])
def own(request: pytest.FixtureRequest) -> Iterator[None]:
    """A session that a test may end."""
    crossfade.init(**SESSIONS[request.param])
    yield
    crossfade.shutdown()


def _graph(actor: Any, method: str, **options: Any) -> crossfade.CompiledGraph:
    with crossfade.InputNode() as inp:
        graph: crossfade.CompiledGraph = getattr(actor, method).bind(inp).compile(**options)
    return graph


def _write(path: Path, text: str = "") -> None:
    with open(path, "w") as file:
        file.write(text)


async def _call(graph: crossfade.CompiledGraph, value: Any) -> Any:
    return await (await graph.execute_async(value))


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


# What it gives


def test_a_future_may_be_awaited_more_than_once_and_got(actors: Any) -> None:
    graph = _graph(actors[0], "echo")

    async def work() -> None:
        first, second = await graph.execute_async(1), await graph.execute_async(2)
        assert await second == 2
        assert await first == 1
        assert await first == 1
        assert first.get() == crossfade.get(first) == 1
        assert list(await asyncio.gather(first, second, first)) == [1, 2, 1]

    _run(work())


def test_refs_of_plain_executions_and_calls_can_be_awaited(actors: Any) -> None:
    actor = actors[0]
    graph = _graph(actor, "echo")

    async def work() -> None:
        assert await graph.execute(1) == 1
        assert await actor.echo.remote(2) == 2
        assert await crossfade.put(3) == 3
        assert await asyncio.gather(*[actor.echo.remote(n) for n in range(50)]) == list(range(50))

    _run(work())


def test_a_reference_as_an_argument_is_awaited(processes: Any, pipe: Path) -> None:
    first, second = processes

    async def main() -> None:
        with crossfade.InputNode() as inp:
            graph = second.add.bind(inp.one, inp.other).compile()
        ref = first.read.remote(pipe)
        started = asyncio.ensure_future(graph.execute_async(one="a", other=ref))
        for _ in range(100):  # the loop goes on
            await asyncio.sleep(0)
        assert not started.done()
        await asyncio.to_thread(_write, pipe, "b")
        assert await (await started) == "ab"
        graph.teardown()

    asyncio.run(main())


def test_several_outputs_give_a_list_of_futures(actors: Any) -> None:
    actor, other = actors
    with crossfade.InputNode() as inp:
        one, two = actor.both.bind(inp)
        graph = crossfade.MultiOutputNode([one, other.echo.bind(two)]).compile()

    async def work() -> None:
        for number in range(20):
            futures = await graph.execute_async(number)
            assert await asyncio.gather(*futures) == [number, -number]

    _run(work())


def test_an_exception_arrives_as_its_own_type(actors: Any) -> None:
    graph = _graph(actors[0], "fail")

    async def work() -> None:
        future = await graph.execute_async("x")
        for _ in range(2):
            with pytest.raises(KeyError, match="x"):
                await future
        with pytest.raises(TypeError, match="takes"):
            await graph.execute_async(1, 2, 3)

    _run(work())


# Many at once


@pytest.mark.parametrize("max_inflight", [1, 10])
def test_a_thousand_awaited_at_once(actors: Any, max_inflight: int) -> None:
    actor, other = actors
    with crossfade.InputNode() as inp:
        graph = other.echo.bind(actor.echo.bind(inp)).compile(max_inflight=max_inflight)

    async def work() -> None:
        assert await asyncio.gather(*[_call(graph, n) for n in range(1000)]) == list(range(1000))

    _run(work())
    assert graph.execute(1).get() == 1


def test_a_thousand_started_and_awaited_afterwards(actors: Any) -> None:
    graph = _graph(actors[0], "echo")

    async def work() -> None:
        futures = [await graph.execute_async(n) for n in range(1000)]
        assert [await future for future in reversed(futures)] == list(reversed(range(1000)))

    _run(work())


def test_room_is_given_in_the_order_of_asking(processes: Any, pipe: Path) -> None:
    actor = processes[0]
    with crossfade.InputNode() as inp:
        graph = actor.read.bind(inp).compile(max_inflight=1)

    async def work() -> None:
        order: list[int] = []

        async def one(number: int) -> None:
            future = await graph.execute_async(pipe)
            order.append(number)
            await future

        waiting = {asyncio.create_task(one(number)) for number in range(5)}
        while waiting:  # one after another, as a read takes what all have written that come before it has ended
            await asyncio.to_thread(_write, pipe)
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert order == list(range(5))

    _run(work())


def test_other_tasks_have_their_turns(actors: Any) -> None:
    """However quick the graph is, and however many results are awaited one after another."""
    graph = _graph(actors[0], "echo")

    async def work() -> None:
        num_turns = 0
        is_over = False

        async def count() -> None:
            nonlocal num_turns
            while not is_over:
                num_turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        start = time.monotonic()
        while time.monotonic() - start < 0.3:
            await _call(graph, 1)
        is_over = True
        await counting
        assert num_turns >= 20

    _run(work())


# Cancelling


def test_a_cancelled_wait_loses_nothing(processes: Any, pipe: Path) -> None:
    graph = _graph(processes[0], "read", max_inflight=2)

    async def work() -> None:
        future = await graph.execute_async(pipe)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_await(future), 0.05)
        await asyncio.to_thread(_write, pipe, "done")
        assert await future == "done"

    _run(work())


async def _await(future: Any) -> Any:
    return await future


def test_a_cancelled_wait_for_room_starts_nothing_that_somebody_has_to_get(processes: Any, pipe: Path) -> None:
    graph = _graph(processes[0], "read", max_inflight=1)

    async def work() -> None:
        first = await graph.execute_async(pipe)
        waiting = [asyncio.create_task(graph.execute_async(pipe)) for _ in range(3)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        assert all(
            isinstance(r, asyncio.CancelledError) for r in await asyncio.gather(*waiting, return_exceptions=True)
        )
        await asyncio.to_thread(_write, pipe, "one")
        assert await first == "one"
        assert graph.statistics().num_submitted == 1

    _run(work())


def test_a_storm_of_cancellations(processes: Any) -> None:
    graph = _graph(processes[0], "echo", max_inflight=3)
    chooser = random.Random(1)

    async def work() -> None:
        async def one(number: int) -> None:
            value = np.full(chooser.choice((1, 5_000)), number)
            assert (await _call(graph, value))[0] == number

        for _ in range(30):
            tasks = [asyncio.create_task(one(number)) for number in range(30)]
            for task in chooser.sample(tasks, 15):
                if chooser.random() < 0.5:
                    await asyncio.sleep(0)
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(result is None or isinstance(result, asyncio.CancelledError) for result in results), results
        assert await _call(graph, 7) == 7

    _run(work())
    assert graph.execute(8).get() == 8


# Threads and loops together


def test_loops_in_threads_and_threads_that_block_share_a_graph(processes: Any) -> None:
    """Nobody takes a wake-up, or a result, away from another."""
    graph = _graph(processes[0], "echo", max_inflight=64)
    failures: list[BaseException] = []

    async def awaiting(base: int) -> None:
        for number in range(base, base + 300, 3):
            assert await asyncio.gather(*[_call(graph, number + n) for n in range(3)]) == [number + n for n in range(3)]

    def blocking(base: int) -> None:
        for number in range(base, base + 300):
            assert graph.execute(number).get(timeout=60) == number

    def guarded(work: Any, base: int) -> None:
        try:
            if work is awaiting:
                _run(work(base))
            else:
                work(base)
        except BaseException as error:
            failures.append(error)

    kinds = [awaiting, blocking, awaiting, blocking]
    threads = [threading.Thread(target=guarded, args=(kind, 1000 * n)) for n, kind in enumerate(kinds)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_loop_is_told_what_another_thread_took_in(processes: Any, pipe: Path) -> None:
    actor = processes[0]
    graph = _graph(actor, "read")

    async def work() -> None:
        first, second = await graph.execute_async(pipe), await graph.execute_async(pipe)
        waiting = asyncio.create_task(_await(first))
        await asyncio.sleep(0)
        other = asyncio.create_task(asyncio.to_thread(second.get))
        await asyncio.to_thread(_write, pipe, "one")
        assert await waiting == "one"
        await asyncio.to_thread(_write, pipe, "two")
        assert await other == "two"

    _run(work())


def test_one_loop_after_another(processes: Any) -> None:
    graph = _graph(processes[0], "echo")
    num_descriptors = 0
    for number in range(20):
        assert _run(_call(graph, number)) == number
        if number == 2:
            num_descriptors = len(os.listdir("/proc/self/fd"))
    assert len(os.listdir("/proc/self/fd")) <= num_descriptors + 2


def test_a_blocking_get_inside_a_loop(processes: Any) -> None:
    """As in a notebook, where a loop runs all the time."""
    graph = _graph(processes[0], "echo")

    async def work() -> None:
        future = await graph.execute_async(1)
        assert graph.execute(2).get() == 2
        assert await future == 1
        assert crossfade.get([graph.execute(n) for n in range(5)]) == list(range(5))

    _run(work())


def test_a_result_that_another_thread_takes_in_just_before_it_is_awaited(
    processes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look that did not find it, and before the watch has taken note of it."""
    graph = _graph(processes[0], "echo")

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
        assert await asyncio.wait_for(_await(future), 20) == 7

    _run(work())


def test_a_look_that_finds_the_lock_taken_is_made_up_for(processes: Any, pipe: Path) -> None:
    """A thread looks, the value comes and rings, the loop finds the lock taken; only then the thread lets go of it."""
    graph = _graph(processes[0], "read")

    async def work() -> None:
        future = await graph.execute_async(pipe)
        waiting = asyncio.create_task(_await(future))
        await asyncio.sleep(0)
        executions = future._executions
        holding, let_go = threading.Event(), threading.Event()

        def look_slowly() -> None:
            with executions._collecting:
                holding.set()
                let_go.wait()
            executions._tell_missed()

        thread = threading.Thread(target=look_slowly)
        thread.start()
        holding.wait()
        await asyncio.to_thread(_write, pipe, "x")
        await asyncio.sleep(0.1)  # the ring comes to nothing meanwhile
        let_go.set()
        assert await asyncio.wait_for(waiting, 20) == "x"
        thread.join()

    _run(work())


def test_waits_that_timed_out_leave_nothing(processes: Any, pipe: Path) -> None:
    graph = _graph(processes[0], "read")

    async def work() -> None:
        future = await graph.execute_async(pipe)
        for _ in range(20):
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(_await(future), 0.001)
        session: Any = graph._session
        watch = session.watches[asyncio.get_running_loop()]
        assert not watch._awaited
        assert not watch._watched
        assert session.engine.doorbell._num_loops == 0
        await asyncio.to_thread(_write, pipe, "x")
        assert await future == "x"

    _run(work())


def test_a_loop_that_ends_while_something_is_awaited_is_not_rung_any_more(processes: Any, pipe: Path) -> None:
    graph = _graph(processes[0], "read")

    async def work() -> Any:
        future = await graph.execute_async(pipe)
        task = asyncio.create_task(_await(future))
        await asyncio.sleep(0)
        return future, task

    future, _ = _run(work())
    session: Any = graph._session
    assert session.engine.doorbell._num_loops == 0
    _write(pipe, "x")
    assert future.get() == "x"


# The end of something


def test_an_actor_that_dies_while_it_is_awaited(processes: Any, pipe: Path) -> None:
    actor, other = Actor.options(name="first").remote(), processes[0]
    graph, apart = _graph(actor, "read", max_inflight=1), _graph(other, "echo")
    pid = actor.pid.remote().get()

    async def work() -> None:
        future = await graph.execute_async(pipe)
        waiting = [asyncio.create_task(_await(future)) for _ in range(3)]
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
        assert await _call(apart, 1) == 1

    _run(work())


@pytest.mark.parametrize("how", ["shutdown", "teardown"])
def test_the_end_while_something_is_awaited(own: None, pipe: Path, how: str) -> None:
    graph = _graph(Actor.remote(), "read", max_inflight=1)

    async def work() -> None:
        future = await graph.execute_async(pipe)
        waiting = asyncio.create_task(_await(future))
        room = asyncio.create_task(graph.execute_async(pipe))
        await asyncio.sleep(0)
        end = crossfade.shutdown if how == "shutdown" else lambda: graph.teardown(kill_actors=True, timeout=0)
        await asyncio.to_thread(end)
        for error in await asyncio.gather(waiting, room, return_exceptions=True):
            assert isinstance(error, crossfade.SessionError), error

    _run(work())


# What it costs


async def _used_s() -> float:
    """What half a second of doing nothing costs; a collection of garbage may come into one."""
    before = time.process_time()
    await asyncio.sleep(0.5)
    return time.process_time() - before


def test_a_loop_that_waits_uses_no_core(processes: Any, pipe: Path) -> None:
    graph, quick = _graph(processes[0], "read"), _graph(processes[1], "echo")

    async def work() -> None:
        assert await _call(quick, 1) == 1
        future = await graph.execute_async(pipe)
        waiting = asyncio.create_task(_await(future))
        await asyncio.sleep(0.05)
        assert min([await _used_s() for _ in range(3)]) < 0.02
        await asyncio.to_thread(_write, pipe, "x")
        assert await waiting == "x"
        assert min([await _used_s() for _ in range(3)]) < 0.02

    _run(work())


def test_no_wake_up_is_lost(processes: Any) -> None:
    """Thousands of awaits of which most have to sleep; one lost wake-up and the test stands still."""
    actor, other = processes
    with crossfade.InputNode() as inp:
        graph = other.add.bind(actor.echo.bind(inp), inp).compile(max_inflight=4)

    async def chain(base: int) -> None:
        for number in range(base, base + 400):
            assert await _call(graph, number) == 2 * number

    async def work() -> None:
        await asyncio.gather(*[chain(10_000 * n) for n in range(3)])

    stop = threading.Event()

    def block() -> None:
        while not stop.is_set():
            assert actor.echo.remote(1).get() == 1

    thread = threading.Thread(target=block)
    thread.start()
    try:
        _run(work())
    finally:
        stop.set()
        thread.join()
