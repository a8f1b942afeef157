"""Threads of which one runs at a time, and which take turns between any two lines of some files, by the dice.

What a thread of a test does stands for a process here: it can be killed between two lines, sleep, and be rung as by a doorbell.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from random import Random
from types import FrameType, ModuleType
from typing import Any

LIMIT_S = 30.0
MOST_LINES = 300_000


class Killed(BaseException):
    """The end of a thread whose process is dead: thrown when all others are through."""


class Task:
    """One thread.

    Args:
        name: for reports.
        act: what it does.
        dies_at: at which of its lines it is killed; 0 for never.
        is_needed: whether there is something to wait for as long as it has not ended.
    """

    def __init__(self, name: str, act: Callable[[], None], dies_at: int = 0, *, is_needed: bool = True) -> None:
        self.name = name
        self.act = act
        self.dies_at = dies_at
        self.is_needed = is_needed
        self.gate = threading.Semaphore(0)
        self.num_lines = 0
        self.is_asleep = self.is_rung = self.is_dead = self.is_done = False


class RungBell:
    """A doorbell as `crossfade.host.doorbell.Bell`, whose owner is a task."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.task: Task | None = None
        self.flags = memoryview(bytearray(2))

    def ring(self) -> None:
        if self.task is not None:
            self._stage.ring(self.task)

    def announce_mail(self) -> None:
        self.flags[1] = 1

    def close(self) -> None:
        self.task = None


class Stage:
    """Runs tasks, one at a time.

    Args:
        rng: whose turn it is.
        modules: between the lines of these somebody else may come.
        chance: of a change at each line.
    """

    def __init__(self, rng: Random, modules: Iterable[ModuleType], chance: float) -> None:
        self._rng = rng
        self._files = {module.__file__ for module in modules}
        self._chance = chance
        self._tasks: list[Task] = []
        self._now: Task | None = None
        self._over = threading.Event()
        self._num_lines = 0
        self.error: BaseException | None = None
        self.on_death: Callable[[Task], None] = lambda task: None

    def run(self, tasks: list[Task]) -> None:
        """Until all have ended, are dead, or sleep with nobody to ring them."""
        self._tasks = tasks
        threads = [threading.Thread(target=self._play, args=(task,), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        self._give_turn()
        is_over = self._over.wait(LIMIT_S)
        stuck = [task.name for task in tasks if task.is_needed and not (task.is_done or task.is_dead)]
        for task, thread in zip(tasks, threads, strict=True):
            task.is_dead = task.is_dead or not task.is_done
            task.gate.release()
            thread.join(LIMIT_S)
        if self.error is not None:
            raise self.error
        assert is_over, "somebody waits for what only others could do who have no turn"
        assert not stuck, f"{stuck} sleep, and nobody is going to ring them"

    def ring(self, task: Task) -> None:
        """The task looks again before it sleeps once more."""
        task.is_rung = True
        self.change()

    def sleep(self) -> None:
        """Until somebody rings."""
        if self._over.is_set():
            raise Killed
        task = self._here()
        task.is_asleep = True
        self._leave(task)
        task.is_asleep = task.is_rung = False

    def change(self) -> None:
        """Somebody else may go on."""
        if not self._over.is_set():
            self._leave(self._here())

    def _here(self) -> Task:
        task = self._now
        assert task is not None
        if task.is_dead:
            raise Killed
        return task

    def _play(self, task: Task) -> None:
        task.gate.acquire()
        try:
            if not task.is_dead:
                sys.settrace(self._enter)
                task.act()
        except Killed:
            pass
        except BaseException as error:
            self.error = self.error or error
            self._over.set()
        finally:
            sys.settrace(None)
            if not task.is_dead:
                task.is_done = True
                self._give_turn()

    def _enter(self, frame: FrameType, event: str, arg: Any) -> Any:
        return self._line if frame.f_code.co_filename in self._files else None

    def _line(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "line":
            task = self._here()
            task.num_lines += 1
            self._num_lines += 1
            if self._num_lines > MOST_LINES:
                raise AssertionError("nothing comes to an end")
            if task.num_lines == task.dies_at:
                task.is_dead = True
                self.on_death(task)
                self._leave(task)
            elif self._rng.random() < self._chance:
                self._leave(task)
        return self._line

    def _leave(self, task: Task) -> None:
        self._give_turn()
        task.gate.acquire()
        if task.is_dead:
            raise Killed

    def _give_turn(self) -> None:
        if self._over.is_set():
            return
        able = [
            task
            for task in self._tasks
            if not (task.is_done or task.is_dead) and not (task.is_asleep and not task.is_rung)
        ]
        if not able or not any(task.is_needed and not (task.is_done or task.is_dead) for task in self._tasks):
            self._now = None
            self._over.set()
            return
        self._now = self._rng.choice(able)
        self._now.gate.release()
