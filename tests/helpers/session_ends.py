"""Sessions that end while other threads are in the middle of using them."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import random
import signal
import threading
import time
from collections.abc import Callable

import crossfade
from tests.helpers.footprint import footprint
from tests.helpers.handlers import Remote

_LIMIT_S = 60.0


class Program:
    """What the threads share: two actors, and a graph that goes through both."""

    def __init__(self) -> None:
        self.one, self.other = Remote.remote(), Remote.remote()
        self.graph = self.compile(record=True)
        assert self.graph.execute(1).get(_LIMIT_S) == 1

    def compile(self, **options: object) -> crossfade.CompiledGraph:
        """Another graph on both."""
        with crossfade.InputNode() as inp:
            graph: crossfade.CompiledGraph = self.other.same.bind(self.one.same.bind(inp)).compile(**options)
        return graph


def _execute(program: Program) -> None:
    for value in (3, b"x" * 300_000):  # in the ring, and in memory of its own
        assert program.graph.execute(value).get(_LIMIT_S) == value


def _get(program: Program) -> None:
    crossfade.get(program.one.slow.remote(0.01), timeout=_LIMIT_S)


def _wait(program: Program) -> None:
    crossfade.wait([program.other.same.remote(1)], timeout=_LIMIT_S)


def _await(program: Program) -> None:
    async def calls() -> None:
        for _ in range(100):
            await program.other.same.remote(3)

    asyncio.run(asyncio.wait_for(calls(), _LIMIT_S))


def _compile(program: Program) -> None:
    graph = program.compile()
    assert graph.execute(b"x" * 100_000).get(_LIMIT_S) == b"x" * 100_000
    graph.teardown()


def _start(program: Program) -> None:
    actor = Remote.remote()
    actor.same.remote(3)
    crossfade.kill(actor)


def _dump(program: Program) -> None:
    crossfade.dump(io.StringIO())


def _ask(program: Program) -> None:
    program.graph.statistics()
    program.graph.timeline()


USES: dict[str, Callable[[Program], None]] = {
    "execute": _execute,
    "get": _get,
    "wait": _wait,
    "await": _await,
    "compile": _compile,
    "start": _start,
    "dump": _dump,
    "ask": _ask,
}
"""What a thread does with a session, by name."""


def num_held(wanted: int = 0) -> int:
    """Descriptors of this process; where more are held than wanted, what threads are giving back is waited for."""
    end_s = time.monotonic() + 10.0
    while True:
        gc.collect()
        num = footprint(os.getpid()).num_descriptors
        if not wanted or num <= wanted or time.monotonic() > end_s:
            return num
        time.sleep(0.01)


def end_in_the_middle(seed: int, uses: tuple[str, ...], *, by_signal: bool = False) -> None:
    """Starts a session that several threads use, each in one way again and again, and ends it at a random moment: with
    ``by_signal`` in a signal's handler, which comes while the main thread does the first of ``uses``. No thread may hang, or
    get another error than one that says that the session, or its actors, ended.
    """
    errors: list[BaseException] = []

    def use(name: str) -> None:
        try:
            while crossfade.is_initialized():
                USES[name](program)
        except BaseException as error:
            errors.append(error)

    crossfade.init(num_cpus=1000)
    program = Program()
    threads = [threading.Thread(target=use, args=(name,), daemon=True) for name in uses[by_signal:]]
    for thread in threads:
        thread.start()
    delay_s = random.Random(seed).uniform(0.001, 0.25)
    if by_signal:
        before = signal.signal(signal.SIGUSR2, lambda *_: crossfade.shutdown())
        timer = threading.Timer(delay_s, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR2))
        timer.start()
        try:
            use(uses[0])
            timer.join()
        finally:
            signal.signal(signal.SIGUSR2, before)
    else:
        time.sleep(delay_s)
        crossfade.shutdown()
    for thread in threads:
        thread.join(_LIMIT_S)
        assert not thread.is_alive(), "a thread waits on"
    crossfade.shutdown()  # one that saw a session may have started the next one, as its first actor does
    for error in errors:
        assert isinstance(error, crossfade.SessionError | crossfade.ActorError), repr(error)
