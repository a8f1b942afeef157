"""Ctrl-C: it comes where everything is whole, ends every wait at once, and nothing is lost by it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade import interrupted
from crossfade.api import session as sessions
from crossfade.host.sockets import Connection
from tests.helpers.footprint import footprint
from tests.helpers.interrupt_storm import LEAST_CUTS, USES, storm
from tests.helpers.signals import send, sent_once


class Interrupting:
    """Ctrl-C comes while it is pickled."""

    def __init__(self, num: int = 1, pause_s: float = 0.0) -> None:
        self._num = num
        self._pause_s = pause_s

    def __reduce__(self) -> Any:
        for _ in range(self._num):
            signal.raise_signal(signal.SIGINT)
            time.sleep(self._pause_s)
        return int, ()


class Worker:
    def __init__(self, value: Any = None) -> None:
        self.num_calls = 0

    def echo(self, value: Any) -> Any:
        self.num_calls += 1
        return value

    def pair(self, one: Any, other: Any) -> Any:
        return one, other

    def calls(self) -> int:
        return self.num_calls

    def pid(self) -> int:
        return os.getpid()

    def until(self, fifo: str) -> str:
        """Returns when somebody writes to it."""
        with open(fifo) as file:
            return file.read()


Remote = crossfade.remote(Worker)


def echo_graph(*actors: Any, **options: Any) -> Any:
    with crossfade.InputNode() as inp:
        node: Any = inp
        for actor in actors:
            node = actor.echo.bind(node)
    return node.compile(**options)


def interrupt() -> None:
    send(signal.SIGINT)


def interrupt_once(is_so: Callable[[], object]) -> AbstractContextManager[None]:
    """Ctrl-C comes once something is so."""
    return sent_once(signal.SIGINT, is_so)


class StandsIn:
    """Whether the main thread is in a function of that name, and has not moved for a tenth of a second."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: tuple[object, int, float] = None, 0, 0.0

    def __call__(self) -> bool:
        frame = innermost = sys._current_frames()[threading.main_thread().ident or 0]
        place = innermost.f_code, innermost.f_lasti
        if place != self._seen[:2]:
            self._seen = *place, time.monotonic()
        while frame.f_back is not None and frame.f_code.co_name != self._name:
            frame = frame.f_back
        return frame.f_code.co_name == self._name and time.monotonic() - self._seen[2] > 0.1


def connections() -> list[Connection]:
    engine: Any = sessions.require().engine
    return [process.connection for process in engine.processes.living.values()]


