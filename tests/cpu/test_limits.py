"""Limits of the system (descriptors, sizes of files, arguments, memory): errors with words, which leave nothing and end nothing."""

from __future__ import annotations

import resource
from functools import partial
from typing import Any

import numpy as np
import pytest

import crossfade
from tests.helpers.doers import Actor, graph_of
from tests.helpers.programs import output_of

_run = partial(output_of, "-c", timeout_s=100)
_WORKER = """
import crossfade, os, resource, sys

@crossfade.remote
class Worker:
    def __init__(self):
        self.files = []
    def echo(self, value):
        return value
    def fill(self):
        try:
            while True:
                self.files.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            return len(self.files)
    def free(self):
        while self.files:
            os.close(self.files.pop())
    def path(self):
        return os.getpid(), sys.path

def graph_of(actors):
    with crossfade.InputNode() as node:
        inp = node
    for actor in actors:
        node = actor.echo.bind(node)
    return node.compile()
"""

_DESCRIPTORS = (
    _WORKER
    + """
import cloudpickle, crossfade.engines.local

def held():
    return [fd for fd in range(70) if os.path.lexists(f"/proc/self/fd/{fd}")]

def count(make, most, kind, words):
    made = []
    while len(made) < most:
        before = held()
        try:
            made.append(make())
        except crossfade.CrossfadeError as error:
            if isinstance(error, crossfade.TaskError):  # it was the actor
                assert kind is crossfade.GraphError and "has no room for them" in str(error), error
            else:
                assert type(error) is kind and words in str(error), error
                assert isinstance(error.__cause__, OSError)
            assert "the process has no descriptor left" in str(error), error
            assert error.hint and "ulimit -n" in error.hint
            assert held() == before, (before, held())
            break
    return made

def actor():
    made = Worker.remote()
    assert made.echo.remote(1).get() == 1
    return made

def try_all(limit):
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    before = held()
    if not count(crossfade.init, 1, crossfade.SessionError, "session could not be started"):
        return "no session"
    actors = count(actor, 2, crossfade.ActorStartError, "could not be started")
    graphs = count(lambda: graph_of(actors), 30, crossfade.GraphError, "not compiled") if actors else []
    assert [graph.execute(2).get() for graph in graphs] == [2] * len(graphs)
    assert [actor.echo.remote(3).get() for actor in actors] == [3] * len(actors)
    if graphs:  # as the hint says
        graphs.pop().teardown()
        assert graph_of(actors).execute(4).get() == 4
    crossfade.shutdown()
    assert held() == before
    return f"{len(actors)} actors, {min(len(graphs), 1)} graph"

crossfade.init()
graph_of([actor()]).execute(1).get()  # all is imported
crossfade.shutdown()
for limit in range(4, 48):
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        print(try_all(limit), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, limit
"""
)


def test_whatever_needs_a_descriptor_that_is_not_there_is_an_error_with_a_hint_and_leaves_nothing() -> None:
    told = _run(_DESCRIPTORS).splitlines()
    assert len(told) == 44
    assert set(told) >= {"no session", "0 actors, 0 graph", "1 actors, 1 graph", "2 actors, 1 graph"}


_FULL_ACTOR = (
    _WORKER
    + """
resource.setrlimit(resource.RLIMIT_NOFILE, (300, 300))
actors = [Worker.remote() for _ in range(3)]
graph = graph_of(actors[:2])
assert actors[0].fill.remote().get() > 100
for _ in range(30):
    try:
        graph_of(actors)
    except crossfade.CrossfadeError as error:
        told = str(error)
    else:
        raise AssertionError("compiled")
    assert graph.execute(1).get() == 1 and actors[0].echo.remote(2).get() == 2
print(told.splitlines()[0])
actors[0].free.remote().get()
print(graph_of(actors).execute(3).get())
"""
)


def test_an_actor_without_descriptors_cannot_take_part_in_a_new_graph_and_goes_on_with_others() -> None:
    told, value = _run(_FULL_ACTOR).splitlines()
    assert "actor Worker0 has no room for them: Too many open files, the process has no descriptor left" in told
    assert value == "3"


_SMALL_FILES = (
    _WORKER
    + """
import numpy
def try_all(limit):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    try:
        graph = graph_of([Worker.remote()])
        for size in (10, 1_000_000):
            graph.execute(numpy.zeros(size, numpy.uint8)).get()
    except crossfade.CrossfadeError as error:
        assert error.hint == "raise the limit of the size of files (ulimit -f)"
        return f"{type(error).__name__}: {error}"
    except OSError as error:
        assert graph.execute(1).get() == 1
        return f"{size}: {error}"

for limit in (0, 4096, 65536):
    sys.stdout.flush()
    if (child := os.fork()) == 0:
        print(try_all(limit).splitlines()[0], flush=True)
        crossfade.shutdown()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, limit
"""
)


