"""What a session that is over keeps of the driver's descriptors, and a dead actor of its memory: nothing, and next to nothing."""

from __future__ import annotations

import gc
import os
import subprocess
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

import crossfade
from crossfade.engines.actor_process import ActorProcess
from crossfade.host.doorbell import Bell
from crossfade.host.sockets import Connection
from tests.helpers.footprint import footprint, settled_growth

_HEAVY = (ActorProcess, Bell, Connection, subprocess.Popen)
_MOST_BYTES = 5_000
"""Of the driver's for a dead actor: its names, and how it ended."""


class Worker:
    """Works, or does not start, or ends."""

    def __init__(self, works: bool = True) -> None:
        if not works:
            raise ValueError("planted")

    def echo(self, value: Any) -> Any:
        return value

    def leave(self) -> None:
        raise SystemExit(3)


Remote = crossfade.remote(Worker)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _use_a_session(index: int) -> None:
    crossfade.init()
    first, second = Remote.remote(), Remote.remote()
    graph = second.echo.bind(first.echo.bind(crossfade.InputNode())).compile()
    assert graph.execute(index).get() == index
    if index % 3 == 1:
        graph.teardown()
    if index % 3 == 2:
        crossfade.kill(second)
        with pytest.raises(crossfade.ActorDiedError):
            graph.execute(index).get()
    crossfade.shutdown()


def test_a_session_that_is_over_keeps_no_descriptor_before_the_collector_comes(no_collector: None) -> None:
    _use_a_session(0)  # what is imported and opened once
    before = sorted(os.listdir("/proc/self/fd"))
    for index in range(6):
        _use_a_session(index)
        assert sorted(os.listdir("/proc/self/fd")) == before


def _end_one(how: str) -> None:
    actor = Remote.remote(how != "fails")
    if how == "used and killed":
        with actor.echo.bind(crossfade.InputNode()).compile() as graph:
            assert graph.execute(1).get() == 1
    if how.endswith("killed"):
        crossfade.kill(actor)
    with pytest.raises(crossfade.ActorError):
        (actor.leave.remote() if how == "leaves" else actor.echo.remote(1)).get()
    crossfade.kill(actor)


def _num_heavy() -> Counter[type]:
    gc.collect()
    return Counter(type(each) for each in gc.get_objects() if type(each) in _HEAVY)


@pytest.mark.parametrize("how", ["killed", "used and killed", "leaves", "fails"])
def test_a_dead_actor_keeps_next_to_nothing_in_the_driver(engine: str, how: str) -> None:
    num = 200 if engine == "inline" else 10
    living = Remote.remote()
    assert living.echo.remote(1).get() == 1
    for _ in range(3):
        _end_one(how)  # what is cached once
    before, held = _num_heavy(), footprint(os.getpid())
    kept_bytes = []
    for _ in range(2):  # a table of the interpreter's own may grow in one of them
        tracemalloc.start()
        try:
            for _ in range(num):
                _end_one(how)
            after = _num_heavy()
            kept_bytes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert after == before
    assert "num_descriptors" not in settled_growth(held, os.getpid())
    assert min(kept_bytes) / num < _MOST_BYTES
    assert living.echo.remote(2).get() == 2
