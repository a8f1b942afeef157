"""What comes in between: handlers of signals that raise or wait in the middle of a call, and sessions that another thread ends."""

from __future__ import annotations

import asyncio
import collections
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.channels.protocol import EMPTY
from crossfade.plan.parse import parse_plan

pytestmark = pytest.mark.timeout(60)


class Late(Exception):
    """What a handler of SIGALRM raises."""


class Worker:
    def same(self, value: Any) -> Any:
        return value

    def pair(self, one: Any, other: Any) -> tuple[Any, Any]:
        return one, other

    def slow(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


Remote = crossfade.remote(Worker)


@pytest.fixture(params=["local", "inline"])
def engine(request: pytest.FixtureRequest) -> Iterator[str]:
    crossfade.init(engine=request.param)
    yield request.param
    crossfade.shutdown()


@pytest.fixture
def session() -> Iterator[None]:
    crossfade.init()
    yield
    crossfade.shutdown()


def pairs() -> crossfade.CompiledGraph:
    """Both inputs go to another actor each, so that they are written one after the other."""
    one, other, third = (Remote.remote() for _ in range(3))
    with crossfade.InputNode() as inp:
        graph: crossfade.CompiledGraph = third.pair.bind(one.same.bind(inp[0]), other.same.bind(inp[1])).compile()
    return graph


@contextmanager
def handler(act: Callable[[], object], after_s: float) -> Iterator[None]:
    """Does something in the main thread in so many seconds, wherever it is then."""
    before = signal.signal(signal.SIGALRM, lambda *_: act())
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


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


def with_a_handler(move: Callable[..., Any], act: Callable[[], object]) -> Callable[..., Any]:
    """Does it, and then once what a signal's handler does there."""
    is_due = True

    def moved(*args: Any) -> Any:
        nonlocal is_due
        result = move(*args)
        if is_due:
            is_due = False
            act()
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
def test_a_real_deadline_gives_right_values_or_an_error(session: None) -> None:
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


@pytest.mark.parametrize("is_same", [True, False])
def test_a_handler_may_get_a_result_while_the_program_waits_for_one(session: None, is_same: bool) -> None:
    with crossfade.InputNode() as inp:
        graph = Remote.remote().slow.bind(inp).compile()
    with crossfade.InputNode() as inp:
        other = graph if is_same else Remote.remote().slow.bind(inp).compile()
    other.execute(0.01).get()
    got, begin_s = [], time.monotonic()
    with handler(lambda: got.append(other.execute(0.02).get()), 0.1):
        assert graph.execute(0.4).get(timeout=30) == 0.4
    assert got == [0.02]
    assert time.monotonic() - begin_s < 15  # it was woken: what it waits for came while the handler waited
    graph.teardown()
    other.teardown()


def test_a_session_that_another_thread_ends_tells_who_awaits_a_call() -> None:
    crossfade.init()
    call = Remote.remote().slow.remote(1.0)

    async def wait() -> Any:
        return await call

    timer = threading.Timer(0.1, crossfade.shutdown)
    timer.start()
    with pytest.raises(crossfade.CrossfadeError):
        asyncio.run(asyncio.wait_for(wait(), 20))
    timer.join()


def test_a_session_that_another_thread_ends_while_one_waits_gives_everything_back() -> None:
    num_before, errors = [], []

    def end() -> None:
        try:
            crossfade.shutdown()
        except BaseException as error:
            errors.append(error)

    for _ in range(4):
        crossfade.init()
        call = Remote.remote().slow.remote(1.0)
        timer = threading.Timer(0.05, end)
        timer.start()
        with pytest.raises(crossfade.CrossfadeError):
            call.get(timeout=20)
        timer.join()
        del call
        gc.collect()
        num_before.append(len(os.listdir("/proc/self/fd")))
    assert errors == []
    assert num_before[-1] <= num_before[0] + 2


@pytest.mark.parametrize("index", [0, 1])
def test_a_handler_that_executes_the_graph_in_the_middle_of_its_execute_is_refused(engine: str, index: int) -> None:
    graph, refused = pairs(), []

    def execute() -> None:
        with pytest.raises(crossfade.SessionError, match="in the middle of its own execute") as caught:
            graph.execute(2, 2)
        refused.append(caught.value)
        with pytest.raises(crossfade.SessionError, match="in the middle of its own execute"):
            asyncio.run(execute_async(graph))

    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    driver._writes[index] = with_a_handler(driver._writes[index], execute)
    assert graph.execute(1, 1).get() == (1, 1)
    assert len(refused) == 1
    assert graph.execute(3, 3).get() == (3, 3)
    graph.teardown()


async def execute_async(graph: crossfade.CompiledGraph) -> object:
    return await (await graph.execute_async(2, 2))


@pytest.mark.parametrize("index", [0, 1])
def test_a_handler_may_tear_the_graph_down_in_the_middle_of_its_execute(engine: str, index: int) -> None:
    graph = pairs()
    first = graph.execute(1, 1)
    driver: Any = graph._executions.opened._driver  # type: ignore[attr-defined]
    driver._writes[index] = with_a_handler(driver._writes[index], graph.teardown)
    try:
        late = graph.execute(2, 2)
    except crossfade.SessionError:
        pass
    else:
        with pytest.raises(crossfade.SessionError, match="torn down"):
            late.get(timeout=20)
    with pytest.raises(crossfade.SessionError, match="torn down"):
        first.get(timeout=20)
    with pytest.raises(crossfade.SessionError, match="torn down"):
        graph.execute(3, 3)
    again = pairs()
    assert again.execute(1, 1).get(timeout=20) == (1, 1)
    again.teardown()


def test_a_handler_may_tear_the_graph_down_while_the_program_waits_for_it(session: None) -> None:
    with crossfade.InputNode() as inp:
        graph = Remote.remote().slow.bind(inp).compile()
    graph.execute(0.01).get()
    ref = graph.execute(0.3)
    with handler(graph.teardown, 0.1), pytest.raises(crossfade.SessionError, match="torn down"):
        ref.get(timeout=20)


# Names, words, files


def test_an_actor_does_not_get_the_driver_s_name(engine: str) -> None:
    with pytest.raises(ValueError, match="driving process"):
        Remote.options(name="driver")
    long = Remote.options(name="x" * 400).remote()
    assert crossfade.get(long.same.remote(3)) == 3


def test_a_method_of_an_actor_cannot_be_sent(session: None) -> None:
    actor = Remote.remote()
    with pytest.raises(TypeError, match=r"method same of actor .* cannot be sent"):
        pickle.dumps(actor.same)


def test_the_inline_engine_says_what_lies_in_its_rings(capsys: pytest.CaptureFixture[str]) -> None:
    crossfade.init(engine="inline")
    graph = pairs()
    ref = graph.execute(1, 2)
    text = crossfade.dump(stacks=False)
    assert "is about to take" in text
    assert "1 of" in text
    assert ref.get() == (1, 2)
    crossfade.shutdown()


def test_what_is_no_file_and_no_plan_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="open file"):
        crossfade.dump("somewhere.txt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="text of a plan"):
        parse_plan(None)  # type: ignore[arg-type]
    with pytest.raises(FileNotFoundError, match=r"missing/a\.svg"):
        crossfade.Timeline("measured", ()).save(tmp_path / "missing" / "a.svg")
    crossfade.Timeline("measured", ()).save(tmp_path / ("a" * 250 + ".json"))
