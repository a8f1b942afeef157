"""What dies, hangs, runs out of something or is interrupted: who hears of it, in which words, and what goes on."""

from __future__ import annotations

import ctypes
import gc
import io
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import crossfade
from crossfade.api import session as sessions
from crossfade.channels import shm_ring
from crossfade.engines import actor_process
from crossfade.host.processes import count_oom_kills

pytestmark = pytest.mark.timeout(90)


TRY_WRITE = shm_ring.ShmWriter.try_write


class Doer:
    """Does what tests need."""

    def echo(self, value: Any) -> Any:
        return value

    def array(self, num_bytes: int) -> Any:
        return np.zeros(num_bytes, np.uint8)

    def length(self, value: Any) -> int:
        return len(value)

    def pid(self) -> int:
        return os.getpid()

    def leave(self, code: int) -> None:
        raise SystemExit(code)

    def read(self, path: str) -> str:
        """Returns once somebody has written to a named pipe and closed it."""
        with open(path) as pipe:
            return pipe.read()

    def hold_the_lock(self, seconds: int) -> None:
        ctypes.PyDLL(None).sleep(seconds)

    def break_writing(self, is_broken: bool) -> None:
        def fail(writer: Any, value: object) -> bool:
            raise RuntimeError("planted")

        writer: Any = shm_ring.ShmWriter
        writer.try_write = fail if is_broken else TRY_WRITE

    def limit_files(self, num_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))

    def limit_addresses(self, more_bytes: int) -> None:
        with open("/proc/self/statm") as file:
            used_bytes = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used_bytes + more_bytes, resource.RLIM_INFINITY))

    def fork_and_return(self, value: Any) -> Any:
        """Both processes return from this method; the parent waits for the other's end."""
        pid = os.fork()
        if pid:
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        return value

    def fork_a_helper(self, value: Any) -> Any:
        """The usual way to fork."""
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            return pool.map(abs, [value, -value])


Actor = crossfade.remote(Doer)


class Unwilling:
    """Its constructor does not return."""

    def __init__(self, path: str) -> None:
        Path(path).write_text(str(os.getpid()))
        threading.Event().wait()

    def echo(self, value: Any) -> Any:
        return value


@pytest.fixture
def local() -> Iterator[None]:
    """A session on the local engine."""
    crossfade.init()
    yield
    crossfade.shutdown()


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def _graph(actor: Any, method: str, **options: Any) -> crossfade.CompiledGraph:
    with crossfade.InputNode() as inp:
        graph: crossfade.CompiledGraph = getattr(actor, method).bind(inp).compile(**options)
    return graph


def _chain(first: Any, second: Any, **options: Any) -> crossfade.CompiledGraph:
    with crossfade.InputNode() as inp:
        graph: crossfade.CompiledGraph = second.echo.bind(first.echo.bind(inp)).compile(**options)
    return graph


