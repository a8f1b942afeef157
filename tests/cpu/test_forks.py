"""Processes that are forked in methods, and off the driver; actors whose exit statuses somebody else collects."""

from __future__ import annotations

import os

import pytest

import crossfade
from tests.helpers.doers import Actor, graph_of
from tests.helpers.programs import output_of

pytestmark = pytest.mark.timeout(90)


def test_a_forked_child_that_returns_from_a_method_ends_there(local: None) -> None:
    actor = Actor.remote()
    graph = graph_of(actor, "fork_and_return")
    for _ in range(3):
        assert graph.execute(1).get() == 1  # the child's exit code
        assert actor.fork_and_return.remote(1).get() != 0
        assert actor.echo.remote(2).get() == 2


def test_a_method_may_fork_helpers(local: None) -> None:
    graph = graph_of(Actor.remote(), "fork_a_helper")
    assert graph.execute(3).get() == [3, 3]
    assert graph.execute(4).get() == [4, 4]


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")  # of Python 3.12 and newer: others' threads
def test_a_reference_is_refused_in_a_forked_child(local: None) -> None:
    ref = Actor.remote().echo.remote(1)
    pid = os.fork()
    if not pid:
        try:
            ref.get()
        except crossfade.SessionError:
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert ref.get() == 1


_PROGRAM = """
import crossfade, os, signal, sys

def reap(*_):
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass

signal.signal(signal.SIGCHLD, signal.SIG_IGN if sys.argv[1] == "ignored" else reap)

@crossfade.remote
class Actor:
    def __init__(self, how=""):
        if how == "raises":
            raise ValueError("planted")
        if how == "exits":
            os._exit(3)

    def exit(self):
        os._exit(5)

def told(actor):
    try:
        actor.exit.remote().get()
    except crossfade.ActorError as error:
        print(str(error).splitlines()[0])

told(Actor.remote())
told(Actor.remote("raises"))
told(Actor.remote("exits"))
killed = Actor.remote()
killed.__ray_ready__.remote().get()
crossfade.kill(killed)
told(killed)
Actor.remote().__ray_ready__.remote().get()
crossfade.shutdown()
"""

_WHY = {
    "ignored": "this program ignores SIGCHLD, so the system keeps no exit status of its children",
    "waited for": "somebody else has collected its exit status, by os.waitpid(-1, ...), say",
}


@pytest.mark.parametrize("how", _WHY)
def test_nobody_says_code_0_of_a_status_that_somebody_else_has_collected(how: str) -> None:
    ended = f"it ended (how is not known: {_WHY[how]})"
    exited, raised, exited_early, killed = output_of("-c", _PROGRAM, how).splitlines()
    assert exited == f"actor Actor0 is dead: {ended}"
    assert raised == "actor Actor1 could not be started: Actor1.__init__ on actor Actor1 raised ValueError: planted"
    assert exited_early == f"actor Actor2 is dead: {ended} before its constructor had returned"
    assert killed.startswith("actor Actor3 is dead: it was killed")


_KEEPS = """
import os, sys, threading
cache, own = {}, threading.local()
os.register_at_fork(after_in_child=cache.clear)  # runs before any hook that crossfade has
import numpy, crossfade

@crossfade.remote
class Actor:
    def full(self, number):
        return numpy.full(1 << 21, number, dtype=numpy.uint8)

actor = Actor.remote()
with crossfade.InputNode() as entry:
    node = actor.full.bind(entry)
graph = node.compile(max_inflight=3)

kept, done, found = threading.Event(), threading.Event(), []

def keep():
    own.value = graph.execute(7).get()  # a forked child drops what other threads have of their own
    kept.set()
    done.wait()
    found.append(bool((own.value == 7).all()))

thread = threading.Thread(target=keep)
thread.start()
kept.wait()
cache["value"] = graph.execute(8).get()
for _ in range(3):
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    for number in range(20):
        got = graph.execute(number).get()
        assert (got == number).all(), number
done.set()
thread.join()
print(found[0], bool((cache["value"] == 8).all()))
graph.teardown()
crossfade.shutdown()
"""


def test_what_a_forked_child_drops_is_still_its_parents() -> None:
    """Also what is dropped there before hooks of the child run, or in hooks that were registered earlier."""
    pytest.importorskip("numpy")
    assert output_of("-W", "ignore::DeprecationWarning", "-c", _KEEPS).split() == ["True", "True"]
