"""Every output, and every error, is there as soon as it can be: whatever other branches of the graph still do."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

import crossfade
from crossfade.dag import InputNode, MultiOutputNode
from tests.helpers.counts import num
from tests.helpers.paths import PathDraw, PathWorker, arrivals, bind_path, draws, is_late
from tests.helpers.sessions import TORCH

pytestmark = pytest.mark.timeout(60)

TRIES = 4
"""A machine may stand still for a moment; a path that is waited for too long is so each time."""


class Gate:
    """Methods that fail, that give what they are given, and that wait until a pipe is written."""

    def __init__(self, path: str = "") -> None:
        self._path = path
        self.num_calls = 0

    def fail(self, value: Any) -> Any:
        raise KeyError(value)

    def give(self, value: Any, *others: Any) -> Any:
        self.num_calls += 1
        return value

    def wait(self, value: Any) -> Any:
        self.num_calls += 1
        pipe = os.open(self._path, os.O_RDONLY)
        os.read(pipe, 1)
        os.close(pipe)
        return value

    def calls(self) -> int:
        return self.num_calls


RemoteGate = crossfade.remote(Gate)


class Pipe:
    """What `Gate.wait` waits for."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path, self._pipe = str(path), os.open(path, os.O_RDWR)

    def let_go(self, num: int = 1) -> None:
        """So many calls go on."""
        os.write(self._pipe, b"x" * num)

    def close(self) -> None:
        os.close(self._pipe)


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path / "gate")
    crossfade.init(preload=TORCH)
    yield pipe
    crossfade.shutdown()
    pipe.close()


def waiting_and_giving(gate: Pipe, **options: Any) -> Any:
    """A graph of two outputs, of which the first one waits."""
    gives, waits = RemoteGate.remote(), RemoteGate.remote(gate.path)
    with InputNode() as inp:
        return MultiOutputNode([waits.wait.bind(inp), gives.give.bind(inp)]).compile(**options)


def test_an_error_is_raised_though_another_output_never_comes(gate: Pipe) -> None:
    fails, waits = RemoteGate.remote(), RemoteGate.remote(gate.path)
    with InputNode() as inp:
        graph = MultiOutputNode([fails.fail.bind(inp), waits.wait.bind(inp)]).compile()
    refs = graph.execute(1)
    with pytest.raises(KeyError):
        crossfade.get(refs)
    with pytest.raises(KeyError):
        crossfade.get(refs[::-1])
    ready, rest = crossfade.wait(refs)
    assert (ready, rest) == ([refs[0]], [refs[1]])
    with pytest.raises(crossfade.GetTimeoutError):
        refs[1].get(timeout=0.01)
    gate.let_go()
    assert refs[1].get() == 1
    graph.teardown()


def test_an_output_is_there_before_a_slower_one(gate: Pipe) -> None:
    graph = waiting_and_giving(gate, max_inflight=3)
    refs = [graph.execute(number) for number in range(3)]
    assert [pair[1].get() for pair in refs] == [0, 1, 2]
    assert not refs[0][0].is_ready()
    gate.let_go(len(refs))
    assert crossfade.get(refs) == [[0, 0], [1, 1], [2, 2]]
    graph.teardown()


def test_a_method_fails_without_its_other_inputs_and_stays_in_step(gate: Pipe) -> None:
    """The late values are taken in later: the next execution gets its own."""
    takes, waits, may_fail = RemoteGate.remote(), RemoteGate.remote(gate.path), crossfade.remote(Odd).remote()
    with InputNode() as inp:
        late = waits.wait.bind(inp)
        dag = MultiOutputNode([takes.give.bind(late, may_fail.fail_if_odd.bind(inp)), may_fail.count.bind(inp)])
    graph = dag.compile(max_inflight=4)
    refs = [graph.execute(number) for number in (1, 3)]
    for ref, _ in refs:
        with pytest.raises(ValueError, match="odd"):
            ref.get()
    refs += [graph.execute(number) for number in (4, 5)]
    gate.let_go(len(refs))
    assert refs[2][0].get() == 4
    with pytest.raises(ValueError, match="5 is odd"):
        refs[3][0].get()
    assert takes.calls.remote().get() == 1
    graph.teardown()


class Odd:
    def fail_if_odd(self, number: int) -> int:
        if number % 2:
            raise ValueError(f"{number} is odd")
        return number

    def count(self, number: int) -> int:
        return number

    def slowly(self, number: int) -> int:
        time.sleep(0.02)
        return number

    def pair(self, *numbers: int) -> tuple[int, ...]:
        return numbers


