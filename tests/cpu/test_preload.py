"""Actors that are forked from a process with preloaded modules: as if from a new interpreter."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.engines import forked, template
from tests.helpers.facts import Facts
from tests.helpers.preloading import LIMIT_S, MODULE, Actor, ask, end_of, preloading
from tests.helpers.sessions import TORCH

pytestmark = pytest.mark.usefixtures("no_templates")


def test_actors_have_the_modules_from_the_beginning() -> None:
    with preloading():
        assert MODULE not in ask("modules")
    with preloading(MODULE):
        assert MODULE in ask("modules")


def test_an_actor_is_as_from_a_new_interpreter() -> None:
    with preloading():
        expected = ask("surroundings")
    with preloading(MODULE, "numpy"):
        Actor.remote()
        others = [Actor.remote() for _ in range(3)]
        found = ask("surroundings")
        assert [other.pid.remote().get(timeout=LIMIT_S) for other in others]
    assert found == expected


def test_each_actor_has_its_own_random_numbers() -> None:
    with preloading("numpy", "random", *TORCH):
        first, second = ask("numbers", *TORCH), ask("numbers", *TORCH)
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
    with preloading():
        expected = end_of(method, *arguments)
    with preloading(MODULE):
        assert end_of(method, *arguments) == expected


def test_a_program_that_ignores_the_ends_of_children_hears_of_actors() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with preloading(MODULE):
            assert ask("surroundings")["signals"][signal.SIGCHLD] == str(signal.SIG_IGN)
            assert end_of("leave", 7) == "it exited with code 7"
    finally:
        signal.signal(signal.SIGCHLD, before)


def test_killed_by_name_and_an_exception_of_the_constructor() -> None:
    class Bad(Facts):
        def __init__(self) -> None:
            raise LookupError("nothing here")

    with preloading(MODULE):
        actor = Actor.options(name="x").remote()
        assert actor.pid.remote().get(timeout=LIMIT_S)
        crossfade.kill(actor)
        with pytest.raises(crossfade.ActorDiedError, match="x is dead: it was killed by SIGKILL"):
            actor.pid.remote().get(timeout=LIMIT_S)
        bad = crossfade.remote(Bad).remote()
        with pytest.raises(crossfade.ActorStartError, match="nothing here"):
            bad.pid.remote().get(timeout=LIMIT_S)


def test_a_graph_over_actors_and_what_they_print(capfd: pytest.CaptureFixture[str]) -> None:
    with preloading(MODULE):
        a, b = Actor.remote(), Actor.remote()
        pids = crossfade.get([a.pid.remote(), b.pid.remote()])
        with crossfade.InputNode() as inp:
            output = crossfade.MultiOutputNode([a.say.bind(inp), b.say.bind(inp)])
        with output.compile() as graph:
            assert crossfade.get(graph.execute("said"), timeout=LIMIT_S) == [None, None]
    out = capfd.readouterr().out
    assert all(f"pid={pid}) said\n" in out for pid in pids)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("1 / 0", "its import raised ZeroDivisionError"),
        ("raise SystemExit(3)", "its import raised SystemExit: 3"),
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "started 1 thread"),
    ],
)
def test_a_module_that_cannot_be_preloaded_is_named(module_folder: Path, source: str, words: str) -> None:
    (module_folder / "bad_to_import.py").write_text(source + "\n")
    with preloading(MODULE, "bad_to_import"):
        with pytest.raises(crossfade.ActorStartError, match=f"bad_to_import cannot be preloaded: .*{words}") as caught:
            Actor.options(name="x").remote()
        assert caught.value.actor == "x"
        assert "preload" in str(caught.value.hint)
        (module_folder / "bad_to_import.py").write_text("good = 1\n")
        assert "bad_to_import" in ask("modules")


@pytest.mark.parametrize("num_chars", [100_000, 1_000_000])
def test_a_refusal_in_many_words_is_cut(module_folder: Path, num_chars: int) -> None:
    (module_folder / "says_much.py").write_text(f"raise ImportError('€' * {num_chars})\n")
    with (
        preloading("says_much"),
        pytest.raises(crossfade.ActorStartError, match=r"says_much cannot be preloaded: €+\.\.\.") as caught,
    ):
        Actor.remote()
    assert "preload takes names" in str(caught.value.hint)
    assert len(str(caught.value)) < 10_000


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
    with preloading("numpy"):
        assert ask("product") == 100.0 * 300


def test_the_inline_engine_has_this_processs_modules() -> None:
    with preloading("nothing_of_that_name", engine="inline"):
        assert ask("pid") == os.getpid()
    assert not forked._Templates.by_kind


def test_the_environment_may_name_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CROSSFADE_PRELOAD", f"{MODULE}, wave")
    assert {MODULE, "wave"} <= ask("modules")
    crossfade.shutdown()
    with preloading():
        assert MODULE not in ask("modules")


@pytest.mark.parametrize(
    ("names", "error"), [((1,), TypeError), (1, TypeError), ("", ValueError), (("a b",), ValueError)]
)
def test_what_is_no_name_of_a_module_is_refused(names: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="preload"):
        crossfade.init(preload=names)
    assert not crossfade.is_initialized()
