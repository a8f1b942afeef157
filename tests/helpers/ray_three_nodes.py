"""What the Ray engine does on three nodes (`tests.helpers.ray_world`): that of the driver, and two with a wire between them."""

from __future__ import annotations

from functools import partial

import numpy as np

import crossfade
from crossfade.types import DRIVER
from tests.helpers.ray_world import World, await_ends, case, dies, run

_NUM, _LENGTH = 10, 50_000


@case
def values_cross_each_wire_between_three_nodes_once(world: World) -> None:
    """Once from the maker's node to each of the others, whatever the readers there; and on from one of those to the other."""
    maker, seconds, thirds = world.near(), [world.far(k) for k in (0, 1)], [world.third(k) for k in (0, 1)]
    with crossfade.InputNode() as inp:
        value = maker.same.bind(inp)
        added = [actor.add.bind(value) for actor in (*seconds, *thirds)]
        dag = crossfade.MultiOutputNode(
            [*added, seconds[0].both.bind(thirds[1].both.bind(added[1], added[3]), added[2])]
        )
    with dag.compile() as graph:
        assert len(set(graph.plan.hosts.values())) == 3
        channels = [spec for spec in graph.plan.channels if spec.value == "n0"]
        assert [len(spec.readers) for spec in channels] == [2, 2]
        assert {spec.transport for spec in channels} == {crossfade.Transport.TCP}
        between = [
            spec for spec in graph.plan.channels if DRIVER not in (spec.writer, *spec.readers) and spec.value != "n0"
        ]
        assert {(spec.writer in _names(seconds), spec.landing in _names(seconds)) for spec in between} >= {
            (True, False),
            (False, True),
        }
        for number in range(_NUM):
            got = crossfade.get(graph.execute(np.full(_LENGTH, number)))
            assert [int(each[-1]) - number for each in got[:4]] == [0, 1, 0, 1]
            np.testing.assert_array_equal(got[4], np.full(_LENGTH, 3 * number + 2))
        written = graph.statistics().actors[maker._info.id].channels
        for spec in channels:
            assert written[f"write {spec.id}"]["num_values"] == _NUM
            size_bytes = written[f"write {spec.id}"]["num_bytes"]
            assert _NUM * _LENGTH * 8 < size_bytes < _NUM * (_LENGTH * 8 + 1000)


def _names(actors: list[object]) -> set[str]:
    return {actor._info.id for actor in actors}  # type: ignore[attr-defined]


@case
def collectives_of_three_nodes(world: World) -> None:
    import torch

    actors = [world.near(), world.far(1), world.third(1)]
    with crossfade.InputNode() as inp:
        values = [actor.add.bind(inp) for actor in actors]
        outputs = [*crossfade.collective.allreduce.bind(values), *crossfade.collective.allgather.bind(values)]
        dag = crossfade.MultiOutputNode(outputs)
    with dag.compile() as graph:
        assert len(set(graph.plan.hosts.values())) == 3
        for start in range(3):
            got = crossfade.get(graph.execute(torch.arange(start, start + 4.0)))
            brought = torch.stack([torch.arange(start, start + 4.0) + more for more in (0, 1, 1)])
            assert all(each.equal(brought.sum(0)) for each in got[:3])
            assert all(each.equal(brought.view(-1)) for each in got[3:])


@case
def of_three_nodes_one_dies_and_the_others_go_on(world: World) -> None:
    """Last of these cases: the third node is gone after it."""
    near, far, victim = world.near(2), world.far(2), world.third(1)
    pid = crossfade.get(victim.pid.remote())
    with crossfade.InputNode() as inp:
        graph = near.add.bind(victim.add.bind(far.add.bind(inp))).compile()
    host = graph.plan.hosts[victim._info.id]
    assert graph.execute(1).get() == 6
    world.remove_third()
    dies(partial(run, graph), victim._info.id, host, within_s=8.0)
    graph.teardown()
    await_ends([pid], within_s=5.0)
    with crossfade.InputNode() as inp, near.add.bind(far.add.bind(inp)).compile() as graph:
        assert graph.execute(1).get() == 5
        assert len(set(graph.plan.hosts.values())) == 2
