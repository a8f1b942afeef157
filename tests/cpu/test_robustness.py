"""What users do that is unusual, and what goes wrong in the middle of something. Each was a fault once."""

from __future__ import annotations

import signal
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.api import session as sessions
from tests.helpers import doers
from tests.helpers.doers import Unpicklable, graph_of
from tests.helpers.programs import output_of


class Interrupting:
    """Ctrl-C comes while it is pickled."""

    def __reduce__(self) -> Any:
        signal.raise_signal(signal.SIGINT)
        return int, ()


class Doer(doers.Doer):
    def array(self, number: int) -> Any:
        return np.full(100_000, number)

    def pair(self, a: Any, b: Any) -> Any:
        return (a, b)

    def unreadable(self) -> Any:
        return Unpicklable()

    def large(self) -> bytes:
        return b"x" * 1_000_000

    def leave(self, value: Any) -> Any:
        threading.Thread(target=threading.Event().wait).start()  # must not keep the process alive
        raise SystemExit(7)

    def raise_memory_error(self, value: Any) -> Any:
        raise MemoryError("too large")


@pytest.fixture
def doer() -> Iterator[Any]:
    crossfade.init()
    yield crossfade.remote(Doer).remote()
    crossfade.shutdown()


_run = partial(output_of, "-W", "ignore", "-c")


FORK = """
import os, sys, crossfade, numpy as np
@crossfade.remote
class A:
    def array(self, number): return np.full(100_000, number)
a = A.remote()
with crossfade.InputNode() as inp:
    dag = a.array.bind(inp)
with dag.compile() as graph:
    kept = graph.execute(1).get()
    if (pid := os.fork()) == 0:
        del kept
        for use in (graph.execute, a.array.remote):
            try:
                use(2)
            except crossfade.SessionError as error:
                print(str(error).splitlines()[0].endswith("belongs to the process that this one was forked from"), flush=True)
        sys.exit(0)  # through the end of the with block
    os.waitpid(pid, 0)
    for number in range(2, 30):
        assert graph.execute(number).get()[0] == number
    print(kept[0], kept[-1])
"""


FORK_AFTER_A_DEATH = """
import os, subprocess, sys, crossfade
@crossfade.remote
class A:
    def echo(self, value): return value
actors = [A.remote() for _ in range(3)]
print(crossfade.get([actor.echo.remote(1) for actor in actors]), flush=True)
crossfade.kill(actors[0])
try:
    actors[0].echo.remote(1).get()
except crossfade.ActorDiedError:
    pass
def pipes():
    return sum(os.readlink(f"/proc/self/fd/{fd}").startswith("pipe:") for fd in os.listdir("/proc/self/fd") if int(fd) > 2
               and os.path.exists(f"/proc/self/fd/{fd}"))
held = pipes()
if (pid := os.fork()) == 0:
    os._exit(0 if pipes() <= held - 2 else 1)  # the lifelines of the two that live
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), crossfade.get(actors[1].echo.remote(2)))
"""


def test_a_child_that_is_forked_after_a_death_keeps_no_actor_alive() -> None:
    assert _run(FORK_AFTER_A_DEATH).split("\n") == ["[1, 1, 1]", "0 2", ""]


MANY_ACTORS = """
import os, resource, crossfade
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
@crossfade.remote
class A:
    def echo(self, value): return value
actors = []
try:
    while True:
        held = len(os.listdir("/proc/self/fd"))
        actors.append(A.remote())
except crossfade.ActorStartError as error:
    print(error)
print(held == len(os.listdir("/proc/self/fd")), crossfade.get(actors[0].echo.remote(1)))
"""


@pytest.mark.timeout(60)
def test_more_actors_than_descriptors_are_refused_with_a_hint() -> None:
    error, hint, rest = _run(MANY_ACTORS).splitlines()
    assert "could not be started: Too many open files" in error
    assert hint.startswith("hint: an actor takes about ten descriptors")
    assert rest == "True 1"


def test_a_graph_is_no_value(doer: Any) -> None:
    with graph_of(doer, "echo") as graph:
        with pytest.raises(TypeError, match="cannot be copied, pickled or sent to an actor\nhint: "):
            doer.echo.remote(graph)
        assert graph.execute(1).get() == 1


