"""Actors that are forked from a process with preloaded modules: as if from a new interpreter, whoever dies, and nothing stays."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.engines import forked, template
from tests.helpers.counts import num
from tests.helpers.ended import await_no_process
from tests.helpers.graphs import kept_session, session_of
from tests.helpers.sessions import TORCH

LIMIT_S = 30.0
MODULE = "colorsys"  # which nothing else imports


class Facts:
    def modules(self) -> set[str]:
        return set(sys.modules)

    def surroundings(self) -> dict[str, Any]:
        """What differs between processes that were started in different ways."""
        import gc
        import re
        import resource
        from contextlib import suppress

        files = []
        for fd in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                files.append(re.sub(r"\d+", "N", os.readlink(f"/proc/self/fd/{fd}")))
        with open("/proc/self/status") as status:
            names = ("Umask", "SigBlk", "SigIgn", "SigCgt", "Threads", "NoNewPrivs", "Cpus_allowed")
            lines = [line for line in status if line.startswith(names)]
        return {
            "argv": sys.argv,
            "path": sys.path,
            "folder": os.getcwd(),
            "environment": dict(os.environ),
            "flags": str(sys.flags),
            "streams": [(s.fileno(), s.encoding, vars(s), str(s), s.isatty()) for s in (sys.stdout, sys.stderr)],
            "stdin": os.readlink("/proc/self/fd/0"),
            "files": sorted(files),
            "inheritable": [fd for fd in range(3, 64) if _is_inheritable(fd)],
            "signals": {number: str(signal.getsignal(number)) for number in signal.valid_signals()},
            "status": lines,
            "limits": [resource.getrlimit(limit) for limit in range(16)],
            "group": (os.getpgrp(), os.getsid(0)),
            "threads": sorted(thread.name for thread in threading.enumerate()),
            "gc": (gc.isenabled(), gc.get_threshold()),
        }

    def parent(self) -> int:
        return os.getppid()

    def pid(self) -> int:
        return os.getpid()

    def numbers(self) -> set[float]:
        import importlib
        import random

        import numpy as np

        numbers = {random.random(), float(np.random.rand())}
        return numbers | {float(importlib.import_module(name).rand(1)) for name in TORCH}

    def product(self) -> float:
        import numpy as np

        return float((np.ones((100, 300)) @ np.ones((300, 100)))[:, 0].sum())

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def say(self, text: str) -> None:
        print(text)

    def leave(self, code: int) -> None:
        os._exit(code)

    def signal(self, number: int) -> None:
        os.kill(os.getpid(), number)


def _is_inheritable(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


Actor = crossfade.remote(Facts)


def _ask(method: str, *args: Any) -> Any:
    return getattr(Actor.remote(), method).remote(*args).get(timeout=LIMIT_S)


def _end_of(method: str, *args: Any) -> str:
    """How an actor ends that has done this, in words without its name."""
    actor = Actor.remote()
    with pytest.raises(crossfade.ActorDiedError) as caught:
        getattr(actor, method).remote(*args).get(timeout=LIMIT_S)
    return str(caught.value).partition(" is dead: ")[2]


@contextmanager
def _session(*modules: str, **options: Any) -> Iterator[None]:
    crossfade.init(preload=modules, **options)
    try:
        yield
    finally:
        crossfade.shutdown()


@pytest.fixture(autouse=True)
def no_templates() -> Iterator[None]:
    """A test starts the templates that it needs, and leaves none."""
    forked.end_templates()
    yield
    forked.end_templates()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules are looked for."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_actors_have_the_modules_from_the_beginning() -> None:
    with _session():
        assert MODULE not in _ask("modules")
    with _session(MODULE):
        assert MODULE in _ask("modules")


def test_an_actor_is_as_from_a_new_interpreter() -> None:
    with _session():
        expected = _ask("surroundings")
    with _session(MODULE, "numpy"):
        Actor.remote()
        others = [Actor.remote() for _ in range(3)]
        found = _ask("surroundings")
        assert [other.pid.remote().get(timeout=LIMIT_S) for other in others]
    assert found == expected


def test_each_actor_has_its_own_random_numbers() -> None:
    with _session("numpy", "random", *TORCH):
        first, second = _ask("numbers"), _ask("numbers")
    assert len(first | second) == 2 * (2 + len(TORCH))


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("leave", (0,)),
        ("leave", (7,)),
        ("signal", (signal.SIGKILL,)),
        ("signal", (signal.SIGSEGV,)),
        ("signal", (signal.SIGRTMIN + 1,)),
    ],
)
def test_ends_are_told_as_those_of_new_interpreters(method: str, arguments: Sequence[Any]) -> None:
    with _session():
        expected = _end_of(method, *arguments)
    with _session(MODULE):
        assert _end_of(method, *arguments) == expected


def test_a_program_that_ignores_the_ends_of_children_hears_of_actors() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with _session(MODULE):
            assert _ask("surroundings")["signals"][signal.SIGCHLD] == str(signal.SIG_IGN)
            assert _end_of("leave", 7) == "it exited with code 7"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_killed_by_name_and_an_exception_of_the_constructor() -> None:
    class Bad(Facts):
        def __init__(self) -> None:
            raise LookupError("nothing here")

    with _session(MODULE):
        actor = Actor.options(name="x").remote()
        assert actor.pid.remote().get(timeout=LIMIT_S)
        crossfade.kill(actor)
        with pytest.raises(crossfade.ActorDiedError, match="x is dead: it was killed by SIGKILL"):
            actor.pid.remote().get(timeout=LIMIT_S)
        bad = crossfade.remote(Bad).remote()
        with pytest.raises(crossfade.ActorStartError, match="nothing here"):
            bad.pid.remote().get(timeout=LIMIT_S)


def test_a_graph_over_actors_and_what_they_print(capfd: pytest.CaptureFixture[str]) -> None:
    with _session(MODULE):
        a, b = Actor.remote(), Actor.remote()
        pids = crossfade.get([a.pid.remote(), b.pid.remote()])
        with crossfade.InputNode() as inp:
            output = crossfade.MultiOutputNode([a.say.bind(inp), b.say.bind(inp)])
        with output.compile() as graph:
            assert crossfade.get(graph.execute("said"), timeout=LIMIT_S) == [None, None]
    out = capfd.readouterr().out
    assert all(f"pid={pid}) said\n" in out for pid in pids)


def test_later_sessions_have_the_same_template() -> None:
    with _session(MODULE):
        template = _ask("parent")
        assert _ask("parent") == template
        assert template != os.getpid()
    with _session(MODULE):
        assert _ask("parent") == template
    with _session():
        assert _ask("parent") == os.getpid()
    forked.end_templates()
    await_no_process(template)


def test_a_changed_environment_has_another_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with _session(MODULE):
        before = Actor.remote()
        template = before.parent.remote().get(timeout=LIMIT_S)
        monkeypatch.setenv("CROSSFADE_TEST_VARIABLE", "1")
        assert _ask("variable", "CROSSFADE_TEST_VARIABLE") == "1"
        assert before.variable.remote("CROSSFADE_TEST_VARIABLE").get(timeout=LIMIT_S) is None
        crossfade.kill(before)
        await_no_process(template)
        monkeypatch.chdir(tmp_path)
        assert _ask("surroundings")["folder"] == str(tmp_path)
        number = "PYTEST_CURRENT_TEST"
        assert _ask("variable", number) == os.environ[number]
        monkeypatch.syspath_prepend(str(tmp_path))
        assert str(tmp_path) in _ask("surroundings")["path"]
        mask = os.umask(0o077)
        try:
            assert any("0077" in line for line in _ask("surroundings")["status"])
        finally:
            os.umask(mask)


def test_two_sessions_at_once_with_modules_of_their_own() -> None:
    with kept_session(preload=MODULE) as one, kept_session(preload=(MODULE, "wave")) as two:
        for _ in range(2):
            with session_of(one):
                assert not {"wave"} & _ask("modules")
                first = _ask("parent")
            with session_of(two):
                assert {MODULE, "wave"} <= _ask("modules")
                assert _ask("parent") != first


def test_several_threads_start_actors_at_once() -> None:
    with _session(MODULE):
        parents: list[int] = []
        threads = [threading.Thread(target=lambda: parents.append(_ask("parent"))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(parents) == 6
        assert len(set(parents)) == 1


def test_a_killed_template_ends_no_actor_and_is_replaced() -> None:
    with _session(MODULE):
        actor, other = Actor.remote(), Actor.remote()
        template = actor.parent.remote().get(timeout=LIMIT_S)
        pid = other.pid.remote().get(timeout=LIMIT_S)
        os.kill(template, signal.SIGKILL)
        await_no_process(template)
        assert actor.pid.remote().get(timeout=LIMIT_S)
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(crossfade.ActorDiedError, match=r"how is not known: the process that it was forked from"):
            other.pid.remote().get(timeout=LIMIT_S)
        assert _ask("parent") != template
        crossfade.kill(actor)
        with pytest.raises(crossfade.ActorDiedError, match="it was killed"):
            actor.pid.remote().get(timeout=LIMIT_S)


def _module_that_waits(folder: Path, name: str) -> Path:
    """A module whose import waits until somebody opens this pipe for writing."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    (folder / f"{name}.py").write_text(f"import os\nos.getpid()\nopen({str(pipe)!r}).read()\n")
    return pipe


