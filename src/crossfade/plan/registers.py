"""Part of the validator: the values in the registers of each party (PL-3, PL-4); and the faults that all its parts find."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from crossfade.plan.actions import CALLS, MAIN, TAKES, Action, Verb
from crossfade.plan.events import Book, meeting_use
from crossfade.plan.plan import Plan
from crossfade.plan.text import values_used
from crossfade.types import DRIVER

_MAKE_VALUES = CALLS | TAKES


@dataclass(frozen=True, slots=True)
class Fault:
    """A step that breaks an invariant."""

    invariant: str  # ``PL-1`` to ``PL-4``
    actor: str  # the party whose step it is
    index: int | None  # the step's position in the party's program; None where the plan has no step to point at
    reason: str  # what is wrong, in words


def check_registers(plan: Plan, book: Book) -> Iterator[Fault]:
    """Values are there when they are used, are made once, and are freed where they came through a channel."""
    inputs = [each.value for each in plan.inputs]
    for actor, actions in plan.programs.items():
        registers = _Registers(plan, book, actor, inputs if actor == DRIVER else [])
        for index, action in enumerate(actions):
            if action.ahead:
                yield from registers.make(index, action)
        for index, action in enumerate(actions):
            used = values_used(plan, action, actor)
            if not registers.present.issuperset(used):
                yield from registers.faults_of_absent(index, used)
            registers.use(index, action, used)
            if not action.ahead and action.verb in _MAKE_VALUES:
                yield from registers.make(index, action)
        for value, index in registers.received.items():
            if (value, actor) not in book.frees:
                reason = f"{actor} never frees {value}: the slot is never free again"
                yield Fault("PL-3", actor, index, reason)
        for index, action in enumerate(actions):
            if (
                action.stream != MAIN
                and action.verb is Verb.COLL
                and meeting_use(plan, book, action.target, actor) is None
            ):
                reason = f"{actor} never waits for {action.target}: it would be started again while it is under way"
                yield Fault("PL-3", actor, index, reason)


class _Registers:
    """The registers of one party in one round, for that round's execution.

    A receive that runs ahead was in an earlier round: this round's execution has its value from the start.
    """

    def __init__(self, plan: Plan, book: Book, actor: str, given: list[str]) -> None:
        self._plan, self._book, self._actor = plan, book, actor
        self.present = set(given)
        self._made = set(given)
        self.received: dict[str, int] = {}
        self._collected: set[str] = set()

    def faults_of_absent(self, index: int, used: Iterable[str]) -> Iterator[Fault]:
        """The action needs its values."""
        for value in used:
            if value not in self.present:
                yield Fault("PL-4", self._actor, index, f"{value} {self._absence(value)}")

    def use(self, index: int, action: Action, used: Iterable[str]) -> None:
        """Notes the first use of what came from others; a ``free`` takes its own value away."""
        for value in used:
            if value in self.received or value in self._collected:
                self._book.first_uses.setdefault((value, self._actor), (self._actor, index))
        if action.verb is Verb.FREE:
            self._book.frees[action.target, self._actor] = (self._actor, index)
            self.present.discard(action.target)

    def make(self, index: int, action: Action) -> Iterator[Fault]:
        """The action fills registers: each only once in a round, freed or not."""
        for value in self._values_made(action):
            if value in self._made:
                yield Fault("PL-4", self._actor, index, f"{self._actor} gets {value} a second time in the same round")
            self._made.add(value)
            self.present.add(value)
            if action.verb in TAKES:
                self.received[value] = index
            elif action.verb is Verb.COLL:
                self._collected.add(value)

    def _values_made(self, action: Action) -> tuple[str, ...]:
        if action.verb in TAKES:
            return (self._plan.channel[action.target].value,)
        if action.verb is Verb.RUN:
            return self._plan.node[action.target].outputs
        return self._plan.collective[action.target].outputs_of(self._actor) if action.verb is Verb.COLL else ()

    def _absence(self, value: str) -> str:
        freed = self._book.frees.get((value, self._actor))
        if freed is not None:
            return f"was freed by step {freed[1]}"
        return f"is not there yet, or never is, on {self._actor}"
