"""A program in a storm of signals whose handlers raise, one every two milliseconds (``python -m``, in a process of its own).

With SIGINT it is Ctrl-C, which crossfade has taken: nothing may be lost. With SIGALRM the handler is the program's own and raises
anywhere: a graph may say that it was interrupted in the middle, but no actor may be lost, and no call made twice.

Every value carries a number. Actors count what they were called with: what has succeeded was done once, what was interrupted at
most once.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

import crossfade
from crossfade import interrupted
from tests.helpers.footprint import footprint
from tests.helpers.programs import python

_MARGIN_S = 60.0  # then the program says where its threads are, and ends
_DUMPED_S = 10.0  # for that


def storm(kind: str, duration_s: float, seed: int) -> dict[str, Any]:
    """A storm of that signal, for so long at least, in which nothing is lost and the program does not hang."""
    command = ("-X", "faulthandler", "-m", "tests.helpers.interrupt_storm", kind, str(duration_s), str(seed))
    ran = python(*command, timeout_s=duration_s + _MARGIN_S + _DUMPED_S)
    assert ran.returncode == 0, f"seed {seed}: {ran.returncode}\n{ran.stderr}"
    counts: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return counts


__all__: list[str] = []

PERIOD_S = 0.002
LIMIT_S = 60.0
ON_ITS_WAY_S = 0.05
LARGE_BYTES = 300_000
MAX_INFLIGHT = 4
USES = ("execute", "get", "drop", "remote", "put", "teardown")
LEAST_CUTS = 50

_SENDER = """
import os, random, sys, time
pid, number, period_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
while os.getppid() == pid:
    os.kill(pid, number)
    time.sleep(period_s if random.random() < 0.98 else 20 * period_s)  # now and then, what takes longer has a chance
"""


Value = tuple[int, Any]
"""A number, and bytes or an array that are full of it."""


class Late(Exception):
    """What the handler of SIGALRM raises."""


class Counter:
    """Counts the numbers that it is called with."""

    def __init__(self) -> None:
        self.seen: collections.Counter[int] = collections.Counter()

    def count(self, value: Value) -> Value:
        self.seen[value[0]] += 1
        return value

    def numbers(self) -> dict[int, int]:
        return dict(self.seen)

    def pid(self) -> int:
        return os.getpid()


class Armed:
    """Whether the handler of SIGALRM raises."""

    is_armed = False


def on_alarm(*_: object) -> None:
    if Armed.is_armed:
        raise Late


@interrupted.interruptible
def attempt(action: Callable[[], Any]) -> Any:
    """Does something where signals may come; the rest of this program is spared."""
    try:
        Armed.is_armed = True
        return action()
    finally:
        Armed.is_armed = False


class Storm:
    """Sends the signals, from another process."""

    def __init__(self, number: int) -> None:
        self._number = number
        # The pipes of this program are not its own: whoever reads them waits until the last one has closed them.
        command = [sys.executable, "-c", _SENDER, *map(str, (os.getpid(), number, PERIOD_S))]
        none = subprocess.DEVNULL
        self._popen = subprocess.Popen(command, stdin=none, stdout=none, stderr=none)

    @contextmanager
    def calm(self) -> Iterator[None]:
        """No signals meanwhile."""
        self._popen.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._popen.pid, os.WSTOPPED)
        self.forget()
        try:
            yield
        finally:
            self._popen.send_signal(signal.SIGCONT)

    def forget(self) -> None:
        """What is pending is not raised, nor what a brief function has sent to itself again."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {self._number})
        while signal.sigtimedwait({self._number}, ON_ITS_WAY_S):
            pass
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {self._number})
        interrupted.Held.is_pending = False

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self.forget()


