"""The processes that actors are forked from: when there is another one, whoever dies, and nothing stays."""

from __future__ import annotations

import os
import random
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.engines import forked
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
        monkeypatch.syspath_prepend(str(tmp_path))
        assert str(tmp_path) in ask("surroundings")["path"]
        mask = os.umask(0o077)
        try:
            assert any("0077" in line for line in ask("surroundings")["status"])
        finally:
            os.umask(mask)


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
