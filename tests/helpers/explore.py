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

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from crossfade.plan.actions import MAIN, Action, Verb
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.plan.text import values_used
from crossfade.types import DRIVER
from tests.helpers.explore_machine import EMPTY, Cell, Machine, Passing, Step, Stop, in_one


class Party:
    """One party's way through all rounds: plays what concerns its registers, and gives the steps on shared memory."""

    def __init__(self, machine: Machine, actor: str) -> None:
        self._machine, self._plan, self._actor = machine, machine.plan, actor
        self._has: dict[tuple[str, int], ChannelSpec | None] = {}
        self._pending: set[tuple[str, int]] = set()
        self._ever: set[tuple[str, int]] = set()
        self._came: set[tuple[str, int]] = set()
        self._ran: set[tuple[str, int]] = set()
        self._met: set[tuple[str, int]] = set()
        self._meeting: dict[str, tuple[CollectiveSpec, int]] = {}  # what is under way, by collective
        self._passings: dict[str, Passing] = {}
        self.drops: dict[str, list[Step]] = {}  # of each channel whose values may be owed, what takes them later

    def strands(self) -> list[list[Step]]:
        """What the party does one thing after another; the driver takes each output beside all else."""
        reads = self._output_reads()
        machine, last = self._machine, self._machine.num_executions
        submitted, *got = (machine.cells(1) for _ in range(1 + len(reads)))
        strands: list[list[Step]] = [[] for _ in range(1 + len(reads))]
        for round_ in range(-machine.most_ahead, last):
            parts: list[list[Step]] = [[] for _ in strands]
            for index, step in self._round(round_, last):
                parts[next((number for number, read in enumerate(reads, 1) if index in read), 0)].append(step)
            if reads and round_ >= 0:
                for number, part in enumerate(parts):
                    awaited = ([submitted], round_ + 1) if number else (got, round_)
                    first = in_one(machine.await_counts(*awaited), *part[:1])
                    parts[number] = (
                        [in_one(first, *part[1:], machine.count(got[number - 1]))] if number else [first, *part[1:]]
                    )
                parts[0][-1] = in_one(parts[0][-1], machine.count(submitted))
            for strand, part in zip(strands, parts, strict=True):
                strand += part
        self._check_all_ran(last)
        return strands

    def _round(self, round_: int, last: int) -> Iterator[tuple[int, Step]]:
        """The steps of one round, each with the place of its action."""
        if self._actor == DRIVER and round_ >= 0:
            for value in self._plan.inputs:
                self._make(value.value, round_, None)
        for index, action in enumerate(self._plan.programs[self._actor]):
            if 0 <= round_ + action.ahead < last:
                for step in self._play(action, round_ + action.ahead):
                    yield index, step

    def _output_reads(self) -> list[set[int]]:
        """The places of what concerns the values that the driver reads and does not write to others."""
        found: dict[str, set[int]] = {}
        actions = self._plan.programs[self._actor] if self._actor == DRIVER else ()
        moved = [
            (i, a, self._plan.channel[a.target].value) for i, a in enumerate(actions) if a.target in self._plan.channel
        ]
        written = {value for _, action, value in moved if action.verb in (Verb.WRITE, Verb.SEND)}
        for index, action, value in moved:
            if action.verb is Verb.READ and value not in written:
                found.setdefault(value, set()).add(index)
        for index, action in enumerate(actions):
            if action.verb is Verb.FREE and action.target in found:
                found[action.target].add(index)
        return list(found.values())

    def _play(self, action: Action, execution: int) -> Iterator[Step]:
        if action.verb in (Verb.RUN, Verb.FREE, Verb.READ, Verb.WRITE) and (action.ahead or action.stream != MAIN):
            raise Stop("bad-use", f"{action} is no step of this machine")
        match action.verb:
            case Verb.RUN:
                yield from self._run(action.target, execution)
            case Verb.FREE:
                yield from self._free(action.target, execution)
            case Verb.COLL:
                yield from self._meet(action, execution)
            case _:
                channel = self._plan.channel.get(action.target)
                if channel is None:
                    raise Stop("bad-use", f"{self._actor}: {action} has no channel")
                if channel.is_ordered != (action.verb in (Verb.SEND, Verb.RECV)):
                    raise Stop("mismatch", f"{self._actor}: {action} over {channel.transport}")
                if action.verb in (Verb.READ, Verb.RECV):
                    yield from self._take(action, channel, execution)
                else:
                    yield from self._put(action, channel, execution)

    def _run(self, node_id: str, execution: int) -> Iterator[Step]:
        node = self._plan.node.get(node_id)
        if node is None or node.actor != self._actor or (node_id, execution) in self._ran:
            raise Stop("bad-use", f"{self._actor} cannot run {node_id} of {execution}")
        self._ran.add((node_id, execution))
        for value in node.inputs:
            yield from self._use(value, execution)
        for value in node.outputs:
            self._make(value, execution, None)

    def _free(self, value: str, execution: int) -> Iterator[Step]:
        yield from self._use(value, execution)
        channel = self._has.pop((value, execution))
        if channel is not None and channel.id in self._passings:
            yield self._machine.release_or_owe(channel, execution, self._passings[channel.id])
        elif channel is not None:
            yield self._machine.release(channel, self._actor, execution)

    def _meet(self, action: Action, execution: int) -> Iterator[Step]:
        collective = self._plan.collective.get(action.target)
        if collective is None or self._actor not in collective.parties or (action.target, execution) in self._met:
            raise Stop("bad-use", f"{self._actor} cannot {action}")
        if action.target in self._meeting:
            raise Stop("overwrite", f"{self._actor} starts {action.target} while it is under way")
        self._met.add((action.target, execution))
        for value in collective.inputs_of(self._actor):
            yield from self._use(value, execution)
        yield self._machine.start_collective(collective, self._actor, execution)
        if action.stream == MAIN:
            yield self._machine.end_collective(collective, execution)
        else:
            self._meeting[action.target] = (collective, execution)
        for value in collective.outputs_of(self._actor):
            self._make(value, execution, None)

    def _take(self, action: Action, channel: ChannelSpec, execution: int) -> Iterator[Step]:
        if self._actor not in channel.readers:
            raise Stop("mismatch", f"{self._actor} does not read {channel.id}")
        if action.verb is Verb.READ and self._may_pass(channel):
            yield self._read_or_pass(channel, execution)
        elif action.verb is Verb.READ:
            yield self._machine.read(channel, self._actor, execution)
        else:
            yield self._machine.start_receive(channel, self._actor, execution)
            if action.stream == MAIN:
                yield self._machine.arrive(channel, self._actor, execution)
            else:
                self._pending.add((channel.value, execution))
        self._make(channel.value, execution, channel)

    def _siblings(self, value: str) -> tuple[str, ...]:
        """The other inputs of the method for which alone the party reads a value."""
        program = self._plan.programs[self._actor]
        users = [a for a in program if a.verb is not Verb.FREE and value in values_used(self._plan, a, self._actor)]
        if len(users) != 1 or users[0].verb is not Verb.RUN:
            return ()
        return tuple(other for other in self._plan.node[users[0].target].inputs if other != value)

    def _may_pass(self, channel: ChannelSpec) -> bool:
        """Whether the party may go on without values of a channel, in some execution."""
        if self._actor == DRIVER or not self._machine.failed.intersection(self._siblings(channel.value)):
            return False
        if channel.id not in self._passings:
            cells = self._machine.cells(2)
            self._passings[channel.id] = passing = Passing(self._actor, cells, cells + 1)
            executions = range(self._machine.num_executions)
            self.drops[channel.id] = [self._machine.drop(channel, execution, passing) for execution in executions]
        return True

    def _read_or_pass(self, channel: ChannelSpec, execution: int) -> Step:
        errors: list[Step] = []
        reads = [self._plan.channel[a.target] for a in self._plan.programs[self._actor] if a.verb is Verb.READ]
        for value in self._siblings(channel.value):
            if value not in self._machine.failed or not execution % 2:
                continue
            other = next((each for each in reads if each.value == value), None)
            is_there = (value, execution) in self._has and (value, execution) not in self._pending
            if other is not None and (not is_there or other.id in self._passings):
                passing = self._passings.get(other.id)
                errors.append(self._machine.has_come(other, passing, self._actor, execution))
            elif is_there and not self._is_meeting(value):
                errors.append(lambda memory: True)
        return self._machine.read_or_pass(channel, execution, self._passings[channel.id], errors)

    def _is_meeting(self, value: str) -> bool:
        return any(value in each.outputs_of(self._actor) for each, _ in self._meeting.values())

    def _put(self, action: Action, channel: ChannelSpec, execution: int) -> Iterator[Step]:
        if self._actor != channel.writer or action.ahead:
            raise Stop("mismatch", f"{self._actor} cannot {action}")
        yield from self._use(channel.value, execution)
        if action.verb is Verb.WRITE:
            yield self._machine.write(channel, execution)
        elif action.stream == MAIN:
            yield self._machine.start_send(channel, execution, EMPTY)
            yield self._machine.end_send(channel, execution)
        else:
            yield self._machine.start_send(channel, execution, execution - channel.depth)

    def _use(self, value: str, execution: int) -> Iterator[Step]:
        if (value, execution) not in self._has:
            raise Stop("bad-use", f"{self._actor} has no {value} of {execution}")
        for collective, started in list(self._meeting.values()):
            if value in collective.outputs_of(self._actor) and started == execution:
                del self._meeting[collective.id]
                yield self._machine.end_collective(collective, execution)
        if (value, execution) in self._pending:
            self._pending.remove((value, execution))
            channel = self._has[value, execution]
            if channel is not None:
                yield self._machine.arrive(channel, self._actor, execution)

    def _make(self, value: str, execution: int, channel: ChannelSpec | None) -> None:
        if (value, execution) in self._ever:
            raise Stop("bad-use", f"{self._actor} gets {value} of {execution} twice")
        self._ever.add((value, execution))
        self._has[value, execution] = channel
        if channel is not None:
            self._came.add((value, execution))

    def _check_all_ran(self, last: int) -> None:
        for node in self._plan.nodes:
            if node.actor == self._actor and (node.id, last - 1) not in self._ran:
                raise Stop("bad-use", f"{node.id} never runs")
        for collective in self._plan.collectives:
            if self._actor in collective.parties and (collective.id, last - 1) not in self._met:
                raise Stop("bad-use", f"{self._actor} never does {collective.id}")
        for value in self._plan.outputs:
            if self._actor == DRIVER and (value, last - 1) not in self._came:
                raise Stop("bad-use", f"no channel brings {value} to {DRIVER}")


