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

What a party has in its registers depends on its own steps alone, so this is played through once, before the rest. Only
the steps that touch shared memory are interleaved.

The machine stops after as many executions as it takes to see a plan come round: see ``num_executions``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from crossfade.plan.actions import MAIN, Action, Verb
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.types import DRIVER, Transport

__all__ = ["Exploration", "Stop", "explore", "num_executions"]

EMPTY = -1
Cell = int | tuple[tuple[str, int], ...]
Memory = list[Cell]
Step = Callable[[Memory], bool]
"""A step on shared memory: False, with nothing changed, where it cannot be done yet."""


class Stop(Exception):
    """The machine found something wrong; ``verdict`` says what."""

    def __init__(self, verdict: str, what: str) -> None:
        super().__init__(f"{verdict}: {what}")
        self.verdict = verdict


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


def num_executions(plan: Plan) -> int:
    """After how many executions all that can go wrong has: rings have come round, and so has each way to run ahead."""
    depth = max((channel.depth for channel in plan.channels), default=1)
    aheads = [(action.ahead, action.stream) for actions in plan.programs.values() for action in actions]
    blocking = sum(ahead for ahead, stream in aheads if stream == MAIN)
    return depth + max((ahead for ahead, _ in aheads), default=0) + blocking + 2


def explore(plan: Plan, most_states: int = 200_000) -> Exploration:
    """Executes the plan in every order.

    Raises:
        OverflowError: there are more than ``most_states`` states.
    """
    seen: set[tuple[tuple[int, ...], tuple[Cell, ...]]] = set()
    try:
        machine = _Machine(plan)
        programs = [list(_Party(machine, actor).steps()) for actor in plan.programs]
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


