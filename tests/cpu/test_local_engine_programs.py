"""Programs whose actors are processes: constructors that raise, who ends before whom, threads, scripts without a main guard."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import crossfade
from tests.helpers.calm import calm_s
from tests.helpers.doers import Actor, graph_of
from tests.helpers.kept_actors import ENGINES, crew_of, kept_crews
from tests.helpers.programs import python, started
from tests.helpers.threads import together


class BadConstructor:
    def __init__(self) -> None:
        raise LookupError("nothing here")

    def work(self, value: Any) -> Any:
        return value


kept = kept_crews(ENGINES, lambda: (Actor.remote(), Actor.remote()))
actors = crew_of(*ENGINES)
"""Two actors, on each engine in turn."""
processes = crew_of("local")
"""Two actors that are processes."""


def test_constructor_error(actors: Any) -> None:
    actor = crossfade.remote(BadConstructor).remote()
    with pytest.raises(crossfade.ActorStartError, match="nothing here"):
        graph_of(actor, "work")
    with pytest.raises(crossfade.ActorStartError, match="nothing here"):
        crossfade.get(actor.work.remote(1))


def _use_until_it_fails(graph: crossfade.CompiledGraph) -> None:
    for _ in range(100):
        graph.execute(2).get(timeout=5)


def test_a_dead_actor_is_named(processes: Any) -> None:
    a, b = Actor.remote(), Actor.remote()
    graph = b.echo.bind(a.echo.bind(crossfade.InputNode())).compile()
    pid = a.pid.remote().get()
    assert graph.execute(1).get() == 1
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(crossfade.ActorDiedError, match=r"Doer\d+ is dead: it was killed by SIGKILL"):
        _use_until_it_fails(graph)
    graph.teardown()
    assert b.echo.remote("alive").get() == "alive"
    crossfade.kill(b)
    with pytest.raises(crossfade.ActorDiedError, match="SIGKILL"):
        b.echo.remote(1).get()


def test_executing_after_teardown_and_shutdown(engine: str) -> None:
    actor = Actor.remote()
    graph = graph_of(actor, "echo")
    pending = graph.execute(1)
    graph.teardown()
    with pytest.raises(crossfade.SessionError, match="torn down"):
        graph.execute(1)
    with pytest.raises(crossfade.SessionError, match="torn down"):
        pending.get()
    crossfade.shutdown()
    with pytest.raises(crossfade.SessionError, match="session that is over"):
        actor.echo.remote(1)


def test_graphs_from_several_threads(processes: Any) -> None:
    actor = processes[0]

    def use(_: int) -> None:
        with graph_of(actor, "echo") as graph:
            for number in range(200):
                assert graph.execute(number).get(timeout=60) == number

    together(use, range(4))


def test_one_graph_from_several_threads(processes: Any) -> None:
    with graph_of(processes[0], "echo", max_inflight=8) as graph:

        def use(base: int) -> None:
            for number in range(base, base + 200):
                assert graph.execute(number).get(timeout=60) == number

        together(use, range(0, 4000, 1000))


SCRIPT = """
import crossfade

class Point:
    def __init__(self, x):
        self.x = x

@crossfade.remote
class Mover:
    def move(self, point):
        return Point(point.x + 1)

first, second = Mover.remote(), Mover.remote()
with crossfade.InputNode() as inp:
    dag = second.move.bind(first.move.bind(inp))
graph = dag.compile()
result = graph.execute(Point(40)).get()
assert type(result) is Point, type(result)
print("answer", result.x)
"""


@pytest.mark.parametrize("form", ["file", "-c", "stdin"])
def test_scripts_without_a_main_guard(form: str, tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    command = {"file": [str(file)], "-c": ["-c", SCRIPT], "stdin": ["-"]}[form]
    done = python(*command, input=SCRIPT)
    assert done.stdout == "answer 42\n", done.stderr


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_actors_die_with_a_killed_driver(tmp_path: Path) -> None:
    code = (
        "import crossfade, sys\n@crossfade.remote\nclass A:\n"
        "    def pid(self, _):\n        import os; return os.getpid()\n"
        "    def spin(self, _):\n        while True: pass\n"
        "a, b = A.remote(), A.remote()\nprint(a.pid.remote(0).get(), b.pid.remote(0).get(), flush=True)\n"
        "b.spin.remote(0).get()\n"
    )
    with started("-c", code) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        watches = [os.pidfd_open(pid) for pid in pids]
        driver.kill()
        driver.wait()
        start = calm_s()
        for watch in watches:
            import select

            poller = select.poll()
            poller.register(watch, select.POLLIN)
            assert poller.poll(5000), "an actor outlives its driver"
            os.close(watch)
        assert calm_s() - start < 1.0
    assert not any(_alive(pid) for pid in pids)