def interrupted_after(sends: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises as Ctrl-C does behind so many pieces that are sent, once."""
    send_some, num = Connection._send_some, 0

    def sending(self: Connection, *args: Any) -> Any:
        nonlocal num
        result = send_some(self, *args)
        num += 1
        if num == sends:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(Connection, "_send_some", sending)


def test_a_storm_of_interrupts_loses_no_actor_and_no_value() -> None:
    counts = storm("SIGINT", 5.0, 1)
    assert counts["done"].keys() >= set(USES)
    assert sum(counts["cut"].values()) > LEAST_CUTS


def test_a_storm_of_a_handler_s_own_errors_loses_no_actor_and_mixes_no_values() -> None:
    counts = storm("SIGALRM", 5.0, 2)
    assert sum(counts["cut"].values()) > LEAST_CUTS


@pytest.mark.parametrize("sends", [1, 2])
@pytest.mark.parametrize("kill_actors", [False, True])
def test_an_interrupted_teardown_may_be_repeated(
    local: None, monkeypatch: pytest.MonkeyPatch, sends: int, kill_actors: bool
) -> None:
    actors = [Remote.remote() for _ in range(3)]
    graph, other = echo_graph(*actors), echo_graph(actors[0])
    assert graph.execute(1).get() == 1
    with monkeypatch.context() as patch:
        interrupted_after(sends, patch)
        with pytest.raises(KeyboardInterrupt):
            graph.teardown(kill_actors)
    graph.teardown(kill_actors, timeout=20)
    if not kill_actors:
        assert other.execute(2).get(timeout=20) == 2
        assert crossfade.get([actor.echo.remote(3) for actor in actors], timeout=20) == [3, 3, 3]


def test_an_interrupt_ends_a_teardown_that_waits(local: None, pipe: Path) -> None:
    actor = Remote.remote()
    graph = echo_graph(actor)
    busy = actor.until.remote(str(pipe))
    with interrupt_once(lambda: graph._executions.ended), pytest.raises(KeyboardInterrupt):
        graph.teardown()
    pipe.write_text("done")
    graph.teardown(timeout=20)
    assert busy.get(timeout=20) == "done"


@pytest.mark.parametrize("sends", [1, 2])
def test_an_interrupted_compile_leaves_actors_and_their_other_graphs_alone(
    local: None, monkeypatch: pytest.MonkeyPatch, sends: int
) -> None:
    actors = [Remote.remote() for _ in range(3)]
    graph = echo_graph(*actors)
    assert graph.execute(1).get() == 1
    echo_graph(*actors).teardown()
    num_before = footprint(os.getpid()).num_descriptors
    with monkeypatch.context() as patch:
        interrupted_after(sends, patch)
        with pytest.raises(KeyboardInterrupt):
            echo_graph(*actors)
    assert graph.execute(2).get(timeout=20) == 2
    again = echo_graph(*actors)
    assert again.execute(3).get(timeout=20) == 3
    again.teardown()
    engine: Any = sessions.require().engine
    assert len(engine._plans) == 1
    assert footprint(os.getpid()).num_descriptors == num_before


def test_an_interrupt_ends_a_compile_that_waits_for_an_actor(local: None, pipe: Path) -> None:
    actor = Remote.remote()
    graph = echo_graph(actor)
    assert graph.execute(1).get() == 1
    busy = actor.until.remote(str(pipe))
    engine: Any = sessions.require().engine
    with interrupt_once(lambda: engine.doorbell._sleeper), pytest.raises(KeyboardInterrupt):
        echo_graph(actor)
    pipe.write_text("done")
    assert busy.get(timeout=20) == "done"
    assert graph.execute(2).get(timeout=20) == 2
    engine.doorbell.wait_until(lambda: len(engine._plans) == 1, 20)
    assert len(engine._plans) == 1


def test_an_interrupt_while_a_large_argument_is_sent_to_a_busy_actor_leaves_it_whole(local: None, pipe: Path) -> None:
    actor = Remote.remote()
    pid = actor.pid.remote().get()
    busy = actor.until.remote(str(pipe))
    with interrupt_once(StandsIn("send")), pytest.raises(KeyboardInterrupt):
        actor.echo.remote(b"x" * (20 << 20))
    pipe.write_text("done")
    assert busy.get(timeout=20) == "done"
    assert actor.calls.remote().get(timeout=20) == 1  # it was made, once
    assert actor.pid.remote().get(timeout=20) == pid


def test_an_interrupted_start_of_an_actor_starts_none(local: None) -> None:
    with pytest.raises(KeyboardInterrupt):
        Remote.options(name="only").remote(Interrupting())
    actor = Remote.options(name="only").remote()
    assert actor.echo.remote(1).get() == 1
    assert len(connections()) == 1


def test_an_interrupt_in_the_middle_of_an_input_comes_when_it_is_written(local: None) -> None:
    one, other, third = (Remote.remote() for _ in range(3))
    with crossfade.InputNode() as inp:
        graph = third.pair.bind(one.echo.bind(inp[0]), other.echo.bind(inp[1])).compile()
    for _ in range(20):  # also of those that nobody can get
        with pytest.raises(KeyboardInterrupt):
            graph.execute(0, Interrupting())
    assert graph.execute(1, 1).get(timeout=20) == (1, 1)
    graph.teardown()


def test_the_second_interrupt_comes_at_once_where_the_first_one_was_held_back_for_long(
    local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupted, "PATIENCE_S", 0.05)
    graph = echo_graph(Remote.remote())
    begin_s = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        graph.execute(Interrupting(50, 0.1))
    assert time.monotonic() - begin_s < 3
    graph.teardown()


def test_an_interrupt_while_room_for_the_second_input_is_waited_for_keeps_executions_apart(local: None) -> None:
    one, other, third = (Remote.remote() for _ in range(3))
    with crossfade.InputNode() as inp:
        graph = third.pair.bind(one.echo.bind(inp[0]), other.echo.bind(inp[1])).compile()
    driver: Any = graph._executions.opened._driver
    engine: Any = sessions.require().engine
    has_room = driver._rooms[1]
    driver._rooms[1] = lambda: False
    for number in (1, 2):
        with interrupt_once(lambda: engine.doorbell._sleeper), pytest.raises(KeyboardInterrupt):
            graph.execute(number, number)
    driver._rooms[1] = has_room
    assert graph.execute(3, 3).get(timeout=20) == (3, 3)
    assert driver.num_submitted == 1  # no input of the others was written
    graph.teardown()


def test_a_wait_beside_another_thread_is_interrupted_too(local: None, pipe: Path) -> None:
    actor = Remote.remote()
    graph = actor.until.bind(crossfade.InputNode()).compile()
    ref = graph.execute(str(pipe))
    call = Remote.remote().echo.remote(1)
    assert call.get(timeout=20) == 1
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(ref.get(timeout=60)))
    thread.start()
    engine: Any = sessions.require().engine
    while not engine.doorbell._sleeper:
        os.sched_yield()
    with interrupt_once(lambda: graph._executions.watchers.waiting), pytest.raises(KeyboardInterrupt):
        ref.get(timeout=60)
    busy = actor.echo.remote(2)
    with interrupt_once(lambda: engine.doorbell._num_beside), pytest.raises(KeyboardInterrupt):
        busy.get(timeout=60)
    pipe.write_text("done")
    assert ref.get(timeout=20) == "done"
    assert busy.get(timeout=20) == 2
    thread.join()
    assert got == ["done"]
    graph.teardown()


def test_an_interrupted_shutdown_may_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    crossfade.init()
    actor = Remote.remote()
    pid = actor.pid.remote().get()
    engine: Any = sessions.require().engine
    with monkeypatch.context() as patch:
        patch.setattr("crossfade.engines.local_processes.await_end", interrupting)
        with pytest.raises(KeyboardInterrupt):
            crossfade.shutdown()
    assert not crossfade.is_initialized()
    crossfade.shutdown()
    assert engine.processes.pidfd < 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def interrupting(*_: object) -> Any:
    raise KeyboardInterrupt


def test_a_session_that_an_interrupt_has_left_half_ended_is_ended_before_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crossfade.init()
    pid = Remote.remote().pid.remote().get()
    with monkeypatch.context() as patch:
        patch.setattr("crossfade.engines.local_processes.await_end", interrupting)
        with pytest.raises(KeyboardInterrupt):
            crossfade.shutdown()
    crossfade.init()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    crossfade.shutdown()


def test_the_signal_is_taken_while_there_is_a_session_unless_the_program_has_it() -> None:
    theirs = signal.getsignal(signal.SIGINT)
    assert theirs is signal.default_int_handler
    crossfade.init()
    assert signal.getsignal(signal.SIGINT) is interrupted.on_interrupt
    crossfade.shutdown()
    assert signal.getsignal(signal.SIGINT) is theirs
    own: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: own.append(number))
    try:
        crossfade.init()
        signal.raise_signal(signal.SIGINT)
        assert own == [signal.SIGINT]
        crossfade.shutdown()
    finally:
        signal.signal(signal.SIGINT, theirs)


def test_asyncio_gets_interrupts_as_it_does_without_crossfade(local: None, pipe: Path) -> None:
    graph_of = Remote.remote()
    graph = graph_of.until.bind(crossfade.InputNode()).compile()
    seen: list[str] = []

    async def main() -> None:
        ref = await graph.execute_async(str(pipe))
        timer = threading.Timer(0.1, interrupt)
        timer.start()
        try:
            await ref
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert seen == ["cancelled"]
    pipe.write_text("done")
    graph.teardown()


def test_an_interrupt_in_a_destructor_of_ours_is_not_lost(local: None) -> None:
    seen: list[int] = []

    @interrupted.brief
    def destroy() -> None:
        signal.raise_signal(signal.SIGINT)
        seen.append(1)

    def destroy_and_go_on() -> None:
        destroy()
        seen.append(2)
        threading.Event().wait(20)

    with pytest.raises(KeyboardInterrupt):
        destroy_and_go_on()
    assert seen == [1, 2]
