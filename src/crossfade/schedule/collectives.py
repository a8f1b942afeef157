"""The pass that overlaps collectives with work: started as soon as their inputs are there, waited for where they are used.

A collective moves up to right after the last of its inputs is made, but not past another collective, so that all
actors keep to one order of them (PL-1). It then only starts there, in the background.

What goes out of a collective to other parties is written where the plan had it, right after the collective's old place, and
that would wait for it. So a write moves down past work that is ready to run: calls whose inputs are there, and writes and starts
that wait for nothing of the same round. It stops at everything that may wait, which is why PL-2's argument still holds: whatever it
passed could as well have come right after the collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from crossfade.plan.actions import COLL_STREAM, Action, Verb
from crossfade.schedule.draft import Draft
from crossfade.types import DRIVER


def start_collectives(draft: Draft) -> Draft:
    """Moves collectives up and their writes down; comes before values are freed."""
    if not draft.collectives:
        return draft
    values = draft.values()
    value_of = {spec.id: spec.value for spec in draft.channels}
    blocking = {channel.id for channel in draft.channels if channel.transport.blocks}
    blocking |= {collective.id for collective in draft.collectives if collective.transport.blocks}
    arriving: dict[str, set[str]] = {party: set() for party in draft.programs}
    for spec in draft.channels:
        for reader in spec.readers if spec.is_ordered else ():
            arriving[reader].add(spec.value)
    for party, actions in draft.programs.items():
        if party != DRIVER:
            got = {value for (verb, _), (_, made) in values[party].items() if verb is Verb.COLL for value in made}
            mover = _Mover(values[party], value_of, got, got | arriving[party], blocking)
            draft.programs[party] = mover.write_late(mover.start_early(actions))
    return draft


@dataclass(frozen=True, slots=True)
class _Mover:
    # what each of its calls and collectives takes and makes.
    values: Mapping[tuple[Verb, str], tuple[tuple[str, ...], tuple[str, ...]]]
    value_of: Mapping[str, str]  # the value of each channel
    got: set[str]  # what it gets from collectives
    late: set[str]  # values for which their first user may have to wait
    blocking: set[str]  # channels and collectives that block, and so keep their places

    def start_early(self, actions: Sequence[Action]) -> list[Action]:
        """Each collective right after its last input, or where it was if it takes what another collective gives."""
        program: list[Action] = []
        for action in actions:
            at = len(program)
            if action.verb is Verb.COLL and action.target not in self.blocking:
                needed = self._used(action)
                while needed.isdisjoint(self.late) and at and not self._must_precede(program[at - 1], needed):
                    at -= 1
                action = Action(Verb.COLL, action.target, COLL_STREAM)
            program.insert(at, action)
        return program

    def _must_precede(self, action: Action, needed: set[str]) -> bool:
        if action.verb not in (Verb.RUN, Verb.COLL):
            return False
        return action.verb is Verb.COLL or not needed.isdisjoint(self.values[action.verb, action.target][1])

    def write_late(self, actions: Sequence[Action]) -> list[Action]:
        """Each write of what a collective gives after the work that can be done meanwhile."""
        program = list(actions)
        for at in reversed(range(len(program))):
            if self._may_trail(program[at]):
                is_send = program[at].verb is Verb.SEND  # and a send overtakes no other send (PL-1)
                while at + 1 < len(program) and not (
                    self._may_wait(program[at + 1]) or (is_send and program[at + 1].verb is Verb.SEND)
                ):
                    program[at], program[at + 1] = program[at + 1], program[at]
                    at += 1
        return program

    def _may_trail(self, action: Action) -> bool:
        if action.verb not in (Verb.WRITE, Verb.SEND) or action.target in self.blocking:
            return False
        return self.value_of[action.target] in self.got

    def _may_wait(self, action: Action) -> bool:
        if action.verb in (Verb.READ, Verb.RECV) or action.target in self.blocking:
            return True
        return not self._used(action).isdisjoint(self.late)

    def _used(self, action: Action) -> set[str]:
        if action.verb in (Verb.RUN, Verb.COLL):
            return set(self.values[action.verb, action.target][0])
        return {self.value_of[action.target]}
