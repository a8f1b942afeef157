"""The processes that actors are forked from: when there is another one, whoever dies, and nothing stays."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.engines import forked
from crossfade.host.processes import open_pidfd
from tests.helpers.counts import num
from tests.helpers.ended import await_no_process
from tests.helpers.graphs import kept_session, session_of
from tests.helpers.preloading import LIMIT_S, MODULE, Actor, ask, preloading, template_pid

pytestmark = pytest.mark.usefixtures("no_templates")


def test_later_sessions_have_the_same_template() -> None:
    with preloading(MODULE):
        template = ask("parent")
        assert ask("parent") == template
        assert template != os.getpid()
    with preloading(MODULE):
        assert ask("parent") == template
    with preloading():
        assert ask("parent") == os.getpid()
    forked.end_templates()
    await_no_process(template)


def test_a_changed_environment_has_another_template(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with preloading(MODULE):
        before = Actor.remote()
        template = before.parent.remote().get(timeout=LIMIT_S)
        monkeypatch.setenv("CROSSFADE_TEST_VARIABLE", "1")
        assert ask("variable", "CROSSFADE_TEST_VARIABLE") == "1"
        assert before.variable.remote("CROSSFADE_TEST_VARIABLE").get(timeout=LIMIT_S) is None
        crossfade.kill(before)
        await_no_process(template)
        monkeypatch.chdir(tmp_path)
        assert ask("surroundings")["folder"] == str(tmp_path)
        number = "PYTEST_CURRENT_TEST"
        assert ask("variable", number) == os.environ[number]
        with monkeypatch.context() as now:
            now.delenv(number)
            assert ask("variable", number) is None
        monkeypatch.syspath_prepend(str(tmp_path))
        assert str(tmp_path) in ask("surroundings")["path"]
        mask = os.umask(0o077)
        try:
            assert any("0077" in line for line in ask("surroundings")["status"])
        finally:
            os.umask(mask)


def _in_a_thread(prepare: Callable[[], object]) -> int:
    """The template of an actor that a thread starts after this."""
    parents: list[int] = []

    def start() -> None:
        prepare()
        parents.append(ask("parent"))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    return parents[0]


def _block(number: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})


def _use_one_core() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def test_threads_that_differ_in_what_is_their_own_keep_their_templates() -> None:
    """Modules can see it at their import."""
    changes: list[Callable[[], object]] = [int, partial(_block, signal.SIGUSR2)]
    if len(os.sched_getaffinity(0)) > 1:
        changes.append(_use_one_core)
    if os.nice(0) < 19:
        changes.append(partial(os.nice, 1))
    with preloading(MODULE):
        templates = [_in_a_thread(change) for change in changes]
        assert len({*templates}) == len(changes)
        assert [_in_a_thread(change) for change in changes] == templates


def test_of_many_templates_those_that_are_not_asked_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked, "_NUM_KEPT", 2)
    blocking = [partial(_block, number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)]
    with preloading(MODULE):
        first, second = map(_in_a_thread, blocking[:2])
        assert _in_a_thread(blocking[0]) == first
        third = _in_a_thread(blocking[2])
        assert [_in_a_thread(blocking[0]), _in_a_thread(blocking[2])] == [first, third]
    await_no_process(second)


def test_two_sessions_at_once_with_modules_of_their_own() -> None:
    with kept_session(preload=MODULE) as one, kept_session(preload=(MODULE, "wave")) as two:
        for _ in range(2):
            with session_of(one):
                assert not {"wave"} & ask("modules")
                first = ask("parent")
            with session_of(two):
                assert {MODULE, "wave"} <= ask("modules")
                assert ask("parent") != first


def test_several_threads_start_actors_at_once() -> None:
    with preloading(MODULE):
        parents: list[int] = []
        threads = [threading.Thread(target=lambda: parents.append(ask("parent"))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(parents) == 6
        assert len(set(parents)) == 1


def test_a_killed_template_ends_no_actor_and_is_replaced() -> None:
    with preloading(MODULE):
        actor, other = Actor.remote(), Actor.remote()
        template = actor.parent.remote().get(timeout=LIMIT_S)
        pid = other.pid.remote().get(timeout=LIMIT_S)
        os.kill(template, signal.SIGKILL)
        await_no_process(template)
        assert actor.pid.remote().get(timeout=LIMIT_S)
        os.kill(pid, signal.SIGTERM)
        with pytest.raises(crossfade.ActorDiedError, match=r"how is not known: the process that it was forked from"):
            other.pid.remote().get(timeout=LIMIT_S)
        assert ask("parent") != template
        crossfade.kill(actor)
        with pytest.raises(crossfade.ActorDiedError, match="it was killed"):
            actor.pid.remote().get(timeout=LIMIT_S)


def _module_that_waits(folder: Path, name: str) -> Path:
    """A module whose import waits until somebody opens this pipe for writing."""
    pipe = folder / "pipe"
    os.mkfifo(pipe)
    (folder / f"{name}.py").write_text(f"import os\nos.getpid()\nopen({str(pipe)!r}).read()\n")
    return pipe


def test_a_template_that_is_killed_while_an_actor_waits_for_it(module_folder: Path) -> None:
    pipe = _module_that_waits(module_folder, "slow_to_import")
    with preloading("slow_to_import"):

        def kill() -> None:
            with pipe.open("wb"):  # it is being imported
                os.kill(template_pid(), signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(crossfade.ActorStartError, match="has ended: it was killed by SIGKILL") as caught:
            Actor.options(name="x").remote()
        killer.join()
        assert caught.value.actor == "x"
        assert caught.value.hint == "start the actor again"


def test_a_template_that_is_killed_while_a_process_of_its_module_goes_on(
    module_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That process has the template's end of the socket, where the request stays."""
    pipe, leave = _module_that_waits(module_folder, "waits_after_a_fork"), module_folder / "leave"
    os.mkfifo(leave)
    source = f"import os\nif os.fork() == 0:\n    open({str(leave)!r}).read()\n    os._exit(0)\n"
    (module_folder / "forks_at_import.py").write_text(source)
    ask_only = forked._Template.ask

    def ask_and_kill(template: forked._Template, *request: Any) -> None:
        ask_only(template, *request)
        with pipe.open("wb"):  # the second module is being imported
            os.kill(template_pid(), signal.SIGKILL)

    monkeypatch.setattr(forked._Template, "ask", ask_and_kill)
    with preloading("forks_at_import", "waits_after_a_fork"):
        try:
            with pytest.raises(crossfade.ActorStartError, match="has ended: it was killed by SIGKILL"):
                Actor.remote()
        finally:
            leave.open("wb").close()