class _Machine:
    """The shared memory, and the steps on it; ``memory`` is what it holds at first."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        for collective in plan.collectives:
            parties = set(collective.parties) - {DRIVER}
            if len(parties) < max(1, len(collective.parties)) or not all(collective.outputs):
                raise Stop("bad-use", f"{collective} is no collective")
        self.memory: Memory = []
        self.num_executions = num_executions(plan)
        self.most_ahead = max((action.ahead for actions in plan.programs.values() for action in actions), default=0)
        self.lines: dict[tuple[str, str, str], int] = {}
        self.permits: dict[str, int] = {}
        self.rings = {channel.id: self._ring(channel) for channel in plan.channels}
        self.over = {collective.id: self._cells(1, 0) for collective in plan.collectives}
        self.groups = {collective.group: self._cells(len(collective.group), ()) for collective in plan.collectives}

    def _cells(self, number: int, content: Cell) -> int:
        self.memory.extend([content] * number)
        return len(self.memory) - number

    def _ring(self, channel: ChannelSpec) -> _Ring:
        ring = _Ring(channel, max(channel.depth, 0))
        if not channel.is_ordered:
            ring.shared = self._cells(ring.depth, EMPTY)
        for reader in channel.readers:
            ring.put[reader] = self._cells(1, 0)
            ring.credit[reader] = self._cells(1, ring.depth)
            ring.busy[reader] = self._cells(ring.depth, EMPTY)
            ring.own[reader] = self._cells(ring.depth, EMPTY)
            if channel.transport is Transport.COPY:
                ring.slot_credit[reader] = self._cells(1, max(channel.slots, 0))
                ring.slots[reader] = self._cells(max(channel.slots, 0), EMPTY)
            pair = (channel.transport, channel.writer, reader)
            if channel.is_ordered and pair not in self.lines:
                self.lines[pair] = self._cells(1, ())
            if channel.is_ordered and reader not in self.permits:
                self.permits[reader] = self._cells(1, ())
        return ring

    def write(self, channel: ChannelSpec, execution: int) -> Step:
        """Waits for a credit of each reader; fills a cell; marks it and tells each reader."""
        ring = self.rings[channel.id]

        def step(memory: Memory) -> bool:
            if not all(memory[ring.credit[reader]] for reader in channel.readers):
                return False
            if not all(memory[credit] for credit in ring.slot_credit.values()):
                return False
            place = execution % ring.depth
            for reader, slots in ring.slots.items():
                if memory[slots + execution % channel.slots] != EMPTY:
                    raise Stop("overwrite", f"{channel.id} of {execution} into a slot that {reader} has not released")
                memory[slots + execution % channel.slots] = execution
                _add(memory, ring.slot_credit[reader], -1)
            for reader in channel.readers:
                if memory[ring.busy[reader] + place] != EMPTY:
                    raise Stop("overwrite", f"{channel.id} of {execution} into a cell that {reader} has not released")
                memory[ring.busy[reader] + place] = execution
                _add(memory, ring.credit[reader], -1)
                _add(memory, ring.put[reader], 1)
            memory[ring.shared + place] = execution
            return True

        return step

    def read(self, channel: ChannelSpec, reader: str, execution: int) -> Step:
        """Waits for a value that was put in; looks into the cell."""
        ring = self.rings[channel.id]

        def step(memory: Memory) -> bool:
            if not memory[ring.put[reader]]:
                return False
            _add(memory, ring.put[reader], -1)
            found = memory[ring.shared + execution % ring.depth]
            if found != execution:
                raise Stop("mismatch", f"{reader} reads {channel.id} of {found} for {execution}")
            if reader in ring.slots and memory[ring.slots[reader] + execution % channel.slots] != execution:
                raise Stop("mismatch", f"{reader} finds another value than {channel.id} of {execution} in its slot")
            return True

        return step

    def release(self, channel: ChannelSpec, reader: str, execution: int) -> Step:
        """Takes the mark off the cell and gives the credit back. What lies in the cell must still be the value."""
        ring = self.rings[channel.id]

        def step(memory: Memory) -> bool:
            place = execution % ring.depth
            if memory[ring.busy[reader] + place] != execution:
                raise Stop("overwrite", f"{reader} releases {channel.id} of {execution}, which is not there")
            memory[ring.busy[reader] + place] = EMPTY
            _add(memory, ring.credit[reader], 1)
            if reader in ring.slots:
                memory[ring.slots[reader] + execution % channel.slots] = EMPTY
                _add(memory, ring.slot_credit[reader], 1)
            return True

        return step

    def start_receive(self, channel: ChannelSpec, reader: str, execution: int) -> Step:
        """Waits for a cell of the reader's own ring; lines up behind the reader's other receives."""
        ring = self.rings[channel.id]

        def step(memory: Memory) -> bool:
            if not memory[ring.credit[reader]]:
                return False
            place = execution % ring.depth
            if memory[ring.busy[reader] + place] != EMPTY:
                raise Stop("overwrite", f"{reader} receives {channel.id} of {execution} into a cell it still uses")
            memory[ring.busy[reader] + place] = execution
            _add(memory, ring.credit[reader], -1)
            memory[self.permits[reader]] = (*_line(memory[self.permits[reader]]), (channel.id, execution))
            self._serve(memory, reader)
            return True

        return step

    def start_send(self, channel: ChannelSpec, execution: int, earlier: int) -> Step:
        """Waits until all readers have received execution ``earlier``; lines up once for each reader."""
        ring = self.rings[channel.id]

        def step(memory: Memory) -> bool:
            if any(_number(memory[ring.put[reader]]) <= earlier for reader in channel.readers):
                return False
            for reader in channel.readers:
                line = self.lines[channel.transport, channel.writer, reader]
                memory[line] = (*_line(memory[line]), (channel.id, execution))
                self._serve(memory, reader)
            return True

        return step

    def end_send(self, channel: ChannelSpec, execution: int) -> Step:
        """Waits until all readers have received."""
        ring = self.rings[channel.id]
        return lambda memory: all(_number(memory[ring.put[reader]]) > execution for reader in channel.readers)

    def arrive(self, channel: ChannelSpec, reader: str, execution: int) -> Step:
        """Waits until the reader's own cell has been filled."""
        at = self.rings[channel.id].own[reader]
        depth = self.rings[channel.id].depth
        return lambda memory: memory[at + execution % depth] == execution

    def _serve(self, memory: Memory, reader: str) -> None:
        """The receiving thread: as long as the writer of the first receive has sent something, the value goes over."""
        permits = self.permits[reader]
        while waiting := _line(memory[permits]):
            channel_id, execution = waiting[0]
            ring = self.rings[channel_id]
            line = self.lines[ring.channel.transport, ring.channel.writer, reader]
            sent = _line(memory[line])
            if not sent:
                return
            if sent[0] != waiting[0]:
                raise Stop("mismatch", f"{ring.channel.writer} to {reader}: {sent[0]} meets {waiting[0]}")
            memory[permits], memory[line] = waiting[1:], sent[1:]
            _add(memory, ring.put[reader], 1)
            memory[ring.own[reader] + execution % ring.depth] = execution

    def start_collective(self, collective: CollectiveSpec, party: str, execution: int) -> Step:
        """Lines up; whoever comes last lets all of them go."""
        lines = range(self.groups[collective.group], self.groups[collective.group] + len(collective.group))
        mine = lines[collective.group.index(party)]

        def step(memory: Memory) -> bool:
            memory[mine] = (*_line(memory[mine]), (collective.id, execution))
            heads = [_line(memory[line])[:1] for line in lines]
            if all(heads):
                if len(set(heads)) > 1:
                    raise Stop("mismatch", f"{collective.group} meet with {heads}")
                for line in lines:
                    memory[line] = _line(memory[line])[1:]
                _add(memory, self.over[collective.id], 1)
            return True

        return step

    def end_collective(self, collective: CollectiveSpec, execution: int) -> Step:
        """Waits until all parties have started it."""
        return lambda memory: _number(memory[self.over[collective.id]]) > execution

    def check_end(self, memory: tuple[Cell, ...]) -> None:
        """When everybody is done, nothing is under way."""
        for whose, at in (*self.lines.items(), *self.permits.items()):
            if memory[at]:
                raise Stop("mismatch", f"{whose}: {memory[at]} has found no other end, at the end")
        for group, at in self.groups.items():
            if any(memory[at : at + len(group)]):
                raise Stop("mismatch", f"{group}: somebody has not come, at the end")


