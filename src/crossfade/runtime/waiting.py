"""Decides which waits come before which action of a party: waits for values that a channel or a collective brings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from crossfade.plan.actions import Action, Verb
from crossfade.plan.plan import Plan
from crossfade.plan.text import values_used
from crossfade.runtime.cursor import Idle, Step
from crossfade.runtime.intake import Intake, Registers, Wait

Make: TypeAlias = Callable[[Action], Intake]
"""Makes the intake of the value that a ``read``, ``recv`` or ``coll`` brings."""


@dataclass(frozen=True, slots=True)
class Bound:
    """A step, and the action that it is part of."""

    step: Step
    action: Action
    # a cheap check: True as long as the step most likely cannot run; None if there is no such check.
    idle: Idle | None = None
    # functions to call each time before the step; they do not count as part of the action.
    before: Sequence[Callable[[], None]] = ()
    # whether the last call of the step carried out its action; None if the step always does.
    is_done: Callable[[], bool] | None = None


class Waiting:
    """Makes the waits of one party's program; to be called for one action after another, in program order."""

    def __init__(self, plan: Plan, actor: str, registers: Registers) -> None:
        self._plan, self._actor = plan, actor
        self._registers = registers
        self._intakes: dict[Action, Intake] = {}
        program = plan.programs[actor]
        self._arrivals = {value: action for action in program for value in self._brought(action)}
        self._uses = [
            (values, action) for action in program if action.verb is not Verb.FREE and (values := self._used(action))
        ]
        self._is_used_with_others = {value for values, _ in self._uses if len(values) > 1 for value in values}
        self._asked = {value for value, act in self._arrivals.items() if act.verb is Verb.READ or act.ahead}
        self._unawaited: set[str] = set()  # started in the background; no step has waited for them yet
        self._passed: set[str] = set()  # values that a step waits for but may proceed without

    def _brought(self, action: Action) -> tuple[str, ...]:
        """Returns the values that an action brings from elsewhere."""
        match action.verb:
            case Verb.READ | Verb.RECV:
                return (self._plan.channel[action.target].value,)
            case Verb.COLL:
                return self._plan.collective[action.target].outputs_of(self._actor)
            case _:
                return ()

    def _used(self, action: Action) -> tuple[str, ...]:
        return values_used(self._plan, action, self._actor)

    def intake(self, arrival: Action, make: Make) -> Intake:
        """Returns the intake of the value that an action brings; the same object each time."""
        if arrival not in self._intakes:
            self._intakes[arrival] = make(arrival)
        return self._intakes[arrival]

    def may_be_owed(self, value: str) -> Intake | None:
        """Returns the intake of a value that may not have been taken when it is freed; None if the value has always been taken."""
        return self._intakes[self._arrivals[value]] if value in self._passed else None

    def start(self, action: Action) -> None:
        """Notes that a ``recv`` or ``coll`` starts in the background: the first action that uses its values waits for them."""
        self._asked.update(self._brought(action))
        self._unawaited.update(self._brought(action))

    def before(self, action: Action, make: Make) -> list[Bound]:
        """Returns the waits for the values that an action uses, except those that an earlier step has surely waited for."""
        maybe = self._unawaited if action.verb is Verb.FREE else self._unawaited | self._passed
        arrivals = dict.fromkeys(self._arrivals[value] for value in self._used(action) if value in maybe)
        return [self.wait(arrival, make, action) for arrival in arrivals]

    def wait(self, arrival: Action, make: Make, user: Action | None = None) -> Bound:
        """Returns a wait for what an action brings, on behalf of ``user``, or of the first action that uses it."""
        values, intake = self._brought(arrival), self.intake(arrival, make)
        self._asked.update(values)
        self._unawaited.difference_update(values)
        is_collective = arrival.verb is Verb.COLL
        action = Action(Verb.COLL if is_collective else Verb.READ, arrival.target)
        if values[0] not in self._is_used_with_others or not self._may_come_out_of_turn(arrival):
            if is_collective:
                return Bound(intake.try_take, action, intake.is_idle)
            return Bound(intake.take, action, intake.idle)  # the value is always taken here, so it is never owed
        siblings = self._siblings(values[0], user)
        is_again = values[0] in self._passed
        if siblings:
            self._passed.add(values[0])
        awaited = [self._arrivals[value] for value in siblings if value in self._asked]
        others = [self.intake(each, make) for each in awaited if self._may_come_out_of_turn(each)]
        wait = Wait(intake, self._registers.values, [self._registers.of(value) for value in siblings], others)
        return Bound(wait.step, action, wait.is_idle, is_done=wait.has_taken if is_again else intake.has_value)

    def _may_come_out_of_turn(self, arrival: Action) -> bool:
        """Whether the value that an action brings may be taken before or after its place in the program. A transfer that blocks
        both sides must keep its place; several values that arrive together must too, as they are not freed together.
        """
        specs = self._plan.collective if arrival.verb is Verb.COLL else self._plan.channel
        return len(self._brought(arrival)) == 1 and not specs[arrival.target].transport.blocks

    def _siblings(self, value: str, user: Action | None) -> list[str]:
        found = (values for values, action in self._uses if value in values and user in (None, action))
        return [other for other in next(found, ()) if other != value]
