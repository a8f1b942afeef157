"""What comes in between: handlers of signals that raise, wait, tear down or shut down in the middle of a call."""

from __future__ import annotations

import asyncio
import collections
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.api import session as sessions
from crossfade.api.session import require
from crossfade.channels.protocol import EMPTY
from tests.helpers.builds import interpreted_only
from tests.helpers.handlers import (
    Late,
    Remote,
    handler,
    handler_once,
    pairs,
    sleeps,
    slow_graph,
    three_actors,
    with_a_handler,
)
from tests.helpers.kept_actors import ENGINES, crew_of, kept_crews
from tests.helpers.sessions import NUMPY, on_each_engine, opened

engine = on_each_engine(preload=NUMPY)
local = opened(preload=NUMPY)
kept = kept_crews({**ENGINES, "local": {"preload": NUMPY}}, three_actors)
crew = crew_of("inline", "local")
"""Three actors on each engine in turn, for tests whose graph is refused something and goes on. Where a graph is ended in the middle
of a call, the test has a session of its own, which is shut down behind it.
"""

pytestmark = pytest.mark.timeout(60)


class Standstill:
    """Whether a list with more than one item has not grown for a tenth of a second."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items
        self._seen = 0, 0.0

    def __call__(self) -> bool:
        num, now_s = len(self._items), time.monotonic()
        if num != self._seen[0]:
            self._seen = num, now_s
        return num > 1 and now_s - self._seen[1] > 0.1


def once_after(move: Callable[..., Any], unless: object = False) -> Callable[..., Any]:
    """Does it, and raises once as a handler would right behind it; not where nothing could be done yet."""
    has_raised = False

    def moved(*args: Any) -> Any:
        nonlocal has_raised
        result = move(*args)
        if result is not unless and not has_raised:
            has_raised = True
            raise Late
        return result

    return moved


@pytest.mark.parametrize("index", [0, 1])
def test_an_error_that_comes_behind_an_input_that_is_written_ends_the_graph_and_mixes_no_executions(
    engine: str, index: int
) -> None:
    graph = pairs()
    assert graph.execute(1, 1).get() == (1, 1)
    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    driver._writes[index] = once_after(driver._writes[index])
    with pytest.raises(Late):
        graph.execute(2, 2)
    with pytest.raises(crossfade.SessionError, match="interrupted in the middle"):
        graph.execute(3, 3)
    graph.teardown()


def test_an_error_that_comes_behind_a_result_that_is_taken_ends_the_graph(engine: str) -> None:
    graph = pairs()
    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    ref = graph.execute(1, 1)
    driver._reads[0] = once_after(driver._reads[0], unless=EMPTY)
    with pytest.raises(Late):
        ref.get()
    with pytest.raises(crossfade.SessionError, match="interrupted in the middle"):
        ref.get()
    graph.teardown()


def test_a_value_that_cannot_be_pickled_ends_nothing(engine: str) -> None:
    graph = pairs()
    with pytest.raises((TypeError, crossfade.TaskError), match="pickle"):
        graph.execute(threading.Lock(), 1)
    assert graph.execute(3, 3).get() == (3, 3)
    with pytest.raises((TypeError, crossfade.TaskError), match="pickle"):
        graph.execute(1, threading.Lock())
    assert graph.execute(4, 4).get() == (4, 4)
    graph.teardown()


class Interrupted(collections.deque[Any]):
    def append(self, value: Any) -> None:
        super().append(value)
        raise KeyboardInterrupt


def test_an_interrupt_before_anything_is_written_leaves_no_execution_behind(engine: str) -> None:
    graph = pairs()
    executions: Any = graph._executions
    executions.inflight = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        graph.execute(1, 1)
    assert not executions.inflight
    graph.teardown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_real_deadline_gives_right_values_or_an_error(local: None) -> None:
    graph, num_torn = pairs(), 0

    def late() -> None:
        raise Late

    for number in range(40):
        try:
            with handler(late, 0.0002 + number * 3e-5):
                for _ in range(200):  # an error that comes in a destructor goes nowhere
                    assert graph.execute((number, b"x" * 3000), (number, b"x" * 3000)).get(timeout=20)[1][0] == number
        except (Late, crossfade.SessionError, crossfade.TaskError):
            pass
        try:
            assert graph.execute((number, 0), (number, 1)).get(timeout=20) == ((number, 0), (number, 1))
        except crossfade.SessionError:
            graph.teardown()
            num_torn += 1
            if num_torn == 4:
                return
            graph = pairs()
    graph.teardown()


def test_destructors_of_references_and_graphs_may_come_in_the_middle_of_a_call(engine: str) -> None:
    graph = pairs()
    kept: list[object] = [graph.execute(1, 1), pairs()]
    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    driver._writes[0] = with_a_handler(driver._writes[0], kept.pop)  # the other graph
    ref = graph.execute(2, 2)
    driver._reads[0] = with_a_handler(driver._reads[0], kept.pop)  # the reference to the first result
    assert ref.get(timeout=20) == (2, 2)
    assert not kept
    assert len(require().orphans) == 1
    assert graph.execute(3, 3).get(timeout=20) == (3, 3)
    graph.teardown()


def test_another_thread_may_do_what_a_handler_may_not(local: None) -> None:
    graph, is_told = slow_graph(), threading.Event()

    def tear_down() -> None:
        is_told.wait(20)
        graph.teardown()

    thread = threading.Thread(target=tear_down)
    thread.start()
    ref = graph.execute(0.6)
    with handler_once(is_told.set, sleeps()), pytest.raises(crossfade.SessionError, match="torn down"):
        ref.get(timeout=20)
    thread.join()


def test_a_handler_may_get_a_result_of_another_graph_while_the_program_waits_for_one(local: None) -> None:
    graph, other = slow_graph(), slow_graph()
    got, begin_s = [], time.monotonic()
    with handler_once(lambda: got.append(other.execute(0.02).get()), sleeps()):
        assert graph.execute(0.4).get(timeout=30) == 0.4
    assert got == [0.02]
    assert time.monotonic() - begin_s < 15  # it was woken: what it waits for came while the handler waited
    graph.teardown()
    other.teardown()


def test_a_handler_may_wait_for_what_another_thread_gets_beside_its_own(local: None) -> None:
    graphs = []
    for _ in range(2):
        graphs.append(Remote.remote().slow.bind(crossfade.InputNode()).compile())
        graphs[-1].execute(0).get()
    ref, other = graphs[0].execute(1.0), graphs[1].execute(0.6)
    got: list[float] = []
    thread = threading.Thread(target=lambda: got.append(other.get(timeout=20)))
    timer = threading.Timer(0.1, thread.start)
    timer.start()
    with handler(lambda: got.append(other.get(timeout=20)), 0.3):
        begin_s = time.monotonic()
        assert ref.get(timeout=20) == 1.0
        assert time.monotonic() - begin_s < 10
    timer.join()
    thread.join()
    assert got == [0.6, 0.6]


def test_a_handler_that_tears_down_while_its_thread_sends_does_not_wait_for_itself(local: None, tmp_path: Path) -> None:
    actor = Remote.remote()
    graph = actor.same.bind(crossfade.InputNode()).compile()
    assert graph.execute(1).get() == 1
    engine: Any = sessions.require().engine
    connection = next(iter(engine.processes.living.values())).connection
    fifo = str(tmp_path / "fifo")
    os.mkfifo(fifo)
    busy = actor.until.remote(fifo)
    seen: list[str] = []

    def tear_down() -> None:
        with pytest.raises(crossfade.TeardownTimeout, match="in the middle of sending"):
            graph.teardown()
        with pytest.raises(crossfade.SessionError, match="in the middle of sending"):
            actor.same.remote(3)
        seen.append("handler")
        os.close(os.open(fifo, os.O_WRONLY))

    with handler_once(
        tear_down, lambda: connection._outgoing and sum(connection._outgoing[0].sent) > 1000
    ):  # beyond its head
        large = actor.same.remote(b"x" * (20 << 20))  # waits for room, for the actor is busy
    assert seen == ["handler"]
    graph.teardown()
    assert busy.get(timeout=20) is None
    assert len(large.get(timeout=20)) == 20 << 20
    again = actor.same.bind(crossfade.InputNode()).compile()
    assert again.execute(2).get() == 2
    again.teardown()


def test_a_handler_that_comes_while_messages_are_taken_in_breaks_nothing(local: None) -> None:
    actor, other = Remote.remote(), Remote.remote()
    assert crossfade.get([actor.same.remote(1), other.same.remote(1)]) == [1, 1]
    engine: Any = sessions.require().engine
    connection = next(iter(engine.processes.living.values())).connection
    refused: list[object] = []
    early = actor.same.remote(4)

    def get() -> None:
        with pytest.raises(crossfade.SessionError, match="of taking in what it has sent"):
            actor.same.remote(5)
        with pytest.raises(crossfade.SessionError, match="of taking in what it has sent"):
            early.get(timeout=20)
        refused.append(1)

    connection._take_in = with_a_handler(connection._take_in, get)
    assert actor.same.remote(b"x" * 3_000_000).get(timeout=20) == b"x" * 3_000_000
    assert refused == [1]
    assert actor.same.remote(7).get(timeout=20) == 7
    assert early.get(timeout=20) == 4


@pytest.mark.parametrize("kind", [TimeoutError, crossfade.GetTimeoutError, Late])
def test_what_a_handler_raises_while_a_call_is_sent_or_its_result_taken_in_arrives(
    local: None, kind: type[Exception]
) -> None:
    def late() -> None:
        raise kind("the handler's")

    actor = Remote.remote()
    assert actor.same.remote(1).get() == 1
    engine: Any = sessions.require().engine
    connection = next(iter(engine.processes.living.values())).connection
    refs = [actor.slow.remote(1.2)]
    with handler_once(late, Standstill(refs)), pytest.raises(kind, match="the handler's"):
        refs.extend(actor.same.remote(bytes(3000)) for _ in itertools.count())  # until there is no room
    assert refs[0].get(timeout=20) == 1.2
    assert len(refs[-1].get(timeout=20)) == 3000
    ref, take_in = actor.same.remote(b"y" * 100_000), connection._take_in

    def interrupted(*args: Any) -> None:
        connection._take_in = take_in
        late()

    connection._take_in = interrupted  # as if it came right behind what is received
    with pytest.raises(kind, match="the handler's"):
        ref.get(timeout=20)
    assert ref.get(timeout=20) == b"y" * 100_000


async def execute_async(graph: crossfade.CompiledGraph) -> object:
    return await (await graph.execute_async(2, 2))


async def awaited(ref: crossfade.Ref) -> object:
    return await ref


USES: dict[str, Callable[[Any, Any], object]] = {
    "execute": lambda graph, ref: graph.execute(2, 2),
    "execute_async": lambda graph, ref: asyncio.run(execute_async(graph)),
    "get": lambda graph, ref: ref.get(timeout=20),
    "get of a list": lambda graph, ref: crossfade.get([ref], timeout=20),
    "await": lambda graph, ref: asyncio.run(awaited(ref)),
    "wait": lambda graph, ref: crossfade.wait([ref], timeout=20),
    "teardown": lambda graph, ref: graph.teardown(),
}
"""What a handler may not do with a graph, and a result of it, in the middle of a call of that graph."""


def refusal_of(use: str, graph: crossfade.CompiledGraph, ref: Any) -> BaseException:
    with pytest.raises(crossfade.SessionError, match="in the middle of its own call") as caught:
        USES[use](graph, ref)
    assert "set a flag" in str(caught.value)
    return caught.value


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("index", [0, 1])
def test_a_handler_that_uses_the_graph_in_the_middle_of_its_execute_is_refused(
    crew: tuple[Any, ...], index: int, use: str
) -> None:
    graph, refused = pairs(*crew), list[object]()
    first = graph.execute(1, 1)
    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    driver._writes[index] = with_a_handler(driver._writes[index], lambda: refused.append(refusal_of(use, graph, first)))
    assert graph.execute(2, 2).get() == (2, 2)
    assert len(refused) == 1
    assert first.get() == (1, 1)
    assert graph.execute(3, 3).get() == (3, 3)
    graph.teardown()


@pytest.mark.parametrize("use", USES)
def test_a_handler_that_uses_the_graph_in_the_middle_of_a_get_is_refused_and_swaps_no_results(
    crew: tuple[Any, ...], use: str
) -> None:
    graph, refused = pairs(*crew), list[object]()
    first, second = graph.execute(1, 1), graph.execute(2, 2)
    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    driver._reads[0] = with_a_handler(driver._reads[0], lambda: refused.append(refusal_of(use, graph, second)))
    assert (first.get(timeout=20), second.get(timeout=20)) == ((1, 1), (2, 2))
    assert len(refused) == 1
    graph.teardown()


@interpreted_only("it replaces a method of a compiled class")
@pytest.mark.parametrize("use", USES)
def test_a_handler_that_uses_the_graph_in_the_middle_of_its_teardown_is_refused(
    crew: tuple[Any, ...], use: str
) -> None:
    graph, refused = pairs(*crew), list[object]()
    first = graph.execute(1, 1)
    opened: Any = graph._executions.opened
    opened.close = with_a_handler(opened.close, lambda: refused.append(refusal_of(use, graph, first)))
    graph.teardown()
    assert len(refused) == 1
    with pytest.raises(crossfade.SessionError, match="torn down"):
        first.get()


@pytest.mark.parametrize("use", ["get", "teardown"])
def test_a_handler_that_uses_the_graph_while_the_program_waits_for_its_result_is_refused(local: None, use: str) -> None:
    graph, refused = slow_graph(), list[object]()
    ref, later = graph.execute(0.4), graph.execute(0.01)
    with handler_once(lambda: refused.append(refusal_of(use, graph, later)), sleeps()):
        assert ref.get(timeout=30) == 0.4
    assert len(refused) == 1
    assert later.get(timeout=20) == 0.01
    graph.teardown()


def test_what_a_handler_does_not_catch_of_a_refusal_ends_the_graph(engine: str) -> None:
    graph = pairs()
    first, second = graph.execute(1, 1), graph.execute(2, 2)
    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    driver._reads[0] = with_a_handler(driver._reads[0], lambda: second.get(timeout=20))
    with pytest.raises(crossfade.SessionError, match="in the middle of its own call"):
        first.get(timeout=20)
    with pytest.raises(crossfade.SessionError, match="interrupted in the middle"):
        second.get(timeout=20)
    graph.teardown()