@dataclass(frozen=True)
class Exploration:
    """What came of it."""

    verdict: str
    """``ok``, ``deadlock`` (a state in which nobody can go on), ``mismatch`` (a value arrives as another, or never),
    ``overwrite`` (of a cell not yet released), ``bad-use`` (of a register without its value)."""
    why: str  # the same in words
    num_states: int  # states visited


def explore(
    plan: Plan, most_states: int = 200_000, failing: Collection[str] = (), *, drops: bool = True
) -> Exploration:
    """Executes the plan in every order. Methods of ``failing`` nodes fail in every second execution; with ``drops``, values that
    were not waited for are taken later, as they have to be. More than ``most_states`` states are an OverflowError.
    """
    seen: set[tuple[Cell, ...]] = set()
    try:
        machine = Machine(plan, frozenset(failing))
        parties = [Party(machine, actor) for actor in plan.programs]
        programs = [strand for party in parties for strand in party.strands()]
        programs += [strand for party in parties for strand in party.drops.values() if drops]
        first = len(machine.memory)
        left = list(enumerate(([*steps, None] for steps in programs), first))  # None: at its end
        state = (*machine.memory, *(0 for _ in programs))  # the memory, and how many steps each has done
        ends = tuple(map(len, programs))
        stack = [state]
        seen.add(state)
        while stack:
            before = stack.pop()
            is_stuck = True
            after = list(before)
            for place, steps in left:
                step = steps[before[place]]  # type: ignore[index]
                if step is not None and step(after):
                    is_stuck = False
                    after[place] += 1  # type: ignore[operator]
                    state = tuple(after)
                    if state not in seen:
                        seen.add(state)
                        stack.append(state)
                    after = list(before)
            if is_stuck and before[first:] != ends:
                raise Stop("deadlock", f"the parties {list(plan.programs)} are stuck at {before[first:]} of {ends}")
            if is_stuck:
                machine.check_end(before)
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
