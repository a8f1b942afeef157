"""How a value from elsewhere comes into its register: in its place, ahead of it, or when it is of no use any more.

A method fails as soon as one of its inputs is an error, so its party does not wait for the other inputs. While it waits for one, it
looks at the others; once one of them is an error, it goes on to the method, which fails. A value that it did not wait for, and
that nothing else on the party needs, is *owed*: it is taken and dropped when it has come, before the next value of the same
channel, so that all channels stay in step. Owed values are looked at whenever the party stands still.

Why this cannot deadlock (PL-2): a wait of the plan is left out, or comes later while nothing waits for it. So the waits that are
left are some of those in which the validator found no cycle.

An execution whose outputs have all come may so be under way on an actor that has not even read its input: the rings of inputs may
be full though no execution is in flight. The driver writes all inputs of an execution or none (`engines.driver`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from crossfade.channels.protocol import EMPTY
from crossfade.errors import Failure
from crossfade.runtime.cursor import Idle, Step

__all__ = ["Intake", "Registers", "Wait", "settler"]


class Registers:
    """Where one party has its values.

    Attributes:
        values: the registers. One that has no value in this round, not yet or not any more, holds `EMPTY`.
    """

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._places: dict[str, int] = {}

    def of(self, value: str) -> int:
        """The register of a value."""
        if value not in self._places:
            self._places[value] = len(self.values)
            self.values.append(EMPTY)
        return self._places[value]


class Intake:
    """Takes one value in for each round, or drops it.

    Attributes:
        take: fills the register, whatever is in it; False if the value is not there.
        idle: a cheap look: true as long as there is most likely nothing to take.
        num_owed: how many values are to be dropped before the next one is taken.

    Args:
        registers: the party's.
        register: which of them the value fills; the first, where there are several.
        take: see above.
        drop: takes the value and forgets it; False if it is not there.
        idle: see above.
        owing: the party's intakes that owe something; this one joins them when it does.
    """

    __slots__ = ("_drop", "_owing", "_register", "_registers", "idle", "num_owed", "take")

    def __init__(
        self, registers: list[Any], register: int, take: Step, drop: Step, idle: Idle, owing: list[Intake]
    ) -> None:
        self._registers = registers
        self._register = register
        self.take = take
        self._drop = drop
        self.idle = idle
        self._owing = owing
        self.num_owed = 0

    def try_take(self) -> bool:
        """Whether the register has its value; takes it, if it is there."""
        if self._registers[self._register] is not EMPTY:
            return True
        return (not self.num_owed or self.settle()) and self.take()

    def has_value(self) -> bool:
        """Whether the register has its value."""
        return self._registers[self._register] is not EMPTY

    def has_failed(self) -> bool:
        """Whether the value is there, or comes now, and is an error."""
        return self.try_take() and type(self._registers[self._register]) is Failure

    def is_idle(self) -> bool:
        """A cheap look: whether `try_take` would most likely change nothing."""
        return self._registers[self._register] is not EMPTY or self.idle()

    def owe(self) -> None:
        """The value of this round is not needed any more, and has not been taken."""
        if not self.num_owed:
            self._owing.append(self)
        self.num_owed += 1

    def settle(self) -> bool:
        """Drops what is owed, as far as it has come. True if that is all of it."""
        while self.num_owed:
            if not self._drop():
                return False
            self.num_owed -= 1
        if self in self._owing:
            self._owing.remove(self)
        return True


class Wait:
    """Waits for a value, unless the action that uses it fails by another of its values.

    Args:
        intake: of the value.
        registers: the party's.
        siblings: registers of the action's other values.
        others: intakes of those of them that come from elsewhere and have been asked for.
    """

    __slots__ = ("_has_taken", "_intake", "_others", "_registers", "_siblings")

    def __init__(self, intake: Intake, registers: list[Any], siblings: Sequence[int], others: Sequence[Intake]) -> None:
        self._intake = intake
        self._registers = registers
        self._siblings = siblings
        self._others = others
        self._has_taken = False

    def step(self) -> bool:
        """True if the value is there, or is not waited for."""
        self._has_taken = not self._intake.has_value() and self._intake.try_take()
        return self._intake.has_value() or self._has_failure() or any(other.has_failed() for other in self._others)

    def has_taken(self) -> bool:
        """Whether the last call of `step` has taken the value in."""
        return self._has_taken

    def _has_failure(self) -> bool:
        registers = self._registers
        return any(type(registers[register]) is Failure for register in self._siblings)

    def is_idle(self) -> bool:
        """A cheap look: true as long as the step most likely cannot run."""
        if self._intake.has_value() or not self._intake.is_idle() or self._has_failure():
            return False
        return all(other.is_idle() for other in self._others)


def settler(owing: list[Intake]) -> Callable[[], bool]:
    """For a cursor that stands still: drops what is owed and has come; whether anything did."""

    def settle() -> bool:
        before = sum(intake.num_owed for intake in owing)
        for intake in list(owing):
            intake.settle()
        return sum(intake.num_owed for intake in owing) < before

    return settle