class Program:
    """The program; counts how often each use has succeeded, and was cut by an interrupt."""

    def __init__(self, seed: int, storm_of: int) -> None:
        self.rng = random.Random(seed)
        self.done: collections.Counter[str] = collections.Counter()
        self.cut: collections.Counter[str] = collections.Counter()
        self.num_torn = 0
        cls = crossfade.remote(Counter)
        self.actors = [cls.remote() for _ in range(3)]
        self.pids = crossfade.get([actor.pid.remote() for actor in self.actors])
        self.graph: Any = None
        self.refs: list[tuple[int, Any]] = []  # of executions
        self.calls: list[tuple[int, Any]] = []
        self.sure: list[set[int]] = [set() for _ in self.actors]  # numbers that were certainly sent to each
        self.maybe: list[set[int]] = [set() for _ in self.actors]
        self.number = 0
        self.compile_calmly()
        self.storm = Storm(storm_of)

    def use(self, name: str, action: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether it has succeeded, and what came out."""
        try:
            result = attempt(action)
        except crossfade.TaskError as error:  # which may be a Late as well
            if "raised Late" not in str(error):  # it has come in the middle of unpickling a result
                raise
            self.num_torn += 1
            return True, None
        except (KeyboardInterrupt, Late):
            self.cut[name] += 1
            return False, None
        except crossfade.SessionError as error:
            if "interrupted in the middle" not in str(error):
                raise
            self.num_torn += 1
            self.cut[name] += 1
            self.refs.clear()  # their values are gone with it
            self.teardown()
            self.compile()
            return False, None
        self.done[name] += 1
        return True, result

    def until_done(self, name: str, action: Callable[[], Any]) -> Any:
        """Repeats it until it succeeds, or the graph says that it cannot; interrupted often, where it is calm."""
        num_torn, is_done, result = self.num_torn, False, None
        for _ in range(20):
            is_done, result = self.use(name, action)
            if is_done or self.num_torn > num_torn:
                return result
        with self.storm.calm():
            while not is_done and self.num_torn == num_torn:  # a signal may be on its way still
                is_done, result = self.use(name, action)
            return result

    def next_value(self) -> Value:
        self.number += 1
        content = bytes([self.number % 251]) * self.rng.choice((1, 1, 10_000, LARGE_BYTES))
        return self.number, np.frombuffer(content, np.uint8) if self.rng.random() < 0.3 else content

    def bound(self) -> Any:
        return self.actors[1].count.bind(self.actors[0].count.bind(crossfade.InputNode()))

    def compile_calmly(self) -> None:
        self.graph = self.bound().compile(max_inflight=MAX_INFLIGHT)

    # Uses

    def execute(self) -> None:
        if self.graph is None:
            self.compile()
        if len(self.refs) >= MAX_INFLIGHT - 1:
            self.get()
        value = self.next_value()
        is_done, ref = self.use("execute", lambda: self.graph.execute(value))
        for place in (0, 1):
            self.maybe[place].add(value[0])
        if is_done:
            self.refs.append((value[0], ref))

    def get(self) -> None:
        if not self.refs:
            return
        number, ref = self.refs[0]
        self.check(number, self.until_done("get", lambda: ref.get(LIMIT_S)))
        if self.refs:
            self.refs.pop(0)
            for place in (0, 1):
                self.sure[place].add(number)

    def drop(self) -> None:
        """Nobody wants these results any more; the executions and the calls themselves go on."""
        self.use("drop", self.refs.clear)
        self.use("drop", self.calls.clear)

    def remote(self) -> None:
        value = self.next_value()
        place = self.rng.randrange(3)
        is_done, ref = self.use("remote", lambda: self.actors[place].count.remote(value))
        self.maybe[place].add(value[0])
        if is_done:
            self.sure[place].add(value[0])
            self.calls.append((value[0], ref))
        if len(self.calls) > 3:
            self.get_call()

    def get_call(self) -> None:
        number, ref = self.calls.pop(self.rng.randrange(len(self.calls)))
        self.check(number, self.until_done("get of a call", lambda: crossfade.get(ref, timeout=LIMIT_S)))

    def put(self) -> None:
        value = self.next_value()
        is_done, ref = self.use("put", lambda: crossfade.put(value))
        if is_done:
            self.check(value[0], self.until_done("get of a put", ref.get))

    def compile(self) -> None:
        if self.graph is None:
            self.graph = self.until_done("compile", lambda: self.bound().compile(max_inflight=MAX_INFLIGHT))

    def teardown(self) -> None:
        if self.graph is not None:
            graph = self.graph
            while self.refs:
                self.get()
            self.until_done("teardown", lambda: graph.teardown(timeout=LIMIT_S))
            if self.graph is graph:  # and none that stands for one that was torn meanwhile
                self.graph = None

    def with_block(self) -> None:
        """A graph of its own, beside the other one."""
        value = self.next_value()

        def run() -> Any:
            with self.actors[2].count.bind(crossfade.InputNode()).compile() as graph:
                return graph.execute(value).get(LIMIT_S)

        is_done, got = self.use("with", run)
        self.maybe[2].add(value[0])
        if is_done:
            self.check(value[0], got)

    @staticmethod
    def check(number: int, got: Any) -> None:
        assert got is None or (got[0] == number and bytes(got[1]).strip(bytes([number % 251])) == b""), (number, got[0])

    def run(self, duration_s: float) -> None:
        """Uses crossfade for so long, and until it has done and cut enough, and looks at what has become of everything."""
        uses = [self.execute] * 12 + [self.get] * 8 + [self.remote] * 8 + [self.put] * 2
        uses += [self.compile, self.teardown, self.with_block, self.drop]
        end_s = time.monotonic() + duration_s
        while time.monotonic() < end_s or not self.done.keys() >= set(USES) or self.cut.total() <= LEAST_CUTS:
            self.rng.choice(uses)()
        self.teardown()
        while self.calls:
            self.get_call()
        with self.storm.calm():
            self.look()
        # After a shutdown Ctrl-C comes anywhere: this program goes on holding it back, by a handler that is not crossfade's own.
        signal.signal(signal.SIGINT, partial(interrupted.on_interrupt))
        self.until_done("shutdown", crossfade.shutdown)
        self.storm.end()
        crossfade.shutdown()

    def look(self) -> None:
        """Every actor lives, and has done what it had to do, once."""
        graph = self.bound().compile()
        assert graph.execute((-1, b"")).get(LIMIT_S)[0] == -1
        graph.teardown()
        assert crossfade.get([actor.pid.remote() for actor in self.actors], timeout=LIMIT_S) == self.pids
        for place, actor in enumerate(self.actors):
            seen = actor.numbers.remote().get(LIMIT_S)
            assert set(seen.values()) <= {1}, f"actor {place} has done something twice"
            assert self.sure[place] <= seen.keys(), f"actor {place} has not done {self.sure[place] - seen.keys()}"
            assert seen.keys() - {-1} <= self.maybe[place] | self.sure[place], (
                f"actor {place} has done what nobody wanted"
            )


@interrupted.whole
def main(kind: str, duration_s: float, seed: int) -> None:
    faulthandler.dump_traceback_later(duration_s + _MARGIN_S, exit=True)
    interrupted.PATIENCE_S = 1e9  # nobody presses a key five hundred times a second
    crossfade.init()
    crossfade.shutdown()  # what is imported, and stays open, once
    num_before = footprint(os.getpid()).num_descriptors
    if kind == "SIGALRM":
        signal.signal(signal.SIGALRM, on_alarm)
    program = Program(seed, getattr(signal, kind))
    program.run(duration_s)
    if kind == "SIGINT":
        gc.collect()
        assert footprint(os.getpid()).num_descriptors <= num_before
        assert not program.num_torn
    with open(f"/proc/self/task/{os.getpid()}/children") as children:
        assert not children.read().split()
    print(json.dumps({"done": program.done, "cut": program.cut, "torn": program.num_torn}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
