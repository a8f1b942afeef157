"""The shared memory of the machine that executes small plans in every order (`tests.helpers.explore`), and the steps on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from crossfade.plan.actions import MAIN
from crossfade.plan.plan import ChannelSpec, CollectiveSpec, Plan
from crossfade.types import DRIVER, Transport

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


def num_executions(plan: Plan) -> int:
    """After how many executions all that can go wrong has: rings have come round, and so has each way to run ahead."""
    depth = max((channel.depth for channel in plan.channels), default=1)
    aheads = [(action.ahead, action.stream) for actions in plan.programs.values() for action in actions]
    blocking = sum(ahead for ahead, stream in aheads if stream == MAIN)
    return depth + max((ahead for ahead, _ in aheads), default=0) + blocking + 2


class Machine:
    """The shared memory, and the steps on it; ``memory`` is what it holds at first."""

    def __init__(self, plan: Plan, failing: frozenset[str]) -> None:
        self.plan = plan
        self.failed = _values_of_failing(plan, failing)
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

    def cells(self, number: int) -> int:
        """The place of so many new numbers."""
        return self._cells(number, 0)

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

        rooms = [*(ring.credit[reader] for reader in channel.readers), *ring.slot_credit.values()]

        def step(memory: Memory) -> bool:
            for room in rooms:
                if not memory[room]:
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

    def count(self, at: int) -> Step:

        def step(memory: Memory) -> bool:
            _add(memory, at, 1)
            return True

        return step

    def await_counts(self, cells: Sequence[int], number: int) -> Step:
        """Waits until each of these numbers is at least so large."""
        return lambda memory: all(_number(memory[at]) >= number for at in cells)

    def read_or_pass(self, channel: ChannelSpec, execution: int, passing: Passing, errors: Sequence[Step]) -> Step:
        """Reads; or goes on without the value, where one of the other values is known to be an error."""
        read = self.read(channel, passing.reader, execution)

        def step(memory: Memory) -> bool:
            if memory[passing.num_done] != execution:
                return False
            if read(memory):
                memory[passing.state] = _READ
            elif any(is_known(memory) for is_known in errors):
                memory[passing.state] = _PASSED
            return memory[passing.state] != _OPEN

        return step

    def release_or_owe(self, channel: ChannelSpec, execution: int, passing: Passing) -> Step:
        """Releases a value that was read; a value that was not is owed from now on."""
        release = self.release(channel, passing.reader, execution)

        def step(memory: Memory) -> bool:
            if memory[passing.state] == _PASSED:
                memory[passing.state] = _OWED
                return True
            memory[passing.state] = _OPEN
            _add(memory, passing.num_done, 1)
            return release(memory)

        return step

    def drop(self, channel: ChannelSpec, execution: int, passing: Passing) -> Step:
        """Takes and releases what is owed, when it has come."""
        read = self.read(channel, passing.reader, execution)
        release = self.release(channel, passing.reader, execution)

        def step(memory: Memory) -> bool:
            if _number(memory[passing.num_done]) > execution:
                return True
            is_owed = memory[passing.num_done] == execution and memory[passing.state] == _OWED
            if not (is_owed and read(memory)):
                return False
            memory[passing.state] = _OPEN
            _add(memory, passing.num_done, 1)
            return release(memory)

        return step

    def has_come(self, channel: ChannelSpec, passing: Passing | None, reader: str, execution: int) -> Step:
        """Whether a reader knows a value: it has read it, or would find it."""
        put = self.rings[channel.id].put[reader]
        if passing is None:
            return lambda memory: bool(memory[put])
        done, state = passing.num_done, passing.state
        return lambda memory: memory[done] == execution and (memory[state] == _READ or bool(memory[put]))

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


_OPEN, _READ, _PASSED, _OWED = range(4)


@dataclass(frozen=True)
class Passing:
    """How far a reader is with a channel without whose values it may go on: ``num_done`` executions, the ``state`` of the next."""

    reader: str
    num_done: int
    state: int


def _values_of_failing(plan: Plan, failing: frozenset[str]) -> frozenset[str]:
    """The values that are errors if these nodes fail."""
    failed: set[str] = set()
    makers = [(node.inputs, node.outputs, node.id in failing) for node in plan.nodes]
    for each in plan.collectives:
        inputs = tuple(value for values in each.inputs for value in values)
        makers.append((inputs, tuple(value for values in each.outputs for value in values), False))
    for _ in makers:
        for inputs, outputs, fails in makers:
            if fails or failed.intersection(inputs):
                failed.update(outputs)
    return frozenset(failed)


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
    memory[at] += number  # type: ignore[operator]  # a TypeError where it holds a line


def in_one(*steps: Step) -> Step:
    """Steps that nobody else comes between; only the first two may have to wait, the second not changing that of the first."""

    def step(memory: Memory) -> bool:
        for each in steps:  # noqa: SIM110 - by `all` it takes twice as long, and it is done a million times
            if not each(memory):
                return False
        return True

    return step