def test_a_value_that_others_need_is_still_waited_for(gate: Pipe) -> None:
    takes, waits, fails = (RemoteGate.remote(gate.path) for _ in range(3))
    with InputNode() as inp:
        late = waits.wait.bind(inp)
        failed = takes.give.bind(late, fails.fail.bind(inp))
        graph = MultiOutputNode([failed, takes.give.bind(late)]).compile()
    for number in range(3):
        refs = graph.execute(number)
        with pytest.raises(KeyError):
            refs[0].get()
        assert not refs[1].is_ready()
        gate.let_go()
        assert refs[1].get() == number
    graph.teardown()


def test_a_party_of_a_collective_that_brings_an_error_does_not_wait(gate: Pipe) -> None:
    pytest.importorskip("torch", reason="collectives need torch")
    fails, waits = RemoteGate.remote(), RemoteGate.remote(gate.path)
    with InputNode() as inp:
        dag = MultiOutputNode(crossfade.collective.allreduce.bind([fails.fail.bind(inp), waits.wait.bind(inp)]))
    graph = dag.compile(max_inflight=2)
    for number in range(4):
        refs = graph.execute(number)
        with pytest.raises(KeyError, match=str(number)):
            refs[0].get()
        assert not refs[1].is_ready()
        gate.let_go()
        if number % 2:  # else the meeting may still go on when the next one is to begin
            with pytest.raises(KeyError, match=str(number)):
                refs[1].get()
    graph.teardown()


def test_each_output_can_be_awaited_by_itself(gate: Pipe) -> None:
    graph = waiting_and_giving(gate, max_inflight=3)

    async def both() -> list[Any]:
        pairs = [await graph.execute_async(number) for number in range(3)]
        late = [asyncio.ensure_future(_value(pair[0])) for pair in pairs]
        early = [await asyncio.wait_for(_value(pair[1]), 30) for pair in reversed(pairs)]
        assert not any(future.done() for future in late)
        await asyncio.to_thread(gate.let_go, len(pairs))
        return [early, await asyncio.gather(*late)]

    assert asyncio.run(both()) == [[2, 1, 0], [0, 1, 2]]
    graph.teardown()


async def _value(ref: crossfade.CompiledRef) -> Any:
    return await ref


def test_threads_get_outputs_of_one_execution_each_as_it_comes(gate: Pipe) -> None:
    graph = waiting_and_giving(gate)
    refs = graph.execute(7)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(refs[0].get()))
    thread.start()
    assert refs[1].get(timeout=30) == 7
    assert not got
    gate.let_go()
    thread.join()
    assert got == [7]
    graph.teardown()


def test_a_loop_that_got_one_output_waits_for_the_other_and_is_not_refused(gate: Pipe) -> None:
    """Whether the other one was dropped or is still held."""
    graph = waiting_and_giving(gate, max_inflight=1)
    refs = graph.execute(0)
    with pytest.raises(crossfade.CapacityExceeded):
        graph.execute(1)
    for number in range(1, 4):
        assert refs[1].get() == number - 1
        if number == 2:
            del refs[0]
        gate.let_go()
        refs = graph.execute(number)
    gate.let_go()
    assert crossfade.get(refs) == [3, 3]
    graph.teardown()


@pytest.mark.parametrize("engine", ["local", "inline"])
def test_many_executions_that_fail_early_are_written_once_each(engine: str) -> None:
    """They are over before a slower actor has read its input: the rings of the inputs are full, and nothing is half written."""
    crossfade.init(engine=engine)
    fails, slow, joins = (crossfade.remote(Odd).remote() for _ in range(3))
    with InputNode() as inp:
        graph = joins.pair.bind(fails.fail_if_odd.bind(inp[0]), slow.slowly.bind(inp[1])).compile(max_inflight=2)
    for number in range(12):
        ref = graph.execute(number, number)
        if number % 2:
            with pytest.raises(ValueError, match=f"{number} is odd"):
                ref.get()
        else:
            assert ref.get() == (number, number)
    graph.teardown()
    crossfade.shutdown()


def test_a_submit_that_timed_out_and_one_in_a_loop_leave_nothing_half_written(gate: Pipe) -> None:
    joins, waits, fails = (RemoteGate.remote(gate.path) for _ in range(3))
    with InputNode() as inp:
        dag = joins.give.bind(fails.fail.bind(inp[0]), waits.wait.bind(inp[1]))
    graph = dag.compile(max_inflight=1, submit_timeout=0.05)
    for number in range(2):  # one is waiting, and one lies in the ring
        with pytest.raises(KeyError):
            graph.execute(number, number).get()
    for _ in range(2):
        with pytest.raises(crossfade.ChannelTimeout):
            graph.execute(2, 2)

    async def in_loop() -> str:
        pending = asyncio.ensure_future(graph.execute_async(3, 3))
        done, _ = await asyncio.wait([pending], timeout=0.05)
        assert not done
        await asyncio.to_thread(gate.let_go, 3)
        with pytest.raises(KeyError):
            await (await pending)
        return "done"

    assert asyncio.run(in_loop()) == "done"
    gate.let_go()
    graph.teardown()


