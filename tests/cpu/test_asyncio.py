"""Event loops: what is awaited, many executions at once, other tasks meanwhile, idle loops."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import crossfade
from tests.helpers.awaiting import SESSIONS, call, result_of, run, write
from tests.helpers.doers import Actor, graph_of
from tests.helpers.kept_actors import crew_of, kept_crews

pytestmark = pytest.mark.timeout(90)


kept = kept_crews(SESSIONS, lambda: (Actor.remote(), Actor.remote()))
actors = crew_of("spin", "inline", ids=["local", "inline"])
"""Two actors, on each engine in turn."""
processes = crew_of("spin", "sleep")
"""Two actors that are processes."""


# What it gives


def test_a_future_may_be_awaited_more_than_once_and_got(actors: Any) -> None:
    graph = graph_of(actors[0], "echo")

    async def work() -> None:
        first, second = await graph.execute_async(1), await graph.execute_async(2)
        assert await second == 2
        assert await first == 1
        assert await first == 1
        assert first.get() == crossfade.get(first) == 1
        assert list(await asyncio.gather(first, second, first)) == [1, 2, 1]

    run(work())


def test_refs_of_plain_executions_and_calls_can_be_awaited(actors: Any) -> None:
    actor = actors[0]
    graph = graph_of(actor, "echo")

    async def work() -> None:
        assert await graph.execute(1) == 1
        assert await actor.echo.remote(2) == 2
        assert await crossfade.put(3) == 3
        assert await asyncio.gather(*[actor.echo.remote(n) for n in range(50)]) == list(range(50))

    run(work())


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
        await asyncio.to_thread(write, pipe, "b")
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

    run(work())


def test_an_exception_arrives_as_its_own_type(actors: Any) -> None:
    graph = graph_of(actors[0], "fail")

    async def work() -> None:
        future = await graph.execute_async("x")
        for _ in range(2):
            with pytest.raises(KeyError, match="x"):
                await future
        with pytest.raises(TypeError, match="takes"):
            await graph.execute_async(1, 2, 3)

    run(work())


# Many at once


@pytest.mark.parametrize("max_inflight", [1, 10])
def test_a_thousand_awaited_at_once(actors: Any, max_inflight: int) -> None:
    actor, other = actors
    graph = other.echo.bind(actor.echo.bind(crossfade.InputNode())).compile(max_inflight=max_inflight)

    async def work() -> None:
        assert await asyncio.gather(*[call(graph, n) for n in range(1000)]) == list(range(1000))

    run(work())
    assert graph.execute(1).get() == 1


def test_a_thousand_started_and_awaited_afterwards(actors: Any) -> None:
    graph = graph_of(actors[0], "echo")

    async def work() -> None:
        futures = [await graph.execute_async(n) for n in range(1000)]
        assert [await future for future in reversed(futures)] == list(reversed(range(1000)))

    run(work())


def test_room_is_given_in_the_order_of_asking(processes: Any, pipe: Path) -> None:
    actor = processes[0]
    graph = actor.read.bind(crossfade.InputNode()).compile(max_inflight=1)

    async def work() -> None:
        order: list[int] = []

        async def one(number: int) -> None:
            future = await graph.execute_async(pipe)
            order.append(number)
            await future

        waiting = {asyncio.create_task(one(number)) for number in range(5)}
        while waiting:  # one after another, as a read takes what all have written that come before it has ended
            await asyncio.to_thread(write, pipe)
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        assert order == list(range(5))

    run(work())


def test_other_tasks_have_their_turns(actors: Any) -> None:
    """However quick the graph is, and however many results are awaited one after another."""
    graph = graph_of(actors[0], "echo")

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
            await call(graph, 1)
        is_over = True
        await counting
        assert num_turns >= 20

    run(work())


# What it costs


async def _is_idle() -> bool:
    """Whether one of three half seconds of doing nothing costs next to nothing: a collection of garbage may come into one."""
    for _ in range(3):
        before = time.process_time()
        await asyncio.sleep(0.5)
        if time.process_time() - before < 0.02:
            return True
    return False


def test_a_loop_that_waits_uses_no_core(processes: Any, pipe: Path) -> None:
    graph, quick = graph_of(processes[0], "read"), graph_of(processes[1], "echo")

    async def work() -> None:
        assert await call(quick, 1) == 1
        future = await graph.execute_async(pipe)
        waiting = asyncio.create_task(result_of(future))
        await asyncio.sleep(0.05)
        assert await _is_idle()
        await asyncio.to_thread(write, pipe, "x")
        assert await waiting == "x"
        assert await _is_idle()

    run(work())


def test_no_wake_up_is_lost(processes: Any) -> None:
    """Thousands of awaits of which most have to sleep; one lost wake-up and the test stands still."""
    actor, other = processes
    with crossfade.InputNode() as inp:
        graph = other.add.bind(actor.echo.bind(inp), inp).compile(max_inflight=4)

    async def chain(base: int) -> None:
        for number in range(base, base + 400):
            assert await call(graph, number) == 2 * number

    async def work() -> None:
        await asyncio.gather(*[chain(10_000 * n) for n in range(3)])

    stop = threading.Event()

    def block() -> None:
        while not stop.is_set():
            assert actor.echo.remote(1).get() == 1

    thread = threading.Thread(target=block)
    thread.start()
    try:
        run(work())
    finally:
        stop.set()
        thread.join()