def _script(code: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def _await_end(pid: int, timeout_s: float) -> None:
    """Waits for the end of somebody's child."""
    try:
        watch = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poller = select.poll()
        poller.register(watch, select.POLLIN)
        assert poller.poll(timeout_s * 1000), f"process {pid} is still there"
    finally:
        os.close(watch)


# Actors that end


def test_an_actor_killed_while_idle_is_named_with_its_signal_and_who_waited(local: None) -> None:
    first, second = Actor.options(name="first").remote(), Actor.options(name="second").remote()
    graph = _chain(first, second)
    assert graph.execute(1).get() == 1
    os.kill(first.pid.remote().get(), signal.SIGTERM)
    with pytest.raises(crossfade.ActorDiedError) as caught:
        graph.execute(2).get()
    assert caught.value.actor == "first"
    assert "killed by SIGTERM" in str(caught.value)
    assert "second.echo (node n1) waited for its node n0" in str(caught.value)
    with pytest.raises(crossfade.ActorDiedError, match="first is dead"):
        graph.execute(3)
    assert _graph(second, "echo").execute(4).get() == 4
    graph.teardown()


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
        _graph(actor, "echo")


def test_a_constructor_that_hangs_ends_with_kill(local: None, pipe: Path) -> None:
    actor = crossfade.remote(Unwilling).remote(str(pipe))
    pid = int(pipe.read_text())
    crossfade.kill(actor)
    _await_end(pid, 1.0)


# Drivers that end

HOLDING = """
import crossfade, ctypes, os, signal, sys
@crossfade.remote
class A:
    def pid(self): return os.getpid()
    def hold(self): ctypes.PyDLL(None).sleep(60)
    def stop(self): os.kill(os.getpid(), signal.SIGSTOP)
a, b = A.remote(), A.remote()
pids = crossfade.get([a.pid.remote(), b.pid.remote()])
refs = [a.hold.remote(), b.stop.remote()]
print(*pids, flush=True)
"""


@pytest.mark.parametrize("end", ["kill", "raise", "exit", "os_exit", "sigterm"])
def test_no_actor_outlives_its_driver_whatever_it_does(end: str) -> None:
    """One actor is in a call that holds the interpreter lock, the other is stopped: no thread of theirs can run."""
    how = {"raise": "raise ValueError('the end')", "os_exit": "os._exit(3)", "exit": "sys.exit(4)"}
    with _script(HOLDING + how.get(end, "sys.stdin.read()")) as driver:
        assert driver.stdout is not None
        pids = [int(word) for word in driver.stdout.readline().split()]
        if end in ("kill", "sigterm"):
            driver.send_signal(signal.SIGKILL if end == "kill" else signal.SIGTERM)
        for pid in pids:
            _await_end(pid, 5.0 if end in ("raise", "exit") else 1.0)  # a driver that ends in order gives them a second
        _, errors = driver.communicate()
    expected = {"raise": 1, "exit": 4, "os_exit": 3, "kill": -signal.SIGKILL, "sigterm": -signal.SIGTERM}
    assert driver.returncode == expected[end], errors


INTERRUPTED = """
import contextlib, os, random, signal, sys, threading, time
import numpy as np
import crossfade

chooser = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)

@crossfade.remote
class A:
    def echo(self, x): return x

def interrupt_soon():
    delay = chooser.random() * 0.01
    threading.Timer(delay, lambda: os.kill(os.getpid(), signal.SIGINT)).start()

a, b = A.remote(), A.remote()
with crossfade.InputNode() as inp:
    dag = b.echo.bind(a.echo.bind(inp))
graph = dag.compile(max_inflight=3)
number = num_interrupts = num_recompiled = 0
deadline = time.monotonic() + 40
while num_interrupts < 60 and time.monotonic() < deadline:
    refs = []
    try:
        interrupt_soon()
        while True:
            number += 1
            value = np.full(chooser.choice((1, 20_000)), number)
            refs.append((number, graph.execute(value)))
            if len(refs) == 3:
                for sent, ref in refs:
                    got = ref.get(timeout=20)
                    assert got[0] == got[-1] == sent, (sent, got)
                refs.clear()
    except KeyboardInterrupt:
        num_interrupts += 1
    except crossfade.SessionError as error:
        assert "interrupted" in str(error), error
        time.sleep(0.02)  # until the pending interrupt is over
    try:
        for sent, ref in refs:
            got = ref.get(timeout=20)
            assert got[0] == got[-1] == sent, (sent, got)
        del refs
        assert graph.execute(np.zeros(1)).get(timeout=20)[0] == 0
    except KeyboardInterrupt:
        num_interrupts += 1
    except crossfade.SessionError as error:
        assert "interrupted" in str(error), error
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                graph.teardown(timeout=20)
                graph = dag.compile(max_inflight=3)
                break
        num_recompiled += 1
crossfade.shutdown()
print(num_interrupts, num_recompiled)
"""


def test_ctrl_c_at_any_moment_gives_no_wrong_result_and_no_hang() -> None:
    with _script(INTERRUPTED) as driver:
        output, errors = driver.communicate(timeout=80)
    assert driver.returncode == 0, errors
    assert int(output.split()[0]) > 10, output


# Teardown


def test_teardown_says_what_it_waits_for(local: None, pipe: Path) -> None:
    actor = Actor.options(name="first").remote()
    graph = _graph(actor, "read")
    ref = graph.execute(str(pipe))
    with pytest.raises(crossfade.TeardownTimeout, match=r"first runs first.read \(node n0\)"):
        _teardown_once_running(graph)
    with pytest.raises(crossfade.SessionError, match="torn down"):
        ref.get()
    pipe.write_text("done")
    graph.teardown(timeout=20)
    assert actor.echo.remote(1).get() == 1


def _teardown_once_running(graph: crossfade.CompiledGraph) -> None:
    """The method has begun when somebody can open the other end of the pipe; here the dump tells."""
    for _ in range(1000):
        if "runs first.read" in crossfade.dump(io.StringIO(), stacks=False):
            break
    graph.teardown(timeout=0.05)


def test_teardown_ends_a_busy_actor_on_request(local: None, pipe: Path) -> None:
    actor, other = Actor.remote(), Actor.remote()
    pid = actor.pid.remote().get()
    graph = _graph(actor, "read")
    graph.execute(str(pipe))
    graph.teardown(kill_actors=True, timeout=0.05)
    _await_end(pid, 1.0)
    with pytest.raises(crossfade.ActorDiedError):
        actor.echo.remote(1).get()
    assert other.echo.remote(1).get() == 1


def test_teardown_frees_a_thread_that_waits_for_a_result(local: None, pipe: Path) -> None:
    actor = Actor.remote()
    graph = _graph(actor, "read", max_inflight=1)
    ref = graph.execute(str(pipe))
    errors: list[BaseException] = []
    begun = threading.Event()

    def wait() -> None:
        begun.set()
        try:
            ref.get()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    begun.wait()
    with pytest.raises(crossfade.TeardownTimeout):
        graph.teardown(timeout=0.2)
    thread.join(10)
    assert isinstance(errors[0], crossfade.SessionError)
    pipe.write_text("")
    graph.teardown()


def test_a_graph_that_was_dropped_is_taken_from_its_actors_at_the_next_compile(local: None) -> None:
    actor = Actor.remote()
    for number in range(5):
        assert _graph(actor, "echo").execute(number).get() == number
        gc.collect()
    graph = _graph(actor, "echo")
    assert graph.execute(0).get() == 0  # the actor has seen all messages before that
    assert "1 graph," in crossfade.dump(io.StringIO(), stacks=False)
    engine: Any = graph._session.engine
    engine.doorbell.pump()
    assert len(engine._plans) == 1


def test_results_come_when_the_graph_was_dropped_before_them(local: None) -> None:
    actor = Actor.remote()

    def start(size: int) -> Any:
        return _graph(actor, "array").execute(size)  # nobody has the graph any more

    sizes = [80_000, 10, 3_000_000, 0]
    refs = [start(size) for size in sizes]
    gc.collect()
    engine: Any = sessions.require().engine
    assert [len(ref.get(timeout=30)) for ref in refs] == sizes
    assert len(refs[0].get()) == sizes[0]
    _graph(actor, "echo").teardown()
    assert not engine._plans, "their values are there, so nothing keeps the plans open"


def test_a_reference_without_its_graph_is_shown_and_ends_with_the_session(local: None) -> None:
    ref = _graph(Actor.remote(), "echo").execute(1)
    gc.collect()
    assert "graph 0, open, 1 in flight: execution 0" in crossfade.dump(io.StringIO(), stacks=False)
    crossfade.shutdown()
    with pytest.raises(crossfade.SessionError, match="the session was shut down"):
        ref.get()
    crossfade.init()


@pytest.mark.parametrize("timeout", [float("inf"), 1e300, sys.maxsize, 3e6])
def test_a_very_long_time_limit_is_one(local: None, pipe: Path, timeout: float) -> None:
    actor = Actor.remote()
    graph = _graph(actor, "read", submit_timeout=timeout)
    ref = graph.execute(str(pipe))
    results: list[Any] = []
    waits = [
        threading.Thread(target=lambda: results.append(ref.get(timeout=timeout))),
        threading.Thread(target=lambda: results.append(crossfade.get(ref, timeout=timeout))),
        threading.Thread(target=lambda: results.append(crossfade.wait([ref], timeout=timeout)[0][0].get())),
    ]
    for each in waits:
        each.start()
    called = actor.echo.remote("called")
    pipe.write_text("so")
    assert called.get(timeout=timeout) == "called"
    for each in waits:
        each.join(30)
    assert results == ["so"] * 3
    graph.teardown(timeout=timeout)


# Memory


def test_a_ring_without_memory_is_an_error_of_its_node_and_the_graph_goes_on(local: None) -> None:
    maker, taker = Actor.remote(), Actor.remote()
    with crossfade.InputNode() as inp:
        graph = taker.length.bind(maker.array.bind(inp)).compile(max_inflight=2)
    assert graph.execute(10).get() == 10
    maker.limit_files.remote(1 << 20).get()
    for _ in range(10):
        with pytest.raises(OSError, match=r"(?s)Doer0.array \(node n0\), pickling.*File too large") as caught:
            graph.execute(50_000_000).get()
        assert isinstance(caught.value, crossfade.TaskError)
        assert graph.execute(100_000).get() == 100_000


def test_a_driver_without_memory_is_told_at_once(local: None) -> None:
    actor = Actor.remote()
    graph = _graph(actor, "length", max_inflight=2)
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
    graph = _graph(actor, "length", max_inflight=2)
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
    other = _graph(actor, "echo")
    assert other.execute(1).get() == 1
    actor.break_writing.remote(True).get()
    graph = _graph(actor, "length")
    actor.break_writing.remote(False).get()
    ref = graph.execute([1, 2])
    with pytest.raises(crossfade.ActorError, match=r"RuntimeError: planted .*Doer0\.length \(node n0\)"):
        ref.get()
    graph.teardown()
    assert actor.pid.remote().get() == pid
    assert other.execute(2).get() == 2
    with _graph(actor, "length") as again:
        assert again.execute([3]).get() == 1
    assert "RuntimeError: planted" in capfd.readouterr().err


# Forks


def test_a_forked_child_that_returns_from_a_method_ends_there(local: None) -> None:
    actor = Actor.remote()
    graph = _graph(actor, "fork_and_return")
    for _ in range(3):
        assert graph.execute(1).get() == 1  # the child's exit code
        assert actor.fork_and_return.remote(1).get() != 0
        assert actor.echo.remote(2).get() == 2


def test_a_method_may_fork_helpers(local: None) -> None:
    graph = _graph(Actor.remote(), "fork_a_helper")
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


# Looking


def test_dump_tells_who_waits_for_whom(local: None, pipe: Path) -> None:
    first, second = Actor.options(name="first").remote(), Actor.options(name="second").remote()
    with crossfade.InputNode() as inp:
        graph = second.read.bind(first.echo.bind(inp)).compile(max_inflight=3)
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
    text = crossfade.dump(io.StringIO())
    if "does not answer" in text:  # else it was asked before the call began
        assert "hold_the_lock" in text
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
    with _script(STUCK) as driver:
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
        graph = _graph(Actor.options(name="first").remote(), "echo")
        ref = graph.execute(1)
        text = crossfade.dump(io.StringIO())
        assert "first, round 0: is about to take i0 from driver" in text
        assert "1 in flight" in text
        assert ref.get() == 1
    finally:
        crossfade.shutdown()
