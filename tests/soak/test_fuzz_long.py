"""Changed frames, plans, rings and messages to live actors, by hypothesis; sessions that end in the middle of it all, and storms.

Ten minutes each, or CROSSFADE_FUZZ_S seconds.
"""

from __future__ import annotations

import os
import random
import socket
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossfade
from crossfade.api import session as sessions
from tests.helpers.fuzzing import (
    LONG,
    check_frames,
    check_plan,
    check_ring,
    check_socket,
    damages,
    fuzz_for,
    mutations,
    plan_texts,
    streams,
)
from tests.helpers.interrupt_storm import storm
from tests.helpers.kills import kill_once
from tests.helpers.session_ends import USES, end_in_the_middle, num_held

pytestmark = pytest.mark.timeout(3600)


@LONG
@given(stream=streams(), fd_counts=st.lists(st.integers(0, 3), max_size=3))
def _frames_once(stream: tuple[list[bytes], bytes, list[int]], fd_counts: list[int]) -> None:
    check_frames(*stream)
    check_socket(*stream, fd_counts)


def test_fuzz_frames() -> None:
    fuzz_for(_frames_once, "frames")


@LONG
@given(text=plan_texts())
def _plan_once(text: str) -> None:
    check_plan(text)


def test_fuzz_plans() -> None:
    fuzz_for(_plan_once, "plans")


@LONG
@given(damage=damages())
def _ring_once(damage: tuple[int, list[tuple[int, int]], bytes, object]) -> None:
    check_ring(*damage)


def test_fuzz_the_rings_reader() -> None:
    fuzz_for(_ring_once, "ring")


class Echo:
    def echo(self, value: Any) -> Any:
        return value


RemoteEcho = crossfade.remote(Echo)


class Witness:
    """An actor, and a graph on it, which must not notice anything."""

    graph: Any = None


@settings(LONG, max_examples=5)
@given(data=st.data())
def _actor_once(data: st.DataObject) -> None:
    """A real message of the driver, changed on its way: the actor obeys it unchanged, or stops."""
    actor = RemoteEcho.remote()
    assert crossfade.get(actor.echo.remote(1), timeout=60) == 1
    engine: Any = sessions.require().engine
    connection = list(engine.processes.living.values())[-1].connection
    payload = data.draw(st.binary(min_size=1, max_size=200))
    head, tail = connection._sealer.seal(payload)
    changed = data.draw(mutations(head + payload + tail))
    if changed and not (head + payload + tail).startswith(changed):
        with socket.socket(fileno=os.dup(connection.fileno())) as sock:
            sock.send(changed)
        with pytest.raises(crossfade.ActorDiedError):
            crossfade.get(actor.echo.remote(2), timeout=60)
    else:
        crossfade.kill(actor)
    assert Witness.graph.execute(3).get(timeout=60) == 3


def test_fuzz_live_actors() -> None:
    crossfade.init()
    try:
        Witness.graph = RemoteEcho.remote().echo.bind(crossfade.InputNode()).compile()
        fuzz_for(_actor_once, "live actors")
    finally:
        crossfade.shutdown()


_DURATION_S = float(os.environ.get("CROSSFADE_FUZZ_S", "600"))


@pytest.mark.parametrize("kind", ["SIGINT", "SIGALRM"])
def test_a_storm_of_interrupts_loses_no_actor_and_no_value(kind: str) -> None:
    counts = storm(kind, _DURATION_S, random.randrange(1 << 32))
    print(f"{kind}: {counts}")
    assert min(counts["done"].get(use, 0) for use in ("execute", "get", "remote", "put", "teardown", "compile")) > 0


def test_a_storm_of_kills_leaves_nothing_and_names_who_died() -> None:
    deadline, victims = time.monotonic() + _DURATION_S, dict[str, int]()
    while time.monotonic() < deadline:
        victim = kill_once(random.randrange(1 << 32))
        victims[victim] = victims.get(victim, 0) + 1
    print(f"killed: {victims}")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("by_signal", [False, True])
def test_sessions_end_in_the_middle_of_anything(by_signal: bool) -> None:
    end_in_the_middle(0, tuple(USES))
    num_before = num_held()
    for seed in range(1, 300):
        uses = random.Random(seed).choices(sorted(USES), k=3)
        end_in_the_middle(seed, tuple(uses), by_signal=by_signal)
        assert num_held(num_before) <= num_before, f"after seed {seed}"