def _template_pid() -> int:
    (template,) = forked._Templates.by_modules.values()
    return template._process.pid


def test_a_template_that_is_killed_while_an_actor_waits_for_it(folder: Path) -> None:
    pipe = _module_that_waits(folder, "slow_to_import")
    with _session("slow_to_import"):

        def kill() -> None:
            with pipe.open("wb"):  # it is being imported
                os.kill(_template_pid(), signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(crossfade.ActorStartError, match="has ended: it was killed by SIGKILL") as caught:
            Actor.options(name="x").remote()
        killer.join()
        assert caught.value.actor == "x"
        assert caught.value.hint == "start the actor again"


def test_an_interrupt_while_an_actor_waits_for_its_template(folder: Path) -> None:
    pipe = _module_that_waits(folder, "slower_to_import")
    with _session("slower_to_import"):
        interrupter = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            Actor.options(name="x").remote()
        interrupter.join()
        pipe.open("wb").close()  # lets the import end
        assert Actor.options(name="x").remote().pid.remote().get(timeout=LIMIT_S)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("1 / 0", "its import raised ZeroDivisionError"),
        ("raise SystemExit(3)", "its import raised SystemExit: 3"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started 1 thread"),
    ],
)
def test_a_module_that_cannot_be_preloaded_is_named(folder: Path, source: str, words: str) -> None:
    (folder / "bad_to_import.py").write_text(source + "\n")
    with _session(MODULE, "bad_to_import"):
        with pytest.raises(crossfade.ActorStartError, match=f"bad_to_import cannot be preloaded: .*{words}") as caught:
            Actor.options(name="x").remote()
        assert caught.value.actor == "x"
        assert "preload" in str(caught.value.hint)
        (folder / "bad_to_import.py").write_text("good = 1\n")
        assert "bad_to_import" in _ask("modules")


