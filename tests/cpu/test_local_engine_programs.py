"""Programs whose actors are processes: constructors that raise, who ends before whom, scripts without a main guard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import crossfade
from tests.helpers.doers import Actor, graph_of
from tests.helpers.kept_actors import ENGINES, crew_of, kept_crews
from tests.helpers.programs import python


class BadConstructor:
    def __init__(self) -> None:
        raise LookupError("nothing here")

    def work(self, value: Any) -> Any:
        return value


kept = kept_crews(ENGINES, lambda: (Actor.remote(), Actor.remote()))
actors = crew_of(*ENGINES)
"""Two actors, on each engine in turn."""


def test_constructor_error(actors: Any) -> None:
    actor = crossfade.remote(BadConstructor).remote()
    with pytest.raises(crossfade.ActorStartError, match="nothing here"):
        graph_of(actor, "work")
    with pytest.raises(crossfade.ActorStartError, match="nothing here"):
        crossfade.get(actor.work.remote(1))


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
