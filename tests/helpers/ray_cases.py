"""What the Ray engine does, on a cluster of two nodes of this machine, which count as two hosts.

``python -m tests.helpers.ray_cases NAME...`` starts the cluster, runs the cases, and prints what became of each as JSON: nothing,
or the traceback.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.errors import ActorDiedError, GraphError
from crossfade.types import DRIVER
from tests.helpers.programs import started

CASES: dict[str, Callable[[Any], None]] = {}
LONG: list[str] = []


def case(function: Callable[[Any], None]) -> Callable[[Any], None]:
    CASES[function.__name__] = function
    return function


def long(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """A case that takes seconds."""
    LONG.append(function.__name__)
    return case(function)


class Worker:
    """An actor's class, for both engines' decorators."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.kept: list[Any] = []

    def add(self, value: Any) -> Any:
        return value + self.offset

    def both(self, left: Any, right: Any = 0) -> Any:
        return left + right

    def split(self, value: Any) -> tuple[Any, Any]:
        return value, -value

    def same(self, value: Any) -> Any:
        return value

    def keep(self, value: Any) -> int:
        self.kept.append(value)
        return len(self.kept)

    def sum_of_kept(self, _: Any) -> float:
        return float(sum(np.sum(each) for each in self.kept))

    def fail(self, value: Any) -> Any:
        if value == 3:
            raise ValueError("three")
        return value

    def sleep(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds

    def pid(self) -> int:
        return os.getpid()

    async def wait(self, value: Any) -> Any:
        return value


class World:
    """The cluster. ``near`` and ``far`` place an actor on the driver's node, or on the other one."""

    def __init__(self) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.ray = ray
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
        self.nodes: list[Any] = []
        self.actors: dict[tuple[str, int], Any] = {}
        self.add_node()
        ray.init(address=self.cluster.address, logging_level="ERROR", log_to_driver=False)
        self.own = ray.get_runtime_context().get_node_id()

    def add_node(self) -> None:
        self.nodes.append(self.cluster.add_node(num_cpus=4))

    def at(self, node: str) -> Any:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        return NodeAffinitySchedulingStrategy(node, soft=False)

    def _new(self, node: str, offset: int, **options: Any) -> Any:
        return crossfade.remote(Worker).options(scheduling_strategy=self.at(node), **options).remote(offset)

    def _known(self, node: str, offset: int) -> Any:
        """To start a worker takes seconds: cases share those that they leave as they were."""
        if (node, offset) not in self.actors:
            self.actors[node, offset] = self._new(node, offset)
        return self.actors[node, offset]

    def near(self, offset: int = 0) -> Any:
        return self._known(self.own, offset)

    def far(self, offset: int = 0) -> Any:
        return self._known(self.nodes[0].node_id, offset)

    def near_victim(self, **options: Any) -> Any:
        return self._new(self.own, 1, **options)

    def far_victim(self, which: int = 0, **options: Any) -> Any:
        return self._new(self.nodes[which].node_id, 1, **options)

    def rays(self, offset: int = 0, *, is_far: bool = False, **options: Any) -> Any:
        node = self.nodes[0].node_id if is_far else self.own
        return self.ray.remote(Worker).options(scheduling_strategy=self.at(node), **options).remote(offset)


@case
def the_same_graph_runs_on_one_node_and_on_two(world: World) -> None:
    for make in (world.near, world.far):
        first, second = world.near(1), make(10)
        with crossfade.InputNode() as inp:
            left, right = first.split.options(num_returns=2).bind(inp.x)
            dag = crossfade.MultiOutputNode(
                [second.both.bind(left, right=inp.y), second.add.bind(right), first.add.bind(left)]
            )
        with dag.compile() as graph:
            assert bool(graph.plan.hosts) == (make == world.far)
            assert crossfade.parse_plan(str(graph.plan)) == graph.plan
            for number in range(30):
                assert crossfade.get(graph.execute(x=number, y=5)) == [number + 5, 10 - number, number + 1]


@case
def values_of_all_kinds_cross(world: World) -> None:
    first, second = world.far(), world.near()
    random = np.random.default_rng(0)
    values: list[Any] = [None, 1, "x" * 5000, b"", b"y" * 100_000, {"a": [1, (2, 3)]}, list(range(3000))]
    values += [random.integers(0, 255, size, dtype=np.uint8) for size in (0, 1, 900, 1100, 70_000, 3_000_000, 5)]
    values += [{"a": np.arange(5.0), "b": [np.arange(200_000), np.zeros((3, 0))]}]
    with crossfade.InputNode() as inp:
        dag = first.same.bind(second.same.bind(first.same.bind(inp)))
    with dag.compile() as graph:
        references = [graph.execute(value) for value in values[:8]]
        got = [reference.get() for reference in references]
        got += [graph.execute(value).get() for value in values[8:]]
        for value, back in zip(values, got, strict=True):
            np.testing.assert_equal(back, value)


@case
def a_value_for_several_readers_of_a_host_crosses_once(world: World) -> None:
    maker, readers = world.near(), [world.far(k) for k in range(3)]
    with crossfade.InputNode() as inp:
        value = maker.same.bind(inp)
        dag = crossfade.MultiOutputNode([reader.add.bind(value) for reader in readers])
    with dag.compile() as graph:
        (channel,) = [spec for spec in graph.plan.channels if spec.value == "n0"]
        assert len(channel.readers) == 3
        for number in range(20):
            results = crossfade.get(graph.execute(np.full(50_000, number)))
            assert [result[0] for result in results] == [number, number + 1, number + 2]
        statistics = graph.statistics().actors
        assert statistics[channel.writer].channels["write n0"]["num_values"] == 20
        assert 20 * 400_000 < statistics[channel.writer].channels["write n0"]["num_bytes"] < 20 * 401_000
        assert statistics[channel.landing].host != statistics[DRIVER].host


@case
def kept_values_never_stop_a_channel(world: World) -> None:
    keeper = world.far(2)
    with crossfade.InputNode() as inp:
        dag = crossfade.MultiOutputNode([keeper.keep.bind(inp), keeper.sum_of_kept.bind(inp)])
    with dag.compile(max_inflight=2) as graph:
        for number in range(12):
            kept, total = crossfade.get(graph.execute(np.full(30_000, number)))
            assert (kept, total) == (number + 1, 30_000.0 * sum(range(number + 1)))


@case
def errors_of_methods_arrive_and_the_graph_goes_on(world: World) -> None:
    first, second = world.far(), world.near()
    with crossfade.InputNode() as inp:
        dag = second.add.bind(first.fail.bind(inp))
    with dag.compile() as graph:
        for number in range(6):
            if number == 3:
                with pytest.raises(ValueError, match="three"):
                    graph.execute(number).get()
            else:
                assert graph.execute(number).get() == number


@case
def an_endless_stream_at_every_depth(world: World) -> None:
    first, second = world.far(1), world.near(1)
    for depth in (1, 2, 7):
        with crossfade.InputNode() as inp:
            dag = first.add.bind(second.add.bind(first.add.bind(inp)))
        with dag.compile(max_inflight=depth) as graph:
            pending = []
            for number in range(60):
                pending.append(graph.execute(number))
                if len(pending) == depth:
                    assert pending.pop(0).get() == number - depth + 4
            assert [reference.get() for reference in pending] == [62 - k for k in range(depth - 2, -1, -1)]


@case
def a_busy_host_does_not_stop_what_others_read_there(world: World) -> None:
    """The first reader's process takes in what comes for both."""
    maker, busy, other = world.near(), world.far(), world.far(1)
    with crossfade.InputNode() as inp:
        value = maker.same.bind(inp)
        dag = crossfade.MultiOutputNode([busy.sleep.bind(value), other.same.bind(value)])
    with dag.compile() as graph:
        start = time.monotonic()
        graph.execute(0.4)
        slow, quick = graph.execute(0.2)
        assert quick.get() == 0.2
        assert time.monotonic() - start < 0.35
        assert slow.get() == 0.2


@case
def clocks_and_statistics_know_hosts(world: World) -> None:
    first, second = world.far(1), world.near(1)
    with crossfade.InputNode() as inp:
        dag = second.add.bind(first.add.bind(inp))
    with dag.compile(record=True) as graph:
        for number in range(5):
            graph.execute(number).get()
        hosts = {party: each.host for party, each in graph.statistics().actors.items()}
        assert hosts == graph.plan.hosts
        assert len(set(hosts.values())) == 2
        spans = [span for span in graph.timeline().spans if span.kind != "wait" and span.execution == 4]
    ends = {(span.actor, span.label): span for span in spans}
    driver, far = ends[DRIVER, "write i0"], next(span for (_, label), span in ends.items() if label == "run n0")
    assert driver.start_us < far.start_us + 500  # so well are clocks aligned, on one machine whose clock is one
    assert far.end_us < ends[DRIVER, "read n1"].end_us + 500


@case
def what_cannot_be_taken_over_is_refused_with_the_reason(world: World) -> None:
    from ray.dag import InputNode

    first = world.rays(1)
    with InputNode() as inp:
        dags = {
            "async method": first.wait.bind(inp),
            "makes an actor": world.ray.remote(Worker).bind(1).add.bind(inp),
            "remote function": first.add.bind(world.ray.remote(_function).bind(inp)),
        }
    for reason, dag in dags.items():
        with pytest.raises(GraphError, match=rf"{reason}(.|\n)*hint: "):
            crossfade.compile(dag)


def _function(value: Any) -> Any:
    return value


def _dies(call: Callable[[], Any], *words: str, within_s: float) -> None:
    """A call raises that an actor has died, naming it and its node."""
    start = time.monotonic()
    with pytest.raises(ActorDiedError) as caught:
        _repeat(call, within_s + 5)
    for word in words:
        assert word in str(caught.value)
    assert time.monotonic() - start < within_s


def _repeat(call: Callable[[], Any], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        call()


@case
def a_dead_actor_is_named_with_its_node_and_others_go_on(world: World) -> None:
    for make in (world.near_victim, world.far_victim):
        victim, other = make(), world.near(2)
        pid = crossfade.get(victim.pid.remote())
        with crossfade.InputNode() as inp:
            graph = other.add.bind(victim.add.bind(inp)).compile()
        host = graph.plan.hosts.get(victim._info.id, "")
        assert graph.execute(1).get() == 4
        os.kill(pid, 9)
        _dies(lambda graph=graph: graph.execute(1).get(), victim._info.id, host, within_s=3.0)  # type: ignore[misc]
        graph.teardown()
        assert crossfade.get(other.add.remote(1)) == 3
        with crossfade.InputNode() as inp:
            graph = other.add.bind(inp).compile()
        assert graph.execute(1).get() == 3
        graph.teardown()


@long
def a_restarted_actor_can_be_compiled_again(world: World) -> None:
    victim, other = world.far_victim(max_restarts=2), world.near(2)
    with crossfade.InputNode() as inp:
        dag = other.add.bind(victim.add.bind(inp))
    for _ in range(2):
        graph = dag.compile()
        assert graph.execute(1).get() == 4
        os.kill(crossfade.get(victim.pid.remote()), 9)
        _dies(lambda graph=graph: graph.execute(1).get(), victim._info.id, within_s=3.0)  # type: ignore[misc]
        graph.teardown()
    with dag.compile() as graph:
        assert graph.execute(1).get() == 4


@long
def a_node_that_dies_takes_its_actors_along_and_no_others(world: World) -> None:
    world.add_node()
    victim, other = world.far_victim(-1), world.far(2)
    with crossfade.InputNode() as inp:
        graph = other.add.bind(victim.add.bind(inp)).compile()
    host = graph.plan.hosts[victim._info.id]
    assert graph.execute(1).get() == 4
    world.cluster.remove_node(world.nodes.pop(), allow_graceful=False)
    _dies(lambda: graph.execute(1).get(), victim._info.id, host, within_s=8.0)
    graph.teardown()
    with crossfade.InputNode() as inp, other.add.bind(inp).compile() as graph:
        assert graph.execute(1).get() == 3


@case
def random_graphs_give_what_they_give_in_one_thread(world: World) -> None:
    run_random_graphs(world, 12, seed=0)


def run_random_graphs(world: World, number: int, seed: int) -> None:
    """Graphs of two to twelve calls on four actors of two hosts, against the same calls made here."""
    random = Random(seed)
    actors = [world.near(k) if k % 2 else world.far(k) for k in range(4)]
    here = [Worker(k) for k in range(4)]
    for _ in range(number):
        with crossfade.InputNode() as inp:
            nodes: list[Any] = [inp]
            makers: list[Callable[[list[Any]], Any]] = []
            for _ in range(random.randint(2, 12)):
                who, left, right = random.randrange(4), random.randrange(len(nodes)), random.randrange(len(nodes))
                nodes.append(actors[who].both.bind(nodes[left], nodes[right]))
                makers.append(lambda made, who=who, left=left, right=right: here[who].both(made[left], made[right]))  # type: ignore[misc]
            dag = crossfade.MultiOutputNode(nodes[1:])
        with dag.compile(max_inflight=random.choice((1, 2, 10)), overlap=random.random() < 0.5) as graph:
            values = [np.full(random.choice((1, 100, 40_000)), k) for k in range(4)]
            pending: list[tuple[Any, Any]] = []
            for value in values:
                if len(pending) == graph.plan.max_inflight:
                    _check(pending.pop(0), makers)
                pending.append((graph.execute(value), value))
            for each in pending:
                _check(each, makers)


@long
def a_killed_driver_leaves_no_actor(world: World) -> None:
    """Another driver of the same cluster, with an actor on each node."""
    code = (
        "import os, ray, crossfade\n"
        "from tests.helpers.ray_cases import Worker\n"
        "from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as At\n"
        f"ray.init(address={world.cluster.address!r}, logging_level='ERROR', log_to_driver=False)\n"
        f"nodes = {[world.own, world.nodes[0].node_id]!r}\n"
        "made = [crossfade.remote(Worker).options(scheduling_strategy=At(node, soft=False)).remote(1) for node in nodes]\n"
        "with crossfade.InputNode() as inp:\n"
        "    graph = made[1].add.bind(made[0].add.bind(inp)).compile()\n"
        "assert graph.execute(1).get() == 3\n"
        "print(*crossfade.get([actor.pid.remote() for actor in made]), flush=True)\n"
        "input()\n"
    )
    with started("-c", code) as driver:
        assert driver.stdout is not None
        pids = list(map(int, driver.stdout.readline().split()))
        assert len(pids) == 2
        driver.kill()
        start = time.monotonic()
        while any(os.path.exists(f"/proc/{pid}") for pid in pids):
            assert time.monotonic() - start < 5.0
            time.sleep(0.02)


@long
def five_hundred_random_graphs(world: World) -> None:
    run_random_graphs(world, 500, seed=int(os.environ.get("SEED", "1")))


@long
def actors_that_are_killed_again_and_again(world: World) -> None:
    """Each time the error names the victim, the others go on, and nothing is left behind."""
    random = Random(2)
    other = world.far(2)
    folders = set(os.listdir(tempfile.gettempdir()))
    for number in range(int(os.environ.get("KILLS", "50"))):
        victim = random.choice((world.near_victim, world.far_victim))()
        with crossfade.InputNode() as inp:
            ends = (victim, other) if random.random() < 0.5 else (other, victim)
            graph = ends[1].add.bind(ends[0].add.bind(inp)).compile()
        pid = crossfade.get(victim.pid.remote())
        references = [graph.execute(np.full(random.choice((1, 100_000)), number)) for _ in range(random.randint(0, 5))]
        os.kill(pid, 9)
        _dies(lambda graph=graph: graph.execute(1).get(), victim._info.id, within_s=6.0)  # type: ignore[misc]
        graph.teardown()
        del references
    assert crossfade.get(other.add.remote(1)) == 3
    assert {name for name in set(os.listdir(tempfile.gettempdir())) - folders if name.startswith("crossfade-")} == set()


def _check(each: tuple[Any, Any], makers: list[Callable[[list[Any]], Any]]) -> None:
    references, value = each
    made = [value]
    for make in makers:
        made.append(make(made))
    got = crossfade.get(references)
    for one, other in zip(got, made[1:], strict=True):
        np.testing.assert_array_equal(one, other)


@long
def collectives_are_done_within_a_host(world: World) -> None:
    import torch
    from ray.dag import InputNode, MultiOutputNode
    from ray.experimental.collective import allreduce

    actors = [world.far(), world.far(1)]
    with crossfade.InputNode() as inp:
        reduced = crossfade.collective.allreduce.bind([actor.same.bind(inp) for actor in actors])
        dag = crossfade.MultiOutputNode(reduced)
    with dag.compile() as graph:
        for got in crossfade.get(graph.execute(torch.ones(4))):
            assert got.tolist() == [2.0] * 4
    plain = [world.rays(1), world.rays(2)]
    with InputNode() as inp:
        reduced = allreduce.bind([actor.same.bind(inp) for actor in plain])
        theirs = MultiOutputNode(reduced)
    graph = crossfade.compile(theirs)
    for got in world.ray.get(graph.execute(torch.ones(3))):
        assert got.tolist() == [2.0] * 3
    graph.teardown()


@case
def rays_own_graphs_are_taken_over(world: World) -> None:
    from ray.dag import InputNode, MultiOutputNode

    ray = world.ray
    first, second = world.rays(1), world.rays(10, is_far=True)
    with InputNode() as inp:
        left, right = first.split.options(num_returns=2).bind(inp[0])
        dag = MultiOutputNode([second.both.bind(left, right=inp.y), second.add.bind(right), first.add.bind(inp[0])])
    graph = crossfade.compile(dag)
    assert ray.get(graph.execute(7, y=1)) == [8, 3, 8]
    assert ray.get(first.add.remote(1)) == 2  # ordinary calls go on
    graph.teardown()
    with InputNode() as inp:
        dag = second.add.bind(first.add.bind(inp))
    graph = crossfade.compile(dag, enable_asyncio=True)

    async def use() -> list[Any]:
        futures = [await graph.execute_async(number) for number in range(5)]
        return [await future for future in futures]

    assert asyncio.run(use()) == [11, 12, 13, 14, 15]
    graph.teardown()
    crossfade.shutdown()
    world.actors.clear()
    assert ray.get(second.add.remote(1)) == 11  # they are the user's, and live on
    with InputNode() as inp:
        graph = crossfade.compile(second.add.bind(inp))
    assert ray.get(graph.execute(1)) == 11
    ray.kill(second)
    _dies(lambda: ray.get(graph.execute(1)), "Worker0", within_s=5.0)


def main(names: list[str]) -> None:
    world = World()
    said = {}
    for name in names:
        start = time.monotonic()
        try:
            CASES[name](world)
            said[name] = ""
        except BaseException:
            said[name] = traceback.format_exc()
        print(f"{name}: {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
    crossfade.shutdown()
    print(json.dumps(said), flush=True)
    world.ray.shutdown()
    world.cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