def test_an_error_is_raised_at_once_while_another_thread_takes_results_in(gate: Pipe) -> None:
    fails, waits = (RemoteGate.remote(gate.path) for _ in range(2))
    with InputNode() as inp:
        graph = MultiOutputNode([waits.wait.bind(inp), fails.fail.bind(waits.wait.bind(inp))]).compile()
    refs = graph.execute(1)
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(refs[0].get()))
    thread.start()
    gate.let_go(2)  # the first output; the second fails once its method has been let go, too
    with pytest.raises(KeyError):
        crossfade.get([refs[1], refs[0]])
    thread.join()
    assert got == [1]
    graph.teardown()


def test_a_death_is_raised_at_once_by_get_of_results_of_several_graphs(gate: Pipe) -> None:
    dies, waits = (RemoteGate.remote(gate.path) for _ in range(2))
    graphs = [actor.wait.bind(InputNode()).compile() for actor in (dies, waits)]
    refs = [graph.execute(1) for graph in graphs]
    crossfade.kill(dies)
    with pytest.raises(crossfade.ActorDiedError):
        crossfade.get([refs[1], refs[0]])
    gate.let_go()
    assert refs[1].get() == 1


def test_results_that_came_stay_and_others_end_with_the_graph(gate: Pipe) -> None:
    graph = waiting_and_giving(gate)
    refs = graph.execute(7)
    assert refs[1].get() == 7
    errors: list[BaseException] = []
    waiting = threading.Event()

    def get() -> None:
        waiting.set()
        try:
            refs[0].get()
        except crossfade.CrossfadeError as error:
            errors.append(error)

    thread = threading.Thread(target=get)
    thread.start()
    waiting.wait()
    with pytest.raises(crossfade.TeardownTimeout):
        graph.teardown(timeout=0.05)
    thread.join()
    gate.let_go()
    graph.teardown()
    assert refs[1].get() == 7
    assert isinstance(errors[0], crossfade.exceptions.RayChannelError)
    for call in (refs[0].get, lambda: graph.execute(1), lambda: crossfade.get(refs)):
        with pytest.raises(crossfade.exceptions.RayChannelError, match="torn down"):
            call()


def test_on_the_inline_engine_an_error_does_not_wait_for_methods_that_come_later() -> None:
    crossfade.init(engine="inline")
    fails, waits = RemoteGate.remote(), RemoteGate.remote("/nothing")
    with InputNode() as inp:
        graph = MultiOutputNode([fails.fail.bind(inp), waits.give.bind(inp)]).compile()
    with pytest.raises(KeyError):
        crossfade.get(graph.execute(1))
    assert waits.calls.remote().get() == 0
    graph.teardown()
    crossfade.shutdown()


# Random graphs


def test_an_error_that_another_thread_has_taken_in_and_not_counted_yet_is_raised(engine: str) -> None:
    actor = RemoteGate.remote()
    with InputNode() as inp:
        graph = MultiOutputNode([actor.give.bind(inp), actor.fail.bind(inp)]).compile()
    refs = graph.execute(1)
    crossfade.wait(refs, num_returns=2)
    graph._executions.num_failures = 0
    with pytest.raises(crossfade.TaskError):
        crossfade.get(refs)
    graph.teardown()


@pytest.fixture(scope="module")
def actors() -> Iterator[list[crossfade.ActorHandle]]:
    crossfade.init()
    yield [crossfade.remote(PathWorker).remote() for _ in range(3)]
    crossfade.shutdown()


@pytest.mark.timeout(num(600, 3600))
@settings(max_examples=num(40, 500))
@given(draw=draws())
def test_outputs_and_errors_come_at_the_end_of_their_own_paths(
    actors: list[crossfade.ActorHandle], draw: PathDraw
) -> None:
    """Every output comes at the end of its path; one execution after the other, as their late branches may still be busy."""
    late = ""
    with bind_path(draw, actors).compile(max_inflight=draw.depth) as graph:
        for _ in range(TRIES):
            late = is_late(graph.plan, draw, arrivals(graph))
            if not late:
                break
            settle(actors)
    assert not late, f"{late}\n{draw}"


def settle(actors: list[crossfade.ActorHandle]) -> None:
    """Waits until all actors have done what was begun."""
    crossfade.get([actor.__ray_ready__.remote() for actor in actors])
