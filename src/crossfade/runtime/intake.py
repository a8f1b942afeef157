"""Moves values that come from elsewhere into registers: on time, early, or late, only to be dropped.

A method fails as soon as one of its inputs is an error, so its party does not wait for the other inputs. While the party waits for
one input, it polls the others; once one of them is an error, it runs the method, which fails. A value that the party did not
wait for, and that nothing else on it needs, is *owed*: it is taken and dropped after it arrives, before the next value of the same
channel, so that all channels stay in step. Owed values are polled whenever the party cannot run its next step.

Why this cannot deadlock (PL-2): a wait of the plan is either left out, or is delayed while nothing waits for it. So the remaining
waits are a subset of those in which the validator found no cycle.

So an execution whose outputs have all arrived may still be under way on an actor that has not even read its input: the rings of
inputs may be full though no execution is in flight. The driver writes all inputs of an execution or none (`engines.driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfade.channels.protocol import EMPTY
from crossfade.errors import Failure
from crossfade.runtime.cursor import Idle, Step


class Registers:
    """The registers in which one party keeps its values."""

    def __init__(self) -> None:
        # the registers. A register that has no value in this round, not yet or no longer, holds `EMPTY`.
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def of(self, value: str) -> int:
        """Returns the register of a value."""
        if value not in self._places:
            self._places[value] = len(self.values)
            self.values.append(EMPTY)
        return self._places[value]


class Intake:
    """Takes one value per round into its register, or drops it.

    ``register`` is the first one, if the value fills several. ``drop`` takes the value and discards it. ``owing`` is the party's
    list of intakes that owe values: this one is in it while it does.
    """

    __slots__ = ("_drop", "_owing", "_register", "_registers", "idle", "num_owed", "take")

    def __init__(
        self, registers: list[Any], register: int, take: Step, drop: Step, idle: Idle, owing: list[Intake]
    ) -> None:
        self._registers = registers
        self._register = register
        self.take = take  # fills the register, overwriting its content; False if no value has arrived
        self._drop = drop
        self.idle = idle  # a cheap check: True as long as most likely no value has arrived
        self._owing = owing
        self.num_owed = 0  # how many values must be dropped before the next one may be taken

    def try_take(self) -> bool:
        """Takes the value if it has arrived. True if the register has its value now."""
        if self._registers[self._register] is not EMPTY:
            return True
        return (not self.num_owed or self.settle()) and self.take()

    def has_value(self) -> bool:
        """Whether the register has its value."""
        return self._registers[self._register] is not EMPTY

    def has_failed(self) -> bool:
        """Takes the value if it has arrived. True if the register has a value now and it is an error."""
        return self.try_take() and type(self._registers[self._register]) is Failure

    def is_idle(self) -> bool:
        """A cheap check: True if `try_take` would most likely change nothing."""
        return self._registers[self._register] is not EMPTY or self.idle()

    def owe(self) -> None:
        """Notes that the value of this round was not taken and is not needed: it is dropped after it arrives."""
        if not self.num_owed:
            self._owing.append(self)
        self.num_owed += 1

    def settle(self) -> bool:
        """Drops the owed values that have arrived. True if none is owed any more."""
        while self.num_owed:
            if not self._drop():
                return False
            self.num_owed -= 1
        if self in self._owing:
            self._owing.remove(self)
        return True


class Wait:
    """Waits for an input of an action, unless another input of that action is an error.

    ``siblings`` are the registers of the action's other values, ``others`` the intakes of those that come from elsewhere and were
    requested already.
    """

    __slots__ = ("_has_taken", "_intake", "_others", "_registers", "_siblings")

    def __init__(self, intake: Intake, registers: list[Any], siblings: Sequence[int], others: Sequence[Intake]) -> None:
        self._intake = intake
        self._registers = registers
        self._siblings = siblings
        self._others = others
        self._has_taken = False

    def step(self) -> bool:
        """Takes the value if it has arrived. True if the wait is over: the register has its value, or another value is an error."""
        self._has_taken = not self._intake.has_value() and self._intake.try_take()
        return self._intake.has_value() or self._has_failure() or any(other.has_failed() for other in self._others)

    def has_taken(self) -> bool:
        """Whether the last call of `step` took the value."""
        return self._has_taken

    def _has_failure(self) -> bool:
        registers = self._registers
        return any(type(registers[register]) is Failure for register in self._siblings)

    def is_idle(self) -> bool:
        """A cheap check: True as long as `step` would most likely return False."""
        if self._intake.has_value() or not self._intake.is_idle() or self._has_failure():
            return False
        return all(other.is_idle() for other in self._others)


def settler(owing: list[Intake]) -> Callable[[], bool]:
    """Returns a function that drops the owed values that have arrived, and returns True if it dropped any."""

    def settle() -> bool:
        before = sum(intake.num_owed for intake in owing)
        for intake in list(owing):
            intake.settle()
        return sum(intake.num_owed for intake in owing) < before

    return settle
