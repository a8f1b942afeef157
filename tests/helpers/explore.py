"""A machine that executes small plans in every possible order: what the validator's verdict is compared with.

The machine has memory and semaphores, and knows no rule about plans. Its parties do their steps one at a time, in every
interleaving, until all are at their end or none can go on:

- A ring in shared memory has cells, each with the execution whose value lies in it. Per reader it has two semaphores
  (values put in, values released) and a mark on each cell that this reader has not released.
- Where the copy engine pushes, each reader has a second ring of fewer cells, its slots, with a semaphore and marks of its own: a
  write takes a cell of both, a release gives both back.
- Each ordered transport has, for each pair of parties, a line of sends, and for each reader one line of receives, whoever
  they are from: a party has one receiving thread. The head of that line is matched with the head of its writer's line of
  sends whatever that is, as gloo does. A receive brings its value into a cell of the reader's own ring.
- The parties of a collective have, for each set of parties, a line each of what they have started. When all lines have a
  head, these must be the same, and are over for all.

The driver takes each output by itself, in any order, once it has written the inputs of the execution; it begins the next one
when it has all outputs.

Methods may fail, in every second execution. Where a value is read for one method alone, and another of that method's
inputs is an error which the party knows of, the value is not waited for: it is taken and released, by nobody's step of
the program, when it has come, and before the next value of that channel is read.

What a party has in its registers depends on its own steps alone, so this is played through once, before the rest. Only
the steps that touch shared memory are interleaved.

The machine stops after as many executions as it takes to see a plan come round: see ``num_executions``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from crossfade.plan.plan import Plan
from tests.helpers.explore_machine import Cell, Machine, Stop, num_executions
from tests.helpers.explore_party import Party

__all__ = ["Exploration", "Stop", "explore", "may_pass", "num_executions"]


@dataclass(frozen=True)
class Exploration:
    """What came of it.

    Attributes:
        verdict: ``ok``, ``deadlock`` (a state in which nobody can go on), ``mismatch`` (a value arrives as another, or
            never), ``overwrite`` (of a cell not yet released), ``bad-use`` (of a register without its value).
        why: the same in words.
        num_states: states visited.
    """

    verdict: str
    why: str
    num_states: int


def explore(
    plan: Plan, most_states: int = 200_000, failing: Collection[str] = (), *, drops: bool = True
) -> Exploration:
    """Executes the plan in every order.

    Args:
        plan: the plan.
        most_states: see below.
        failing: nodes whose methods fail in every second execution.
        drops: whether values that were not waited for are taken later, as they have to be.

    Raises:
        OverflowError: there are more than ``most_states`` states.
    """
    seen: set[tuple[tuple[int, ...], tuple[Cell, ...]]] = set()
    try:
        machine = Machine(plan, frozenset(failing))
        parties = [Party(machine, actor) for actor in plan.programs]
        programs = [strand for party in parties for strand in party.strands()]
        programs += [strand for party in parties for strand in party.drops.values() if drops]
        ends = tuple(map(len, programs))
        state = ((0,) * len(programs), tuple(machine.memory))
        stack = [state]
        seen.add(state)
        while stack:
            places, memory = stack.pop()
            is_stuck = True
            for party, place in enumerate(places):
                if place == ends[party]:
                    continue
                after = list(memory)
                if programs[party][place](after):
                    is_stuck = False
                    state = ((*places[:party], place + 1, *places[party + 1 :]), tuple(after))
                    if state not in seen:
                        seen.add(state)
                        stack.append(state)
            if is_stuck and places != ends:
                raise Stop("deadlock", f"the parties {list(plan.programs)} are stuck at {places} of {ends}")
            if is_stuck:
                machine.check_end(memory)
            if len(seen) > most_states:
                raise OverflowError(f"more than {most_states} states")
    except Stop as stop:
        return Exploration(stop.verdict, str(stop), len(seen))
    return Exploration("ok", "", len(seen))


def may_pass(plan: Plan, failing: Collection[str]) -> bool:
    """Whether a party may go on without a value that it reads, if these nodes fail."""
    machine = Machine(plan, frozenset(failing))
    parties = [Party(machine, actor) for actor in plan.programs]
    for party in parties:
        party.strands()
    return any(party.drops for party in parties)
