"""Memory that is not there, and steps that fail as nobody has foreseen: who is told, and what goes on."""

from __future__ import annotations

import resource

import numpy as np
import pytest

import crossfade
from tests.helpers.doers import Actor, graph_of

pytestmark = pytest.mark.timeout(90)


def test_a_ring_without_memory_is_an_error_of_its_node_and_the_graph_goes_on(local: None) -> None:
    maker, taker = Actor.remote(), Actor.remote()
    graph = taker.length.bind(maker.array.bind(crossfade.InputNode())).compile(max_inflight=2)
    assert graph.execute(10).get() == 10
    maker.limit_files.remote(1 << 20).get()
    for _ in range(10):
        with pytest.raises(OSError, match=r"(?s)Doer0.array \(node n0\), pickling.*File too large") as caught:
            graph.execute(50_000_000).get()
        assert isinstance(caught.value, crossfade.TaskError)
        assert graph.execute(100_000).get() == 100_000


def test_a_driver_without_memory_is_told_at_once(local: None) -> None:
    actor = Actor.remote()
    graph = graph_of(actor, "length", max_inflight=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        for _ in range(10):
            with pytest.raises(OSError, match="File too large"):
                graph.execute(np.zeros(50_000_000, np.uint8))
            assert graph.execute(np.zeros(100_000, np.uint8)).get() == 100_000
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_reader_without_memory_gets_an_error_and_the_ring_goes_on(local: None) -> None:
    actor = Actor.remote()
    graph = graph_of(actor, "length", max_inflight=2)
    assert graph.execute(np.zeros(100_000, np.uint8)).get() == 100_000
    actor.limit_addresses.remote(20_000_000).get()
    for _ in range(20):
        with pytest.raises(crossfade.TaskError, match=r"(?s)unpickling.*memory"):
            graph.execute(np.zeros(80_000_000, np.uint8)).get()
        assert graph.execute(np.zeros(100_000, np.uint8)).get() == 100_000


def test_a_step_that_fails_as_nobody_has_foreseen_ends_its_graph_and_not_the_actor(
    local: None, capfd: pytest.CaptureFixture[str]
) -> None:
    actor = Actor.remote()
    pid = actor.pid.remote().get()
    other = graph_of(actor, "echo")
    assert other.execute(1).get() == 1
    actor.break_writing.remote(True).get()
    graph = graph_of(actor, "length")
    actor.break_writing.remote(False).get()
    ref = graph.execute([1, 2])
    with pytest.raises(crossfade.ActorError, match=r"RuntimeError: planted .*Doer0\.length \(node n0\)"):
        ref.get()
    graph.teardown()
    assert actor.pid.remote().get() == pid
    assert other.execute(2).get() == 2
    with graph_of(actor, "length") as again:
        assert again.execute([3]).get() == 1
    assert "RuntimeError: planted" in capfd.readouterr().err