def test_a_limit_of_the_size_of_files_is_named_where_memory_meets_it() -> None:
    no_session, no_graph, no_slot = _run(_SMALL_FILES).splitlines()
    words = "File too large: shared memory counts as a file, and files may have {} bytes here (ulimit -f)"
    assert no_session == f"SessionError: the session could not be started: {words.format(0)}"
    assert no_graph == f"GraphError: the graph was not compiled: {words.format(4096)}"
    assert no_slot == f"1000000: [Errno 27] {words.format(65536)}"


_LONG_PATH = (
    _WORKER
    + """
sys.path += [f"/nowhere/{number:0200}" for number in range(2000)]
pid, path = Worker.remote().path.remote().get()
with open(f"/proc/{pid}/cmdline") as file:
    print(path[1:] == sys.path[1:], "nowhere" in file.read())
"""
)


def test_a_search_path_of_any_length_reaches_an_actor_and_is_in_no_list_of_processes() -> None:
    assert _run(_LONG_PATH) == "True False\n"


class Taker:
    """Takes values, and makes some that are too large."""

    def __init__(self, value: object = None) -> None:
        self._value = value

    def size(self, value: Any) -> int:
        return len(value)

    def large(self, size_bytes: int) -> Any:
        return _large(size_bytes)


def _large(size_bytes: int) -> Any:
    """It takes a byte here, and all of them anywhere else."""
    return {"values": [np.broadcast_to(np.uint8(1), (size_bytes,))]}


@pytest.mark.parametrize("size_bytes", [1 << 40, 1 << 50])
def test_a_value_larger_than_memory_is_refused_with_figures_and_the_graph_goes_on(engine: str, size_bytes: int) -> None:
    taker, maker = crossfade.remote(Taker).remote(), crossfade.remote(Taker).remote()
    graph = taker.size.bind(crossfade.InputNode()).compile()
    made = taker.size.bind(maker.large.bind(crossfade.InputNode())).compile()
    value = _large(size_bytes)
    told = rf"no memory for a value with {size_bytes} bytes of arrays: \d+ bytes are available\nhint: "
    for tries in (
        lambda: graph.execute(value),
        lambda: made.execute(size_bytes).get(),
        lambda: taker.size.remote(value),
        lambda: maker.large.remote(size_bytes).get(),
        lambda: crossfade.put(value),
        lambda: crossfade.remote(Taker).remote(value),
    ):
        with pytest.raises(MemoryError, match=told):
            tries()
    assert graph.execute([1, 2]).get() == 2
    assert made.execute(5).get() == 1
    with pytest.raises(crossfade.TaskError, match=told):
        made.execute(size_bytes).get()


def test_an_array_that_is_in_a_value_twice_counts_once() -> None:
    from crossfade.channels.values.fitting import _bytes_in

    array = np.zeros(1000)
    assert _bytes_in([array, {"again": array}, (np.zeros(10), "text")]) == 8080


def test_a_ring_without_memory_is_an_error_of_its_node_and_the_graph_goes_on(local: None) -> None:
    maker, taker = Actor.remote(), Actor.remote()
    graph = taker.length.bind(maker.array.bind(crossfade.InputNode())).compile(max_inflight=2)
    assert graph.execute(10).get() == 10
    maker.limit_files.remote(1 << 20).get()
    for _ in range(10):
        with pytest.raises(OSError, match=r"(?s)Doer0.array \(node n0\), pickling.*File too large") as caught:
            graph.execute(50_000_000).get()
        assert isinstance(caught.value, crossfade.TaskError)
        assert graph.execute(100_000).get() == 100_000


def test_a_driver_without_memory_is_told_at_once(local: None) -> None:
    actor = Actor.remote()
    graph = graph_of(actor, "length", max_inflight=2)
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
    graph = graph_of(actor, "length", max_inflight=2)
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
    other = graph_of(actor, "echo")
    assert other.execute(1).get() == 1
    actor.break_writing.remote(True).get()
    graph = graph_of(actor, "length")
    actor.break_writing.remote(False).get()
    ref = graph.execute([1, 2])
    with pytest.raises(crossfade.ActorError, match=r"RuntimeError: planted .*Doer0\.length \(node n0\)"):
        ref.get()
    graph.teardown()
    assert actor.pid.remote().get() == pid
    assert other.execute(2).get() == 2
    with graph_of(actor, "length") as again:
        assert again.execute([3]).get() == 1
    assert "RuntimeError: planted" in capfd.readouterr().err