@dataclass
class _Ring:
    """Where a channel's memory is: ``shared`` cells, and for each reader its ``own`` cells, marks on cells that are
    ``busy``, a semaphore ``credit``, and a semaphore ``put`` (ordered transports: the number of values brought so far); for
    the copy engine its ``slots`` and their semaphore ``slot_credit``.
    """

    channel: ChannelSpec
    depth: int
    shared: int = 0
    put: dict[str, int] = field(default_factory=dict)
    credit: dict[str, int] = field(default_factory=dict)
    busy: dict[str, int] = field(default_factory=dict)
    own: dict[str, int] = field(default_factory=dict)
    slots: dict[str, int] = field(default_factory=dict)
    slot_credit: dict[str, int] = field(default_factory=dict)


def _number(cell: Cell) -> int:
    if isinstance(cell, tuple):
        raise TypeError("this cell holds a line")
    return cell


def _line(cell: Cell) -> tuple[tuple[str, int], ...]:
    if not isinstance(cell, tuple):
        raise TypeError("this cell holds a number")
    return cell


def _add(memory: Memory, at: int, number: int) -> None:
    memory[at] = _number(memory[at]) + number


class _Party:
    """One party's way through all rounds: plays what concerns its registers, and gives the steps on shared memory."""

    def __init__(self, machine: _Machine, actor: str) -> None:
        self._machine, self._plan, self._actor = machine, machine.plan, actor
        self._has: dict[tuple[str, int], ChannelSpec | None] = {}
        self._pending: set[tuple[str, int]] = set()
        self._ever: set[tuple[str, int]] = set()
        self._came: set[tuple[str, int]] = set()
        self._ran: set[tuple[str, int]] = set()
        self._met: set[tuple[str, int]] = set()
        self._meeting: dict[str, tuple[CollectiveSpec, int]] = {}  # what is under way, by collective

    def steps(self) -> Iterator[Step]:
        last = self._machine.num_executions
        for round_ in range(-self._machine.most_ahead, last):
            if self._actor == DRIVER and round_ >= 0:
                for value in self._plan.inputs:
                    self._make(value.value, round_, None)
            for action in self._plan.programs[self._actor]:
                if 0 <= round_ + action.ahead < last:
                    yield from self._play(action, round_ + action.ahead)
        self._check_all_ran(last)

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
        if channel is not None:
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
        if action.verb is Verb.READ:
            yield self._machine.read(channel, self._actor, execution)
        else:
            yield self._machine.start_receive(channel, self._actor, execution)
            if action.stream == MAIN:
                yield self._machine.arrive(channel, self._actor, execution)
            else:
                self._pending.add((channel.value, execution))
        self._make(channel.value, execution, channel)

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