def test_a_module_that_opens_a_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_GPUS", "/dev/null")
    monkeypatch.setattr(template, "_num_threads", lambda: 1)
    with open("/dev/null"):
        assert template._preload([MODULE]) == (
            f"{MODULE} cannot be preloaded: its import opened a GPU, which no actor could use",
            "leave it out of preload: actors import it when they need it",
        )


def test_a_library_whose_threads_end_at_a_fork_is_preloaded() -> None:
    """numpy's OpenBLAS, whose products work on both sides."""
    with _session("numpy"):
        assert _ask("product") == 100.0 * 300


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(num(8, 200)))
def test_a_template_that_is_killed_at_any_moment(seed: int) -> None:
    chooser = random.Random(seed)
    with _session(MODULE):
        killer = threading.Timer(chooser.random() * 0.6, lambda: os.kill(_template_pid(), signal.SIGKILL))
        killer.start()
        actors: list[Any] = []
        while killer.is_alive() or len(actors) < 3:
            try:
                actors.append(Actor.remote())
            except crossfade.ActorStartError as error:
                assert "has ended: it was killed by SIGKILL" in str(error)  # noqa: PT017
            if len(actors) > 3:
                crossfade.kill(actors.pop(0))
        pids = crossfade.get([actor.pid.remote() for actor in actors], timeout=LIMIT_S)
        os.kill(pids[0], signal.SIGKILL)
        with pytest.raises(crossfade.ActorDiedError):
            actors[0].pid.remote().get(timeout=LIMIT_S)
    for pid in pids:
        await_no_process(pid)


def test_the_inline_engine_has_this_processs_modules() -> None:
    with _session("nothing_of_that_name", engine="inline"):
        assert _ask("pid") == os.getpid()
    assert not forked._Templates.by_modules


def test_the_environment_may_name_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSFADE_PRELOAD", f"{MODULE}, wave")
    assert {MODULE, "wave"} <= _ask("modules")
    crossfade.shutdown()
    with _session():
        assert MODULE not in _ask("modules")


@pytest.mark.parametrize(
    ("names", "error"), [((1,), TypeError), (1, TypeError), ("", ValueError), (("a b",), ValueError)]
)
def test_what_is_no_name_of_a_module_is_refused(names: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="preload"):
        crossfade.init(preload=names)
    assert not crossfade.is_initialized()
