"""What users do that is rare, on both engines: threads, odd arguments, errors, names and files, calls with several returns."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.api.arguments import Splitter
from crossfade.plan.plan import InputSpec
from tests.helpers import handlers
from tests.helpers.sessions import NUMPY, on_each_engine
from tests.helpers.threads import together

engine = on_each_engine(preload=NUMPY)


class Worker(handlers.Worker):
    def __init__(self, start: Any = None) -> None:
        self._start = start
        self._is_busy = False
        self.num_together = 0

    def same(self, value: Any) -> Any:
        self.num_together += self._is_busy
        self._is_busy = True
        time.sleep(0.0005)
        self._is_busy = False
        return value

    def together(self) -> int:
        return self.num_together

    def added(self, weights: Any, value: Any) -> float:
        return float(weights.sum() + value)

    def grown(self, array: Any) -> Any:
        array += 1
        return array

    def start_grown(self) -> Any:
        return self.grown(self._start)

    @crossfade.method(num_returns=2)
    def two(self, value: Any) -> Any:
        return value

    @crossfade.method(num_returns=2)
    def counted(self, value: Any) -> Iterator[Any]:
        yield value
        yield value + 1


Remote = crossfade.remote(Worker)


class Outer:
    def __init__(self) -> None:
        self._num_calls = 0

    def doubled(self, value: int) -> tuple[int, int]:
        self._num_calls += 1
        graph = crossfade.remote(Inner).remote().double.bind(crossfade.InputNode()).compile()
        ref = graph.execute(value)
        assert crossfade.wait([ref]) == ([ref], [])
        return ref.get(), self._num_calls


class WithY(np.ndarray[Any, Any]):
    """An array with one more attribute, which does not travel: it is read where `execute` is called."""

    y = 3


class Inner:
    def double(self, value: int) -> int:
        return 2 * value


def test_threads_that_execute_and_wait_get_their_own_values(engine: str) -> None:
    first, second = Remote.remote(), Remote.remote()
    graphs = []
    for _ in range(3):
        graphs.append(second.same.bind(first.same.bind(crossfade.InputNode())).compile())

    def work(index: int) -> None:
        for number in range(100 * index, 100 * index + 30):
            ref = graphs[index].execute(number)
            crossfade.wait([ref])
            assert (ref.get(), first.same.remote(number).get()) == (number, number)

    together(work, range(3))
    assert (first.together.remote().get(), second.together.remote().get()) == (0, 0)


def test_a_loop_and_a_thread_share_a_graph_with_room_for_one(engine: str) -> None:
    worker = Remote.remote()
    graph = worker.same.bind(crossfade.InputNode()).compile(max_inflight=1, submit_timeout=30)
    got: list[int] = []

    def execute(number: int) -> Any:
        """Once the loop has got the result that takes the room."""
        while True:
            try:
                return graph.execute(number)
            except crossfade.CapacityExceeded:
                os.sched_yield()

    def work() -> None:
        got.extend(execute(number).get(timeout=30) for number in range(40))

    async def loop() -> list[int]:
        return [await (await graph.execute_async(number)) for number in range(40)]

    thread = threading.Thread(target=work)
    thread.start()
    assert asyncio.run(loop()) == list(range(40))
    thread.join()
    assert got == list(range(40))


def test_constants_that_compare_in_their_own_way_stand_before_nodes(engine: str) -> None:
    worker = Remote.remote()
    graph = worker.added.bind(np.ones(3), crossfade.InputNode()).compile()
    assert graph.execute(1).get() == 4.0


def test_calls_with_several_returns_take_values_apart_as_graphs_do(engine: str) -> None:
    worker = Remote.remote()
    assert crossfade.get(worker.two.remote({"a": 1, "b": 2})) == ["a", "b"]
    assert sorted(crossfade.get(worker.two.remote({1, 2}))) == [1, 2]
    assert crossfade.get(worker.counted.remote(1)) == [1, 2]
    for value in (None, (1, 2, 3)):
        with pytest.raises(crossfade.TaskError, match=r"num_returns=2 and returned [13] values"):
            crossfade.get(worker.two.remote(value))


def test_arguments_and_results_of_calls_may_be_changed(engine: str) -> None:
    given = np.ones(500)
    worker = Remote.remote(given)
    result = worker.grown.remote(given).get()
    result += worker.start_grown.remote().get()
    assert (result == 4).all()
    assert (given == 1).all()


def test_parts_that_are_items_of_any_object(engine: str) -> None:
    worker = Remote.remote()
    with crossfade.InputNode() as given:
        graph = worker.same.bind(given["x"]).compile()
    assert graph.execute(np.zeros(3, dtype=[("x", "i4")])).get().tolist() == [0, 0, 0]
    assert graph.execute(defaultdict(lambda: 7)).get() == 7
    with pytest.raises(TypeError, match="missing the argument 'x'"):
        graph.execute([1, 2])


def test_odd_names_of_parts(engine: str) -> None:
    worker = Remote.remote()
    with crossfade.InputNode() as given:
        graph = crossfade.MultiOutputNode([worker.same.bind(given[""]), worker.same.bind(given["self"])]).compile()
    assert crossfade.get(graph.execute({"": 5, "self": 6})) == [5, 6]
    assert crossfade.get(graph.execute(**{"": 5, "self": 6})) == [5, 6]
    with pytest.raises(AttributeError, match=r"hint: write inp\['a b'\]"):
        getattr(given, "a b")
    with pytest.raises(ValueError, match="no argument has so many parts"):
        given[10**18]


def test_a_part_from_the_end_takes_one_argument() -> None:
    with pytest.raises(TypeError, match="takes one positional argument"):
        Splitter([InputSpec("i0", "[-1]")]).split((1, 2), {})


def test_time_limits_that_are_numbers_of_other_libraries(engine: str) -> None:
    ref = Remote.remote().same.remote(1)
    assert crossfade.wait([ref], timeout=np.float32(20)) == ([ref], [])  # type: ignore[arg-type]
    assert ref.get(timeout=np.float32(20)) == 1
    with pytest.raises(ValueError, match="timeout is nan"):
        crossfade.get(ref, timeout=float("nan"))


def test_get_waits_for_ever_with_minus_one_and_refuses_other_numbers_below_0(engine: str) -> None:
    worker = Remote.remote()
    with crossfade.InputNode() as inp, worker.slow.bind(inp).compile() as graph:
        refs = [worker.slow.remote(0.05), graph.execute(0.05), crossfade.put(0.05)]
        assert [ref.get(timeout=-1) for ref in refs] == crossfade.get(refs, timeout=-1.0) == [0.05] * 3
        assert graph.execute(0.06).get(timeout=-1) == 0.06
        for get in (
            *[ref.get for ref in refs],
            graph.execute(0).get,
            lambda timeout: crossfade.get(refs, timeout=timeout),
        ):
            with pytest.raises(
                ValueError, match=r"^timeout is -0.5\nhint: it is seconds, 0 or more, or None for ever$"
            ):
                get(timeout=-0.5)
            with pytest.raises(TypeError, match=r"^timeout is '1'\nhint: it is seconds"):
                get(timeout="1")


def test_what_is_said_to_be_taken_is_taken(engine: str) -> None:
    worker = Remote.remote()
    with crossfade.InputNode() as inp, worker.added.bind(inp, inp.y).compile() as graph:
        hint = r"one positional argument, which has y \(as an item or an attribute\)$"
        with pytest.raises(TypeError, match=hint):
            graph.execute(2, y=3)
        assert graph.execute(np.ones(2).view(WithY)).get() == 5.0
    names = [InputSpec("i0", "*"), InputSpec("i1", ".z"), InputSpec("i2", '["y"]'), InputSpec("i3", ".x")]
    with pytest.raises(TypeError, match=r"which has x, y and z \(as items or attributes\)$"):
        Splitter(names).split((), {})


def test_names_and_spins_that_are_none() -> None:
    with pytest.raises(ValueError, match="3 cannot be an actor's name"):
        Remote.options(name=3)
    for spin_us in (float("inf"), float("nan"), -1, "long"):
        with pytest.raises(ValueError, match=r"spin_us is .*\nhint:"):
            crossfade.init(spin_us=spin_us)  # type: ignore[arg-type]
    assert not crossfade.is_initialized()


def test_an_address_at_which_no_cluster_is_looked_for_is_told() -> None:
    for address in ("local", "auto"):
        with (
            pytest.warns(UserWarning, match="looks for no cluster .*\nhint: engine='ray'")
            if address == "auto"
            else nullcontext(list[warnings.WarningMessage]())
        ) as caught:
            session = crossfade.init(address, engine="inline")
        assert all(each.filename == __file__ for each in caught), "where init is called"
        assert repr(session) == "Session(engine='inline', actors started: 0)"
        crossfade.shutdown()
    with pytest.raises(ValueError, match="the address is '10"):
        crossfade.init("10.0.0.1:6379", engine="inline")


def test_several_graphs_begin_at_one_input(engine: str) -> None:
    one, other = Remote.remote(), Remote.remote()
    with crossfade.InputNode() as inp:
        other.same.bind(inp.x).compile()
        gc.collect()  # the part is still there
        middle, forgotten = one.same.bind(inp[0]), other.same.bind(inp[0])
        with pytest.raises(crossfade.GraphError, match="nothing uses"):
            middle.compile()
        del forgotten
        first = other.same.bind(middle).compile()
        value, _ = one.two.bind(inp[1])
        second = crossfade.MultiOutputNode([value, one.same.bind(middle)]).compile()
        third = other.together.bind().compile()
    assert first.execute(3).get() == 3
    assert crossfade.get(second.execute(4, (5, 6))) == [5, 4]
    first.teardown()
    assert crossfade.get(second.execute(7, (8, 9))) == [8, 7]
    assert first.plan.outputs != second.plan.outputs
    assert third.execute().get() == 0


@pytest.mark.parametrize("num", [5, 50_000])
def test_arrays_that_are_bound_are_read_only(engine: str, num: int) -> None:
    adder = Remote.remote()
    nodes = [adder.grown.bind(np.zeros(num)), adder.grown.bind(np.ones((num, 2)))]
    graph = crossfade.MultiOutputNode(nodes).compile()
    for _ in range(2):
        for ref in graph.execute():
            with pytest.raises(ValueError, match="read-only"):
                ref.get()
    added = adder.added.bind(np.ones((num, 2), order="F"), crossfade.InputNode()).compile()
    assert added.execute(0.5).get() == 2 * num + 0.5


def test_a_method_of_a_graph_may_wait_for_another_graph(engine: str) -> None:
    outer = crossfade.remote(Outer).remote()
    graph = outer.doubled.bind(crossfade.InputNode()).compile()
    assert [graph.execute(number).get(timeout=60) for number in (1, 2)] == [(2, 1), (4, 2)]
    graph.teardown()


def test_the_inline_engine_says_what_lies_in_its_rings(capsys: pytest.CaptureFixture[str]) -> None:
    crossfade.init(engine="inline")
    one, other = Remote.remote(), Remote.remote()
    graph = other.same.bind(one.same.bind(crossfade.InputNode())).compile()
    ref = graph.execute(1)
    text = crossfade.dump(stacks=False)
    assert "is about to take" in text
    assert "1 of" in text
    assert ref.get() == 1
    crossfade.shutdown()
