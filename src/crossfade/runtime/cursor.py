"""A cursor: how far one plan has come on one actor; and the steps that it takes, with something around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce

from crossfade.plan.actions import Action

Step = Callable[[], bool]
"""One bound call: True when it has done its work, False when it cannot yet (and has then done nothing)."""

Idle = Callable[[], bool]
"""A cheap look: true as long as a step most likely cannot run."""


class Round:
    """Which round a cursor is in, as recorders ask."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


class Cursor:
    """Runs a list of steps over and over, never blocking. An actor has one cursor for each plan and advances any that can.

    ``prologue`` has one list of steps for each round before round 0 (only actions that run ahead). ``round_`` is told the number of
    each round. ``idles`` has, for steps of the body that wait for a value, by position, a cheap check whether it is still missing.
    While intakes are ``owing`` values (`runtime.intake`) and the cursor cannot advance, ``settle`` is called; it returns True if it
    dropped any.
    """

    def __init__(
        self,
        prologue: Sequence[Sequence[Step]],
        body: Sequence[Step],
        round_: Round,
        idles: Mapping[int, Idle],
        actions: Sequence[Action] = (),
        owing: Sequence[object] = (),
        settle: Step | None = None,
    ) -> None:
        self._rounds = [list(steps) for steps in prologue]
        self._body = list(body)
        self._steps = self._rounds.pop(0) if self._rounds else self._body
        self._at = 0
        self._round = round_
        self._idles = dict(idles)  # looked up quickly where it is compiled
        self._actions = actions
        self._owing = owing
        self._settle = settle

    def advance(self) -> bool:
        """Runs steps up to the end of the round or the first that cannot run yet. Returns whether any step was done. After a
        `ChannelError` the cursor is where it was.
        """
        steps = self._steps
        first = at = self._at
        end = len(steps)
        try:
            while at < end:
                if not steps[at]():
                    return at != first or (bool(self._owing) and self._has_settled())
                at += 1
                self._at = at  # for other threads that ask what this one is doing
            self._next_round()
            at = 0
            return True
        finally:
            self._at = at

    def _has_settled(self) -> bool:
        """Drops owed values that have arrived. True if any was dropped."""
        return self._settle is not None and self._settle()

    def _next_round(self) -> None:
        self._round.number += 1
        if self._steps is not self._body:
            self._steps = self._rounds.pop(0) if self._rounds else self._body

    def idle(self) -> Idle | None:
        """A cheap look at what it stands still for, if there is one."""
        return self._idles.get(self._at) if self._steps is self._body and not self._owing else None

    def is_idle(self) -> bool:
        """Whether a cheap look says that it cannot move."""
        idle = self.idle()
        return idle is not None and idle()

    @property
    def position(self) -> tuple[int, int]:
        """(round, step) where it stands."""
        return self._round.number, self._at

    @property
    def action(self) -> Action | None:
        """The action at which it stands, or which it is carrying out."""
        if self._steps is not self._body:
            return None
        try:
            return self._actions[self._at]
        except IndexError:  # between two rounds
            return None

    def stop(self) -> None:
        """In a forked child, in the middle of a step: ends this process instead of taking the next step."""
        for steps in (self._body, self._steps):
            steps[:] = [_leave] * len(steps)


def idle_of(cursors: Sequence[Cursor]) -> Idle | None:
    """A cheap look at what all of them stand still for, if there is one."""
    idles = [idle for cursor in cursors if (idle := cursor.idle()) is not None]
    return reduce(_both, idles) if idles and len(idles) == len(cursors) else None


def _both(one: Idle, other: Idle) -> Idle:
    return lambda: one() and other()


def _leave() -> bool:
    raise SystemExit(1)


def behind(before: Sequence[Callable[[], None]], step: Step) -> Step:
    """A step before which something is to be done."""
    if not before:
        return step

    def after_them() -> bool:
        for each in before:
            each()
        return step()

    return after_them


def unless(is_skipped: Callable[[], bool], step: Step, recorded: Step) -> Step:
    """A step that is recorded unless it passes a method by, which is no time in which an actor computes."""
    return lambda: step() if is_skipped() else recorded()


def inside(around: Callable[[], AbstractContextManager[None]], step: Step) -> Step:
    """A step that is done inside of something."""

    def within() -> bool:
        with around():
            return step()

    return within