def test_a_forked_child_leaves_the_parents_graph_and_values_alone() -> None:
    assert _run(FORK) == "True\nTrue\n1 1\n"


def test_an_interrupted_execution_gives_no_wrong_result_later(doer: Any) -> None:
    with crossfade.InputNode() as inp:
        dag = doer.pair.bind(inp[0], inp[1])
    with dag.compile() as graph:
        with pytest.raises(KeyboardInterrupt):
            graph.execute(0, Interrupting())
        assert graph.execute(1, 1).get() == (1, 1)
        assert graph.execute(2, 2).get() == (2, 2)


def test_an_interrupted_wait_may_be_repeated(doer: Any, pipe: Path, tmp_path: Path) -> None:
    with graph_of(doer, "read") as graph:
        ref = graph.execute(str(pipe))
        timer = threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))

        def get() -> None:
            timer.start()  # here, so that on a busy machine it does not come before the wait
            ref.get(timeout=30)

        with pytest.raises(KeyboardInterrupt):
            get()
        timer.join()
        pipe.write_text("there")
        assert ref.get(timeout=30) == "there"


def test_ctrl_c_is_the_driver_s_business_from_an_actor_s_first_moment_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A terminal sends it to all processes at once, also to those that have just begun."""
    is_up, senders = threading.Event(), []
    popen = subprocess.Popen

    def start(*args: Any, **options: Any) -> Any:
        process = popen(*args, **options)
        process.send_signal(signal.SIGINT)

        def send() -> None:
            while not is_up.wait(0.001):
                process.send_signal(signal.SIGINT)

        senders.append(threading.Thread(target=send))
        senders[-1].start()
        return process

    crossfade.init()
    try:
        monkeypatch.setattr(subprocess, "Popen", start)
        assert crossfade.remote(Doer).remote().echo.remote(1).get(timeout=30) == 1
    finally:
        is_up.set()
        for sender in senders:
            sender.join()
        crossfade.shutdown()
    assert len(senders) == 1
    assert "Traceback" not in "".join(capfd.readouterr())


def test_a_reply_that_cannot_be_read_is_an_error_each_time(doer: Any) -> None:
    ref = doer.unreadable.remote()
    for _ in range(2):
        with pytest.raises(ValueError, match="no number"):
            ref.get(timeout=10)


def test_replies_to_dropped_references_are_not_kept(doer: Any) -> None:
    for _ in range(10):
        doer.large.remote()
    assert doer.echo.remote(1).get() == 1
    session = sessions.require()
    assert session.engine.processes.living["Doer0"].replies == {}  # type: ignore[attr-defined]


def test_a_get_returns_though_another_thread_waits_for_something_later(doer: Any, pipe: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("early")
    with graph_of(doer, "read") as graph:
        early, late = graph.execute(str(tmp_path / "file")), graph.execute(str(pipe))
        results: list[str] = []
        waiter = threading.Thread(target=lambda: results.append(late.get()))
        waiter.start()
        assert early.get(timeout=10) == "early"
        pipe.write_text("late")
        waiter.join(30)
        assert results == ["late"]


def test_an_actor_that_exits_is_gone(doer: Any) -> None:
    with graph_of(doer, "leave") as graph, pytest.raises(crossfade.ActorDiedError, match="exited with code 7"):
        graph.execute(1).get(timeout=10)


def test_a_memory_error_arrives_as_one(doer: Any) -> None:
    with graph_of(doer, "raise_memory_error") as graph, pytest.raises(MemoryError, match="too large") as caught:
        graph.execute(1).get()
    assert isinstance(caught.value, crossfade.TaskError)


def test_a_path_object_on_the_module_path() -> None:
    code = (
        "import sys, pathlib, crossfade\nsys.path.append(pathlib.Path('/nowhere'))\n@crossfade.remote\nclass A:\n"
        "    def f(self): return 5\nprint(A.remote().f.remote().get())\n"
    )
    assert _run(code) == "5\n"


def test_the_name_of_an_actor_that_could_not_start_is_free(doer: Any) -> None:
    named = crossfade.remote(Doer).options(name="unique")
    with pytest.raises(TypeError):
        named.remote(number for number in range(3))
    assert named.remote().echo.remote(1).get() == 1