@pytest.mark.parametrize("is_shut_down", [False, True])
def test_a_stopped_template_does_not_block_kill_or_shutdown(
    is_shut_down: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forked, "_ANSWER_S", 0.5)
    with preloading(MODULE):
        actors = [Actor.remote() for _ in range(3)]
        pids = crossfade.get([actor.pid.remote() for actor in actors], timeout=LIMIT_S)
        pids.append(template_pid())
        os.kill(template_pid(), signal.SIGSTOP)
        if not is_shut_down:
            for actor in actors:
                crossfade.kill(actor)
            with pytest.raises(crossfade.ActorDiedError, match="it was killed"):
                actors[0].pid.remote().get(timeout=LIMIT_S)
            assert ask("parent") != pids[-1]
    for pid in pids:
        await_no_process(pid)


def test_a_template_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[int] = []

    def no_descriptor(pid: int, undo: ExitStack | None = None) -> int:
        if pid == os.getpid():
            return open_pidfd(pid, undo)
        started.append(pid)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = os.listdir("/proc/self/fd")
    monkeypatch.setattr(forked, "open_pidfd", no_descriptor)
    with pytest.raises(crossfade.SessionError, match="no descriptor left"):
        crossfade.init(preload=MODULE)
    assert len(started) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    assert os.listdir("/proc/self/fd") == before


def test_an_interrupt_while_an_actor_waits_for_its_template(module_folder: Path) -> None:
    pipe = _module_that_waits(module_folder, "slower_to_import")
    with preloading("slower_to_import"):
        interrupter = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        interrupter.start()
        with pytest.raises(KeyboardInterrupt):
            Actor.options(name="x").remote()
        interrupter.join()
        pipe.open("wb").close()  # lets the import end
        assert Actor.options(name="x").remote().pid.remote().get(timeout=LIMIT_S)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(num(8, 200)))
def test_a_template_that_is_killed_at_any_moment(seed: int) -> None:
    chooser = random.Random(seed)
    with preloading(MODULE):
        killer = threading.Timer(chooser.random() * 0.6, lambda: os.kill(template_pid(), signal.SIGKILL))
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
