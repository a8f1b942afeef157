"""Collectives between processes that die or are torn down; what is counted and recorded of them; two graphs on the same actors."""

from __future__ import annotations

import gc
import os
import time
from contextlib import closing

import pytest

import crossfade
from crossfade.collective import ReduceOp, allreduce
from crossfade.host.doorbell import Doorbell
from crossfade.host.memory import Memory
from crossfade.types import Transport
from tests.helpers.calm import calm_s

pytest.importorskip("torch", reason="collectives need torch")

from crossfade.collectives.opening import open_group
from tests.helpers.collective_bench import Bench, bench_of, both_benches
from tests.helpers.collective_makers import Maker, all_makes, expected_reduction, same

both = both_benches


@pytest.fixture(params=["local", "copy"])
def local(request: pytest.FixtureRequest, both: tuple[Bench, Bench]) -> Bench:
    """The processes; with ``copy`` their collectives are by copies."""
    return bench_of(both, request.param)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("overlap", "victim"), [(False, 2), (True, 0)])
def test_ch3_when_a_party_dies_the_others_are_told(local: Bench, overlap: bool, victim: int) -> None:
    """Everybody waits for one that is in the middle of a method; that one is killed."""
    with local.compiling():
        inp = crossfade.InputNode()
        mortal = crossfade.remote(Maker).remote(victim)
        rest = [actor for rank, actor in enumerate(local.actors) if rank != victim]
        actors = [*rest[:victim], mortal, *rest[victim:]]
        nodes = [
            a.sleep.bind(inp) if rank == victim else a.make.bind(1, (4,), "float32") for rank, a in enumerate(actors)
        ]
        graph = crossfade.MultiOutputNode(allreduce.bind(nodes)).compile(overlap=overlap)
        assert len([ref.get(timeout=30) for ref in graph.execute(0.0)]) == 3
        refs = graph.execute(30.0)
        with pytest.raises(crossfade.GetTimeoutError):
            refs[1].get(timeout=0.3)
        start_s = calm_s()
        crossfade.kill(mortal)
        with pytest.raises(crossfade.ActorDiedError, match=mortal._info.id):
            refs[1].get(timeout=30)
        assert calm_s() - start_s < 2.0
        graph.teardown()
        nodes = [actor.make.bind(1, (4,), "float32") for actor in rest]
        with crossfade.MultiOutputNode(allreduce.bind(nodes)).compile() as again:
            assert len([ref.get(timeout=30) for ref in again.execute()]) == 2
        assert calm_s() - start_s < 15.0


@pytest.mark.timeout(60)
def test_a_graph_is_torn_down_while_its_parties_wait_for_each_other(local: Bench) -> None:
    """Some have started a collective, one has not: they end together."""
    with local.compiling():

        def compiled() -> crossfade.CompiledGraph:
            inp, made = crossfade.InputNode(), (1, (4,), "float32")
            nodes = [a.sleep.bind(inp) if rank == 1 else a.make.bind(*made) for rank, a in enumerate(local.actors)]
            graph: crossfade.CompiledGraph = crossfade.MultiOutputNode(allreduce.bind(nodes)).compile(max_inflight=3)
            return graph

        graph = compiled()
        refs = [graph.execute(0.3) for _ in range(3)]
        start_s = calm_s()
        graph.teardown()
        assert calm_s() - start_s < 4.0
        del refs
        with compiled() as again:
            assert len([ref.get(timeout=30) for ref in again.execute(0.0)]) == 3


def test_statistics_and_the_timeline_show_collectives(local: Bench) -> None:
    with local.compiling():
        inp = crossfade.InputNode()
        outputs = allreduce.bind([actor.make.bind(inp, (1000,), "float32") for actor in local.actors])
        work = [actor.work.bind(200_000) for actor in local.actors]
        with crossfade.MultiOutputNode([*outputs, *work]).compile(record=True, overlap=True) as graph:
            for seed in range(3):
                crossfade.get(graph.execute(seed), timeout=60)
            name = local.actors[0]._info.id
            counters = graph.statistics().actors[name].channels["coll c0"]
            spans = [span for span in graph.timeline().spans if span.stream == "coll" and span.actor == name]
    assert (counters["num_values"], counters["num_bytes"]) == (3, 12_000)
    assert [(span.execution, span.what, span.kind) for span in spans] == [
        (e, "allreduce", "communicate") for e in range(3)
    ]


def test_two_graphs_share_actors(local: Bench) -> None:
    with local.compiling():
        graphs = []
        for op in ("sum", "max"):
            inp = crossfade.InputNode()
            outputs = allreduce.bind([actor.make.bind(inp, (4,), "int64") for actor in local.actors], op=op)
            graphs.append(crossfade.MultiOutputNode(outputs).compile())
        refs = [graph.execute(seed) for seed in range(5) for graph in graphs]
        for number, each in enumerate(refs):
            wanted = expected_reduction(all_makes(number // 2, (4,), "int64"), ReduceOp("max" if number % 2 else "sum"))
            assert all(same(ref.get(timeout=30), wanted) for ref in each)
        for graph in graphs:
            graph.teardown()


@pytest.mark.timeout(30)
def test_what_has_the_number_of_a_closed_groups_descriptor_is_left_alone() -> None:
    """torch's store opens a path of that number once more when it is destroyed."""
    store = Memory.create("store", 0)
    number = store.fd
    doorbell = Doorbell(*Doorbell.create_fds("alone"))
    group = open_group(Transport.GLOO, store, 0, ("alone",), "alone", {"alone": doorbell.bell()}, ())
    group.ask_to_end()
    group.close(time.monotonic() + 10)
    with closing(Memory.create("other", 4096)) as other:
        if other.fd != number:
            other.fd = os.dup2(other.fd, number)
        del group
        gc.collect()
        assert other.size_bytes == 4096
    doorbell.close()
