"""What the Ray engine does when actors, workers and nodes die (`tests.helpers.ray_world`)."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.errors import ActorDiedError, ActorError
from tests.helpers.programs import started
from tests.helpers.ray_world import Worker, World, await_ends, case, dies, long, run


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
        dies(partial(run, graph), victim._info.id, host, within_s=3.0)
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
        dies(partial(run, graph), victim._info.id, within_s=3.0)
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
    dies(partial(run, graph), victim._info.id, host, within_s=8.0)
    graph.teardown()
    with crossfade.InputNode() as inp, other.add.bind(inp).compile() as graph:
        assert graph.execute(1).get() == 3


@case
def a_connection_that_breaks_between_the_living_is_told_at_once(world: World) -> None:
    """The agents say that nobody has died: nothing is waited for."""
    near, far = world.near(2), world.far(2)
    with crossfade.InputNode() as inp:
        graph = near.add.bind(far.break_wires.bind(near.add.bind(inp))).compile()
    start = time.monotonic()
    with pytest.raises(ActorError, match="cannot go on with the graph") as caught:
        graph.execute(1).get()
    assert not isinstance(caught.value, ActorDiedError)
    assert time.monotonic() - start < 1.5
    graph.teardown()
    assert crossfade.get([near.add.remote(1), far.add.remote(1)]) == [3, 3]


@case
def a_lost_connection_with_a_silent_host_names_actor_and_node(world: World) -> None:
    """As where a link is cut: no process of that host says anything, and the agent's connection is still taken for alive."""
    far = world.far(2)
    with crossfade.InputNode() as inp:
        graph = far.add.bind(inp).compile()
    assert run(graph) == 3
    silent = [crossfade.get(far.pid.remote()), *_agents()]
    assert len(silent) > 1
    try:
        for pid in silent:
            os.kill(pid, signal.SIGSTOP)
        Worker().break_wires(None)
        with pytest.raises(ActorError, match=f"actor {far._info.id} cannot go on .* is lost") as caught:
            run(graph)
        assert graph.plan.hosts[far._info.id] in str(caught.value)
    finally:
        for pid in silent:
            os.kill(pid, signal.SIGCONT)
    graph.teardown()
    assert crossfade.get(far.add.remote(1)) == 3


def _agents() -> list[int]:
    """The processes of all hosts' agents."""
    titles = {path: path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")}
    return [int(path.parent.name) for path, title in titles.items() if title.startswith(b"ray::_AgentActor")]


@long
def an_actor_that_dies_in_a_collective_is_named_and_others_go_on(world: World) -> None:
    import torch

    for make in (world.near_victim, world.far_victim):
        victim, others = make(), [world.near(2), world.far(2)]
        pid = crossfade.get(victim.pid.remote())
        with crossfade.InputNode() as inp:
            values = [actor.add.bind(inp) for actor in (victim, *others)]
            graph = crossfade.MultiOutputNode(crossfade.collective.allreduce.bind(values)).compile()
        assert [got.tolist() for got in crossfade.get(graph.execute(torch.zeros(2)))] == [[5.0, 5.0]] * 3
        os.kill(pid, 9)
        dies(partial(run, graph, torch.zeros(2)), victim._info.id, within_s=6.0)
        graph.teardown()
        with crossfade.InputNode() as inp:
            values = [actor.add.bind(inp) for actor in others]
            with crossfade.MultiOutputNode(crossfade.collective.allreduce.bind(values)).compile() as graph:
                assert [got.tolist() for got in crossfade.get(graph.execute(torch.zeros(2)))] == [[4.0, 4.0]] * 2


@long
def a_killed_driver_leaves_no_actor(world: World) -> None:
    """Another driver of the same cluster, with an actor on each node."""
    code = (
        "import os, ray, crossfade\n"
        "from tests.helpers.ray_world import Worker\n"
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
        await_ends(pids, within_s=5.0)


@long
def actors_workers_and_nodes_that_are_killed(world: World) -> None:
    """Each time the error names the victim, the others go on, and nothing is left behind: of five kills two end an actor, two its
    worker's process, and one its node.
    """
    random = Random(2)
    other = world.far(2)
    folders = _folders()
    slowest_s = dict.fromkeys(_KILLS, 0.0)
    for number in range(int(os.environ.get("KILLS", "15"))):
        kind = (*_KILLS, *_KILLS[:2])[number % 5]
        if kind == "node":
            world.add_node()
            victim = world.far_victim(-1)
        else:
            victim = random.choice((world.near_victim, world.far_victim))()
        with crossfade.InputNode() as inp:
            ends = (victim, other) if random.random() < 0.5 else (other, victim)
            graph = ends[1].add.bind(ends[0].add.bind(inp)).compile()
        pid = crossfade.get(victim.pid.remote())
        references = [graph.execute(np.full(random.choice((1, 100_000)), number)) for _ in range(random.randint(0, 5))]
        _KILLS_BY_KIND[kind](world, victim, pid)
        start = time.monotonic()
        dies(partial(run, graph), victim._info.id, within_s=8.0)
        slowest_s[kind] = max(slowest_s[kind], time.monotonic() - start)
        graph.teardown()
        await_ends([pid], within_s=5.0)
        del references
    assert crossfade.get(other.add.remote(1)) == 3
    assert _folders() == folders
    print(f"slowest: {slowest_s}", file=sys.stderr)


def _kill_node(world: World, *_: Any) -> None:
    world.cluster.remove_node(world.nodes.pop(), allow_graceful=False)


_KILLS_BY_KIND: dict[str, Callable[[World, Any, int], None]] = {
    "actor": lambda world, victim, pid: crossfade.kill(victim),
    "worker": lambda world, victim, pid: os.kill(pid, signal.SIGKILL),
    "node": _kill_node,
}
_KILLS = tuple(_KILLS_BY_KIND)


def _folders() -> set[str]:
    return {name for name in os.listdir(tempfile.gettempdir()) if name.startswith("crossfade-")}
