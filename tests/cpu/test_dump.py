"""`crossfade.dump`: who waits for whom, of actors that answer and of those that cannot."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest

import crossfade
from tests.helpers.doers import Actor, graph_of
from tests.helpers.programs import started

pytestmark = pytest.mark.timeout(90)


def test_dump_tells_who_waits_for_whom(local: None, pipe: Path) -> None:
    first, second = Actor.options(name="first").remote(), Actor.options(name="second").remote()
    graph = second.read.bind(first.echo.bind(crossfade.InputNode())).compile(max_inflight=3)
    refs = [graph.execute(str(pipe)) for _ in range(3)]
    expected = (
        "3 in flight: execution 0 to 2",
        "driver, round 0: waits for second to give n1, which second.read returns",
        "first, round 3: waits for driver to give i0",
        "second, round 0: runs second.read (node n1)",
        "ring n0, first -> second: 2 of 3 unread",
    )
    text = ""
    while not all(line in text for line in expected):  # the actors need a moment to come to that point
        text = crossfade.dump(io.StringIO())
    assert "stacks of driver" in text
    assert "stacks of second" in text
    assert "in read" in text
    for ref in refs:
        pipe.write_text("x")
        assert ref.get() == "x"


def test_dump_of_an_actor_that_cannot_answer_has_its_stack(local: None) -> None:
    actor = Actor.options(name="first").remote()
    actor.pid.remote().get()  # it has started
    ref = actor.hold_the_lock.remote(4)

    def is_told() -> bool:
        text = crossfade.dump(io.StringIO())
        return "does not answer" in text and "hold_the_lock" in text

    while not is_told():  # it was asked before the call began; what asks also ends the call's sleep
        assert not crossfade.wait([ref], timeout=0)[0]
    ref.get()
    assert "first (pid" in crossfade.dump(io.StringIO())


STUCK = """
import crossfade, sys, threading
@crossfade.remote
class A:
    def hang(self, x):
        print("hanging", flush=True)
        threading.Event().wait()
a = A.options(name="first").remote()
with crossfade.InputNode() as inp:
    graph = a.hang.bind(inp).compile()
ref = graph.execute(1)
print("ready", flush=True)
ref.get()
"""


def test_a_stuck_program_answers_sigusr1() -> None:
    with started("-c", STUCK) as driver:
        assert driver.stdout is not None
        assert driver.stderr is not None
        said = ""
        while not ("ready" in said and "hanging" in said):  # two threads print, so their lines may be mixed
            line = driver.stdout.readline()
            if not line:
                driver.kill()
                pytest.fail(said)
            said += line
        driver.send_signal(signal.SIGUSR1)
        lines = []
        while "in hang" not in (line := driver.stderr.readline()):
            lines.append(line)
            assert line, lines
        assert any("first, round 0: runs first.hang (node n0)" in line for line in lines), lines
        driver.kill()


def test_dump_without_a_session_and_on_the_inline_engine() -> None:
    assert "no session" in crossfade.dump(io.StringIO())
    crossfade.init(engine="inline")
    try:
        graph = graph_of(Actor.options(name="first").remote(), "echo")
        ref = graph.execute(1)
        text = crossfade.dump(io.StringIO())
        assert "first, round 0: is about to take i0 from driver" in text
        assert "1 in flight" in text
        assert ref.get() == 1
    finally:
        crossfade.shutdown()
