"""What the Ray engine does, on a cluster of two or three nodes of this machine (`tests.helpers.ray_world`).

``python -m tests.helpers.ray_cases NAME...`` starts the cluster, runs the cases, and prints what became of each as JSON: nothing,
or the traceback.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.errors import SessionError
from crossfade.types import DRIVER
from tests.helpers import ray_deaths, ray_gpus, ray_taken_over, ray_three_nodes
from tests.helpers.ray_world import CASES, LONG, Worker, World, case, long

__all__ = ["CASES", "LONG", "ray_deaths", "ray_gpus", "ray_taken_over", "ray_three_nodes"]


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
        timeline = graph.timeline()
        assert timeline.hosts == graph.plan.hosts
        names = {
            event["args"]["name"] for event in timeline.to_chrome()["traceEvents"] if event["name"] == "process_name"
        }
        assert names == {f"{party} on {host}" for party, host in hosts.items()}
        spans = [span for span in timeline.spans if span.kind != "wait" and span.execution == 4]
    ends = {(span.actor, span.label): span for span in spans}
    driver, far = ends[DRIVER, "write i0"], next(span for (_, label), span in ends.items() if label == "run n0")
    assert driver.start_us < far.start_us + 500  # so well are clocks aligned, on one machine whose clock is one
    assert far.end_us < ends[DRIVER, "read n1"].end_us + 500


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
                makers.append(partial(_made_by, here[who], left, right))
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
def five_hundred_random_graphs(world: World) -> None:
    run_random_graphs(world, 500, seed=int(os.environ.get("SEED", "1")))


def _made_by(worker: Worker, left: int, right: int, made: list[Any]) -> Any:
    return worker.both(made[left], made[right])


def _check(each: tuple[Any, Any], makers: list[Callable[[list[Any]], Any]]) -> None:
    references, value = each
    made = [value]
    for make in makers:
        made.append(make(made))
    got = crossfade.get(references)
    for one, other in zip(got, made[1:], strict=True):
        np.testing.assert_array_equal(one, other)


@case
def collectives_reduce_gather_and_scatter_within_a_host_and_between_two(world: World) -> None:
    """By gloo: the tensors of actors without a GPU."""
    import torch

    for actors in ([world.far(), world.far(1)], [world.near(), world.far(), world.far(1)]):
        number = len(actors)
        with crossfade.InputNode() as inp:
            values = [actor.add.bind(inp) for actor in actors]
            dag = crossfade.MultiOutputNode(
                [
                    *crossfade.collective.allreduce.bind(values),
                    *crossfade.collective.allgather.bind(values),
                    *crossfade.collective.reducescatter.bind(values),
                ]
            )
        with dag.compile() as graph:
            assert {spec.transport for spec in graph.plan.collectives} == {"gloo"}
            for start in range(4):
                got = crossfade.get(graph.execute(torch.arange(start, start + 6.0)))
                brought = [torch.arange(start, start + 6.0) + (actor is actors[-1]) for actor in actors]
                total = torch.stack(brought).sum(0)
                assert all(each.equal(total) for each in got[:number])
                assert all(each.equal(torch.stack(brought).view(-1)) for each in got[number : 2 * number])
                assert torch.cat(got[2 * number :]).equal(total)


@long
def what_tcp_costs_is_measured(world: World) -> None:
    costs = crossfade.CostModel(tcp_us=0.0, tcp_us_per_mb=0.0)
    measured = crossfade.calibrate_tcp(costs, scheduling_strategy=world.at(world.nodes[0].node_id))
    assert 1.0 < measured.tcp_us + measured.tcp_us_per_mb < 100_000
    assert replace(measured, tcp_us=0.0, tcp_us_per_mb=0.0) == costs
    with pytest.raises(SessionError, match="the actor is on this host"):
        crossfade.calibrate_tcp(costs, scheduling_strategy=world.at(world.own))


@case
def a_failure_before_a_collective_between_hosts_is_the_result_of_all(world: World) -> None:
    import torch

    near, far = world.near(), world.far()
    with crossfade.InputNode() as inp:
        values = [near.fail.bind(inp.x), far.same.bind(inp.y)]
        dag = crossfade.MultiOutputNode(crossfade.collective.allreduce.bind(values))
    with dag.compile() as graph:
        for x in (torch.ones(1), torch.full((1,), 3.0), torch.ones(1)):
            for reference in graph.execute(x=x, y=torch.ones(1)):
                if x == 3:
                    with pytest.raises(ValueError, match="three"):
                        reference.get()
                else:
                    assert reference.get().tolist() == [2.0]


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
