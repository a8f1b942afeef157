"""Actors and drivers that die or are interrupted: who hears of it, in which words, and what goes on."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.engines import actor_process
from crossfade.host.processes import count_oom_kills
from tests.helpers.calm import calm_s
from tests.helpers.doers import Actor, Doer, graph_of
from tests.helpers.ended import await_no_process
from tests.helpers.programs import started

pytestmark = pytest.mark.timeout(90)


class Unwilling(Doer):
    def __init__(self, path: str) -> None:
        Path(path).write_text(str(os.getpid()))
        threading.Event().wait()


def chain_of(first: Any, second: Any, **options: Any) -> crossfade.CompiledGraph:
    graph: crossfade.CompiledGraph = second.echo.bind(first.echo.bind(crossfade.InputNode())).compile(**options)
    return graph


# Actors that end


def test_an_actor_killed_while_idle_is_named_with_its_signal_and_who_waited(local: None) -> None:
    first, second = Actor.options(name="first").remote(), Actor.options(name="second").remote()
    graph = chain_of(first, second)
    assert graph.execute(1).get() == 1
    os.kill(first.pid.remote().get(), signal.SIGTERM)
    with pytest.raises(crossfade.ActorDiedError) as caught:
        graph.execute(2).get()
    assert caught.value.actor == "first"
    assert "killed by SIGTERM" in str(caught.value)
    assert "second.echo (node n1) waited for its node n0" in str(caught.value)
    with pytest.raises(crossfade.ActorDiedError, match="first is dead"):
        graph.execute(3)
    assert graph_of(second, "echo").execute(4).get() == 4
    graph.teardown()
    assert second.echo.remote(5).get() == 5
    crossfade.kill(second)
    with pytest.raises(crossfade.ActorDiedError, match="second is dead: it was killed by SIGKILL"):
        second.echo.remote(6).get()


def test_an_exit_code_is_told(local: None) -> None:
    actor = Actor.remote()
    with pytest.raises(crossfade.ActorDiedError, match="exited with code 7"):
        actor.leave.remote(7).get()


def test_a_victim_of_the_systems_memory_killer_is_told_from_others(
    local: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    actor = Actor.remote()
    pid = actor.pid.remote().get()
    now = count_oom_kills()
    monkeypatch.setattr(actor_process, "count_oom_kills", lambda: now + 1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(crossfade.ActorDiedError, match="SIGKILL \\(memory ran out"):
        actor.echo.remote(1).get()


def test_an_interpreter_that_cannot_be_started(local: None, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    num_descriptors = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    with pytest.raises(crossfade.ActorStartError, match=r"first could not be started.*(?s:.)*hint: .*nonexistent"):
        Actor.options(name="first").remote()
    monkeypatch.undo()
    assert len(os.listdir("/proc/self/fd")) == num_descriptors
    assert Actor.options(name="first").remote().echo.remote(1).get() == 1


def test_an_actor_killed_in_its_constructor(local: None, tmp_path: Path, pipe: Path) -> None:
    actor = crossfade.remote(Unwilling).options(name="first").remote(str(pipe))
    pid = int(pipe.read_text())
    ref = actor.echo.remote(1)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(
        crossfade.ActorStartError, match="first is dead: it was killed by SIGKILL before its constructor"
    ):
        ref.get()
    with pytest.raises(crossfade.ActorStartError, match="first"):
        graph_of(actor, "echo")


def test_a_constructor_that_hangs_ends_with_kill(local: None, pipe: Path) -> None:
    actor = crossfade.remote(Unwilling).remote(str(pipe))
    pid = int(pipe.read_text())
    crossfade.kill(actor)
    await_no_process(pid, 1.0)


# Drivers that end

HOLDING = """
import crossfade, ctypes, os, signal, sys
@crossfade.remote
class A:
    def pid(self): return os.getpid()
    def hold(self): ctypes.PyDLL(None).sleep(60)
    def stop(self): os.kill(os.getpid(), signal.SIGSTOP)
    def spin(self):
        while True: pass
a, b, c, d = (A.remote() for _ in range(4))
pids = crossfade.get([each.pid.remote() for each in (a, b, c, d)])
refs = [a.hold.remote(), b.stop.remote(), c.spin.remote()]
print(*pids, flush=True)
"""


@pytest.mark.parametrize("end", ["kill", "raise", "exit", "os_exit", "sigterm"])
def test_no_actor_outlives_its_driver_whatever_it_does(end: str) -> None:
    """One actor is in a call that holds the interpreter lock, one is stopped, one spins, one is idle: some can run no thread."""
    how = {"raise": "raise ValueError('the end')", "os_exit": "os._exit(3)", "exit": "sys.exit(4)"}
    with started("-c", HOLDING + how.get(end, "sys.stdin.read()")) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        if end in ("kill", "sigterm"):
            driver.send_signal(signal.SIGKILL if end == "kill" else signal.SIGTERM)
        end_s = calm_s() + (5.0 if end in ("raise", "exit") else 1.0)  # a driver that ends in order gives them a second
        for pid in pids:
            await_no_process(pid, end_s - calm_s())
        _, errors = driver.communicate()
    expected = {"raise": 1, "exit": 4, "os_exit": 3, "kill": -signal.SIGKILL, "sigterm": -signal.SIGTERM}
    assert driver.returncode == expected[end], errors
