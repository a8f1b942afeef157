"""A session that ends while threads use it: each gets an error of ours, and nothing stays. The long counts are in tests/soak."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import crossfade
from crossfade.api import session as sessions
from crossfade.runtime.record import Recorder
from tests.helpers.builds import interpreted_only
from tests.helpers.handlers import Remote
from tests.helpers.session_ends import USES, end_in_the_middle, num_held

pytestmark = pytest.mark.timeout(90)

QUICK = ("execute", "get", "wait", "await")
SLOW = ("compile", "start", "dump", "ask")


def children() -> list[str]:
    return Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()


@pytest.mark.parametrize("uses", [QUICK, SLOW], ids=lambda uses: "-".join(uses))
def test_whoever_uses_a_session_that_ends_is_told_and_nothing_stays(uses: tuple[str, ...]) -> None:
    assert set(QUICK + SLOW) == set(USES)
    end_in_the_middle(0, uses)
    num_before, before = num_held(), children()
    for seed in range(1, 4):
        end_in_the_middle(seed, uses)
    assert num_held(num_before) <= num_before
    assert children() == before


@pytest.mark.parametrize("use", ["execute", "get", "compile"])
def test_a_signal_s_handler_may_end_the_session(use: str) -> None:
    end_in_the_middle(0, (use, "get"), by_signal=True)
    num_before = num_held()
    for seed in range(1, 3):
        end_in_the_middle(seed, (use, "get"), by_signal=True)
    assert num_held(num_before) <= num_before


def test_a_session_that_another_thread_ends_tells_who_awaits_a_call() -> None:
    crossfade.init()
    call = Remote.remote().slow.remote(1.0)

    async def wait() -> Any:
        return await call

    timer = threading.Timer(0.1, crossfade.shutdown)
    timer.start()
    with pytest.raises(crossfade.CrossfadeError):
        asyncio.run(asyncio.wait_for(wait(), 20))
    timer.join()


def test_a_session_that_another_thread_ends_while_one_waits_gives_everything_back() -> None:
    num_before, errors = [], []

    def end() -> None:
        try:
            crossfade.shutdown()
        except BaseException as error:
            errors.append(error)

    for _ in range(4):
        crossfade.init()
        call = Remote.remote().slow.remote(1.0)
        timer = threading.Timer(0.05, end)
        timer.start()
        with pytest.raises(crossfade.CrossfadeError):
            call.get(timeout=20)
        timer.join()
        del call
        gc.collect()
        num_before.append(len(os.listdir("/proc/self/fd")))
    assert errors == []
    assert num_before[-1] <= num_before[0] + 2


def behind(act: Callable[..., Any], then: Callable[[], None], num: int = 1) -> Callable[..., Any]:
    """Does it, and something else right behind the ``num``-th time."""
    num_done = 0

    def acting(*args: Any) -> Any:
        nonlocal num_done
        result = act(*args)
        num_done += 1
        if num_done == num:
            then()
        return result

    return acting


@interpreted_only("it replaces a method of a compiled class")
def test_a_session_that_a_handler_ends_while_an_actor_starts_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    start, before = threading.Thread.start, children()
    for num in (1, 2):
        crossfade.init()
        if num == 1:  # the thread that shows what actors print
            monkeypatch.setattr(threading.Thread, "start", behind(start, crossfade.shutdown))
        else:
            doorbell: Any = sessions.require().engine.doorbell  # type: ignore[attr-defined]
            monkeypatch.setattr(doorbell, "watch", behind(doorbell.watch, crossfade.shutdown, num=2))
        with pytest.raises(crossfade.SessionError, match="shut down"):
            Remote.remote()
        monkeypatch.undo()
        assert children() == before
        assert not crossfade.is_initialized()


def test_a_session_that_ends_while_a_graph_is_opened_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    before = children()
    crossfade.init()
    node = Remote.remote().same.bind(crossfade.InputNode())
    monkeypatch.setattr("crossfade.engines.local_plan.Recorder", behind(Recorder, crossfade.shutdown))
    with pytest.raises(crossfade.SessionError, match="shut down"):
        node.compile(record=True)
    assert children() == before
