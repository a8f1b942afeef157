"""Runs a small world in every order, or in orders drawn by seed, until something is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from crossfade.testing.fake.machine import Fault, Machine, Program, Until

World: TypeAlias = Callable[[Machine], Mapping[str, Program]]
"""Builds drivers, rings and hosts on a fresh machine. It must do the same each time."""

_MOST_STEPS = 100_000


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found."""

    fault: Fault | None
    num_runs: int  # runs that were begun
    is_complete: bool  # every order was covered (`explore` only)

    @property
    def is_ok(self) -> bool:
        """Whether nothing was found."""
        return self.fault is None

    @property
    def kind(self) -> str:
        """``ok``, or the fault's kind."""
        return "ok" if self.fault is None else self.fault.kind

    @property
    def operations(self) -> tuple[str, ...]:
        """The operations that do not go together."""
        return () if self.fault is None else self.fault.operations

    def __str__(self) -> str:
        what = "no fault" if self.fault is None else str(self.fault)
        return f"{what} ({self.num_runs} runs{', all orders' if self.is_complete else ''})"


class _Run:
    """One run of a world, step by step."""

    def __init__(self, world: World, is_strict: bool) -> None:
        self.machine = Machine(is_strict=is_strict)
        self._programs = dict(world(self.machine))
        self._waits: dict[str, Until | None] = dict.fromkeys(self._programs)
        self._steps: dict[str, int] = dict.fromkeys(self._programs, 0)

    def choices(self) -> list[tuple[str, str]]:
        """What can happen next."""
        hosts = [("host", name) for name, until in self._waits.items() if until is None or until.condition()]
        queues = [
            ("queue", name) for name, queue in self.machine.queues.items() if queue and self.machine.can_run(queue[0])
        ]
        return hosts + queues

    def step(self, choice: tuple[str, str]) -> None:
        """Makes it happen."""
        kind, name = choice
        if kind == "queue":
            self.machine.run(name)
            return
        self._steps[name] += 1
        try:
            self._waits[name] = next(self._programs[name])
        except StopIteration:
            del self._programs[name], self._waits[name]

    def finish(self) -> None:
        """Nothing can happen any more: either all is done, or it is stuck."""
        if self._programs or any(self.machine.queues.values()):
            waiting = {name: until.what if until else "nothing" for name, until in self._waits.items()}
            raise self.machine.stuck(waiting)
        self.machine.check_end()

    def state(self) -> Hashable:
        return tuple(self._steps.items()), self.machine.state()


def explore(world: World, *, most_runs: int = 20_000, is_strict: bool = True) -> Verdict:
    """Follows every order of steps, except those that lead to a state which was met before.

    A world is built anew for each run and driven to where the next order branches off, so keep it small.
    """
    seen: set[int] = set()
    stack: list[list[tuple[str, str]]] = [[]]
    num_runs = 0
    while stack:
        if num_runs == most_runs:
            return Verdict(None, num_runs, False)
        num_runs += 1
        path = stack.pop()
        fault = _follow(_Run(world, is_strict), path, seen, stack)
        if fault is not None:
            return Verdict(fault, num_runs, False)
    return Verdict(None, num_runs, True)


def _follow(run: _Run, path: list[tuple[str, str]], seen: set[int], stack: list[list[tuple[str, str]]]) -> Fault | None:
    """Drives a run along ``path`` and then to its end, noting the other ways to go in ``stack``."""
    try:
        for choice in path:
            run.step(choice)
        path = list(path)
        for _ in range(_MOST_STEPS):
            choices = run.choices()
            if not choices:
                run.finish()
                return None
            state = hash(run.state())
            if state in seen:
                return None
            seen.add(state)
            stack.extend([*path, other] for other in choices[1:])
            path.append(choices[0])
            run.step(choices[0])
    except Fault as fault:
        return fault
    return Fault("deadlock", f"a run of more than {_MOST_STEPS} steps")


def sample(world: World, seeds: Iterable[int], *, is_strict: bool = True) -> Verdict:
    """Runs the world once for each seed, in an order drawn from it. Some runs hurry the hosts, some the devices."""
    num_runs = 0
    for seed in seeds:
        num_runs += 1
        fault = _draw(_Run(world, is_strict), random.Random(seed))
        if fault is not None:
            return Verdict(fault, num_runs, False)
    return Verdict(None, num_runs, False)


def _draw(run: _Run, rng: random.Random) -> Fault | None:
    host_weight = rng.choice((0.1, 0.5, 0.9))
    try:
        for _ in range(_MOST_STEPS):
            choices = run.choices()
            if not choices:
                run.finish()
                return None
            weights = [host_weight if kind == "host" else 1 - host_weight for kind, _ in choices]
            run.step(rng.choices(choices, weights)[0])
    except Fault as fault:
        return fault
    return Fault("deadlock", f"a run of more than {_MOST_STEPS} steps")
