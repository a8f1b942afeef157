"""A thread that looks for work moves away from a core that another process wants."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from crossfade.host.cores import Core
from crossfade.host.memory import libc

_ALLOWED = os.sched_getaffinity(0)
pytestmark = [pytest.mark.timeout(30), pytest.mark.skipif(len(_ALLOWED) < 2, reason="there is one core")]


def _look_until(core: Core, num_moves: int, limit_s: float, cores: set[int], left: list[int]) -> None:
    """In a thread of its own, which begins on some of the cores and may then use all."""
    os.sched_setaffinity(0, cores)
    os.sched_setaffinity(0, _ALLOWED)
    deadline = time.monotonic() + limit_s
    while core.num_moves < num_moves and time.monotonic() < deadline:
        core.give_way()
    left.append(libc().sched_getcpu())
    assert os.sched_getaffinity(0) == _ALLOWED


def test_a_thread_moves_off_a_core_that_others_use_and_may_still_use_all() -> None:
    busy = min(_ALLOWED)
    code = f"import os\nos.sched_setaffinity(0, [{busy}])\nprint(flush=True)\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as other:
        try:
            assert other.stdout is not None
            other.stdout.readline()
            core, left = Core(), list[int]()
            thread = threading.Thread(target=_look_until, args=(core, 1, 10.0, {busy}, left))
            thread.start()
            thread.join()
        finally:
            other.kill()
    assert core.num_moves == 1
    assert len(left) == 1


def test_a_thread_that_may_use_one_core_stays() -> None:
    core = Core()

    def look() -> None:
        os.sched_setaffinity(0, {min(_ALLOWED)})
        core._move()
        stays.append(os.sched_getaffinity(0))

    stays: list[set[int]] = []
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert stays == [{min(_ALLOWED)}]
    assert core.num_moves == 0
