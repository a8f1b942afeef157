"""Actors on other hosts, or started by somebody else: several threads of the driver at once, and an admission that fails."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from crossfade.engines import control, errands
from crossfade.engines.admission import Admission
from crossfade.engines.far import FarHost, FarProcess, Told
from crossfade.engines.ray import RayEngine, _Launched

LIMIT_S = 20.0


class OneMessage:
    """A connection with a message that stays until it is dropped."""

    has_unsent = False
    is_closed = False

    def __init__(self, message: object) -> None:
        self.left = [SimpleNamespace(payload=pickle.dumps(message))]

    has_message = property(lambda self: bool(self.left))

    def peek(self) -> Any:
        return self.left[0] if self.left else None

    def drop(self, message: Any) -> None:
        self.left.remove(message)


def bare(kind: type, **attributes: object) -> Any:
    """An object without its constructor."""
    made: Any = object.__new__(kind)
    vars(made).update(attributes)
    return made


class WatchedLock:
    """A lock that tells when a second thread waits for it."""

    def __init__(self) -> None:
        self.is_waited_for = threading.Event()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_waited_for.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def run_twice(act: Callable[[], None]) -> None:
    """In two threads at once."""
    with ThreadPoolExecutor(2) as threads:
        for each in [threads.submit(act) for _ in range(2)]:
            each.result(LIMIT_S)


def test_a_message_of_a_host_is_handled_once_though_two_threads_look() -> None:
    heard, lock = list[object](), WatchedLock()

    def hear(process: FarProcess, message: object) -> None:
        heard.append(message)
        assert lock.is_waited_for.wait(LIMIT_S)

    told = Told(hear, lambda process: None, lambda host: None, lock)
    connection = OneMessage(errands.FromActor("A", control.Created(None)))
    host = bare(FarHost, is_lost=False, connection=connection, processes={"A": object()}, _told=told, offset_ns=0)
    run_twice(host.catch_up)
    assert heard == [control.Created(None)]


def test_of_two_threads_that_find_an_actor_ended_one_starts_it_again() -> None:
    asked, both_look, looked = list[str](), threading.Barrier(2, timeout=LIMIT_S), threading.local()

    def has_ended(actor: str) -> bool:
        is_over = not asked
        if not hasattr(looked, "once"):
            looked.once = both_look.wait()
        return is_over

    class Engine(RayEngine):
        def _launch(self, launched: _Launched) -> None:
            asked.append(launched.name)

    launched = _Launched("A", None, control.Create("A", b""), can_restart=True)
    launched.has_come.set()
    processes = SimpleNamespace(has_ended=has_ended)
    engine = bare(Engine, _launched={"A": launched}, _restarting=threading.RLock(), processes=processes)
    run_twice(lambda: engine._settle("A"))
    assert asked == ["A"]


def test_an_admission_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(24, os.strerror(24))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(socket, "socket", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Admission(b"key")
    assert not list(tmp_path.iterdir())
