"""Processes that are forked in methods, and off the driver."""

from __future__ import annotations

import os

import pytest

import crossfade
from tests.helpers.doers import Actor, graph_of

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
