"""The machine: timelines, hardware queues, memory, and what happens when one operation runs.

An operation runs in one step, when it is at the head of its hardware queue and what it waits for is there. Streams are *ordered*
only by themselves, signals, events and hosts; two streams that share a hardware queue run one after another, but that counts as
luck.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from crossfade.testing.fake.clocks import Access, Allocation, Clock, Word, is_before, join


class Fault(Exception):
    """A fault that the machine found: its ``kind`` and the names of the operations that do not go together."""

    def __init__(self, kind: str, message: str, *operations: str) -> None:
        # ``race``, ``deadlock``, ``PL-5``, ``leak``, ``use after free``, ``capture`` (which a GPU refuses) or ``wrong value``.
        self.kind = kind
        self.operations = operations  # those that do not go together, as the message names them
        super().__init__(f"{kind}: {message}")


class Until(NamedTuple):
    """A program yields it to continue only when ``condition`` holds; ``what`` names that in the report of a deadlock."""

    what: str
    condition: Callable[[], bool]


_ADDRESS: Callable[[Allocation], int] = attrgetter("address")

Program = Iterator[Until | None]  # a host: each ``yield`` lets devices and other hosts go ahead


class Range(NamedTuple):
    """A range of memory that an operation touches."""

    address: int
    size_bytes: int


@dataclass(slots=True)
class Operation:
    """Something that was enqueued."""

    label: str
    stream: str
    host: Clock  # what the host knew when it enqueued it
    reads: tuple[Range, ...] = ()  # this and the next: memory that it touches
    writes: tuple[Range, ...] = ()
    effect: Callable[[], None] | None = None  # what it does to the bytes
    # This and the next two: a signal, the value that it waits for, the value that it writes then.
    word: Word | None = None
    waits_for: int | None = None
    stores: int | None = None
    # This and the next: an event that it makes happen; an event, as it was recorded then, that it waits for.
    records: Mark | None = None
    after: Mark | None = None


@dataclass
class Mark:
    """One recording of an event."""

    clock: Clock | None = None
    label: str = ""


@dataclass(slots=True)
class _Line:
    """A stream or a host: a timeline."""

    clock: Clock = field(default_factory=dict)
    tick: int = 0
    num_pending: int = 0


def _is_at_least(value: int, wanted: int) -> bool:
    """As the chip compares words of 32 bits, which wrap around."""
    return (value - wanted) & 0xFFFF_FFFF < 0x8000_0000


class Machine:
    """All devices and hosts of one run. ``is_strict`` reports PL-5 when a wait is enqueued before its producer, and not only where
    it ends in a deadlock.
    """

    def __init__(self, *, is_strict: bool = True) -> None:
        self.is_strict = is_strict
        self.lines: dict[str, _Line] = {}
        self.streams: set[str] = set()
        self.queues: dict[str, deque[Operation]] = {}
        self.allocations: list[Allocation] = []  # by address
        self.words: dict[int, Word] = {}
        self.logs: dict[str, list[Hashable]] = {}
        self.at_end: list[Callable[[], None]] = []
        self._next_address = 1 << 20

    def line(self, name: str) -> _Line:
        """A timeline, made at its first use."""
        if name not in self.lines:
            self.lines[name] = _Line()
        return self.lines[name]

    def observe(self, process: str, value: Hashable) -> None:
        """A host saw something that depends on the order of events."""
        self.logs.setdefault(process, []).append(value)

    # memory

    def allocate(self, size_bytes: int, label: str, owner: str, fill: int = 0xEE) -> Allocation:
        """New memory, filled with what no test writes."""
        made = Allocation(label, owner, self._next_address, size_bytes, fill)
        self._next_address += (size_bytes + 0xFFFF) & ~0xFFFF
        self.allocations.append(made)
        return made

    def find(self, where: Range, who: str) -> tuple[Allocation, int]:
        """The allocation of a range, and where in it the range begins."""
        number = bisect_right(self.allocations, where.address, key=_ADDRESS)
        allocation = self.allocations[number - 1] if number else None
        if allocation is None or where.address >= allocation.address + allocation.size_bytes:
            raise Fault("use after free", f"{who} touches address {where.address:#x}, where there is no memory")
        start = where.address - allocation.address
        if allocation.is_freed:
            raise Fault("use after free", f"{who} touches {allocation.label}, which {allocation.owner} has freed")
        if start + where.size_bytes > allocation.size_bytes:
            raise Fault("race", f"{who} runs over the end of {allocation.label}")
        return allocation, start

    def touch(self, where: Range, label: str, line: str, clock: Clock, *, is_write: bool) -> None:
        """Notes an access, and reports it if nothing puts it in order with an earlier one."""
        if not where.size_bytes:
            return
        allocation, start = self.find(where, label)
        access = Access(label, line, clock[line], start, start + where.size_bytes, is_write)
        other = allocation.conflict(access, clock)
        if other is not None:
            verb, earlier = ("writes", "written" if other.is_write else "read") if is_write else ("reads", "written")
            raise Fault(
                "race",
                f"'{label}' {verb} {allocation.name(access.start, access.end)}, {earlier} by '{other.label}', "
                f"and nothing puts the two in order",
                label,
                other.label,
            )
        allocation.accesses.append(access)

    def read_bytes(self, where: Range, who: str) -> bytes:
        """The bytes in a range, now."""
        allocation, start = self.find(where, who)
        return allocation.read(start, where.size_bytes)

    def write_bytes(self, address: int, data: bytes, who: str) -> None:
        """Stores bytes."""
        allocation, start = self.find(Range(address, len(data)), who)
        allocation.write(start, data)

    def free(self, allocation: Allocation, process: str) -> None:
        """A host frees memory: no operation that touches it may be pending, nobody may have it open."""
        clock = self.line(process).clock
        act = f"{process} frees {allocation.label}"
        if allocation.openers:
            raise Fault("use after free", f"{act} while {allocation.openers[0]} has it open", act)
        for queue in self.queues.values():
            for operation in queue:
                for where in (*operation.reads, *operation.writes):
                    if allocation.address <= where.address < allocation.address + allocation.size_bytes:
                        raise Fault("use after free", f"{act} before '{operation.label}' has run", act, operation.label)
        for access in allocation.accesses:
            if not is_before(access, clock):
                raise Fault("race", f"{act} and does not know that '{access.label}' has run", act, access.label)
        allocation.is_freed = True

    # signals

    def word(self, address: int) -> Word:
        """The signal at an address."""
        if address not in self.words:
            self.words[address] = Word(f"the word at {address:#x}")
        return self.words[address]

    def store(self, word: Word, value: int, label: str, line: str, clock: Clock) -> None:
        """Writes a signal; two writes that nothing puts in order lose one of them."""
        if word.last is not None and not is_before(word.last, clock):
            raise Fault(
                "race",
                f"'{label}' and '{word.last.label}' both write {word.label}, and nothing puts the two in order",
                label,
                word.last.label,
            )
        if value and word.value == value and line in self.streams:
            raise Fault(
                "race",
                f"'{label}' is lost: {word.label} was set by '{word.writer}', and nobody has waited for it since",
                label,
                word.writer,
            )
        word.value, word.clock, word.writer = value, dict(clock), label
        word.last = Access(label, line, clock[line], 0, 4, True)
        word.num_writes += 1

    # enqueuing and running

    def enqueue(self, queue: str, operation: Operation) -> None:
        """Puts an operation at the end of a hardware queue."""
        word = operation.word
        if word is not None:
            if operation.waits_for is not None:
                self._check_supply(word, operation)
            if operation.stores is not None:
                word.supplied[operation.stores] = word.supplied.get(operation.stores, 0) + 1
        self.queues.setdefault(queue, deque()).append(operation)
        self.streams.add(operation.stream)
        self.line(operation.stream).num_pending += 1

    def _check_supply(self, word: Word, operation: Operation) -> None:
        """PL-5: of the writes that a wait needs, as many are enqueued as there were resets before, and one more."""
        wanted = operation.waits_for
        if not self.is_strict or wanted is None or (wanted == 0 and not word.supplied):
            return
        num_supplied = sum(number for value, number in word.supplied.items() if _is_at_least(value, wanted))
        if num_supplied <= word.supplied.get(0, 0):
            missing = f"set {word.label} to {wanted}"
            raise Fault(
                "PL-5",
                f"'{operation.label}' is enqueued, and '{missing}' is not; last: '{word.writer}'",
                operation.label,
                missing,
            )

    def can_run(self, operation: Operation) -> bool:
        """Whether what the operation waits for is there."""
        if operation.after is not None and operation.after.clock is None:
            return False
        word, wanted = operation.word, operation.waits_for
        return word is None or wanted is None or _is_at_least(word.value, wanted)

    def run(self, queue: str) -> None:
        """Runs the operation at the head of a queue."""
        operation = self.queues[queue].popleft()
        line = self.line(operation.stream)
        clock = line.clock
        join(clock, operation.host)
        if operation.after is not None and operation.after.clock is not None:
            join(clock, operation.after.clock)
        if operation.word is not None and operation.waits_for is not None:
            join(clock, operation.word.clock)
        line.tick += 1
        clock[operation.stream] = line.tick
        for where in operation.reads:
            self.touch(where, operation.label, operation.stream, clock, is_write=False)
        for where in operation.writes:
            self.touch(where, operation.label, operation.stream, clock, is_write=True)
        if operation.effect is not None:
            operation.effect()
        if operation.word is not None and operation.stores is not None:
            self.store(operation.word, operation.stores, operation.label, operation.stream, clock)
        if operation.records is not None:
            operation.records.clock = dict(clock)
        line.num_pending -= 1

    # reports

    def stuck(self, waiting: dict[str, str]) -> Fault:
        """The waiting programs and streams and their conditions, when nothing can continue."""
        parts = [f"{name} waits for {what}" for name, what in waiting.items()]
        operations: list[str] = []
        across: list[str] = []
        for name, queue in self.queues.items():
            if not queue:
                continue
            head = queue[0]
            parts.append(f"'{head.label}' holds {name}")
            where, producer = self._producer(head)
            if producer is not None and where == name:
                parts[-1] += f" in front of '{producer.label}', which it waits for"
                operations += [head.label, producer.label]
            elif producer is not None:
                across += [head.label, producer.label]
                front = self.queues[where][0].label
                parts[-1] += f" and waits for '{producer.label}', which is behind '{front}' in {where}"
            if head.word is not None:
                parts[-1] += f"; {head.word.label} was last written by '{head.word.writer}'"
        return Fault("deadlock", "; ".join(parts), *(operations or across or parts))

    def _producer(self, head: Operation) -> tuple[str, Operation | None]:
        """The first operation that is enqueued and would let this one go, and its queue."""
        for name, queue in self.queues.items():
            for operation in queue:
                is_set = head.word is not None and operation.word is head.word and bool(operation.stores)
                is_mark = head.after is not None and operation.records is head.after
                if operation is not head and (is_set or is_mark):
                    return name, operation
        return "", None

    def last_uses(self, name: str) -> list[str]:
        """The last operations that wrote and read a named part of memory."""
        for allocation in self.allocations:
            for start, end, each in allocation.names:
                inside = [a for a in allocation.accesses if each == name and start <= a.start and a.end <= end]
                found = {access.is_write: access.label for access in inside}
                if found:
                    return [found[kind] for kind in (True, False) if kind in found]
        return []

    def check_end(self) -> None:
        """Everything has run: nothing may be left over."""
        for check in self.at_end:
            check()
        for allocation in self.allocations:
            if allocation.openers:
                raise Fault("leak", f"{allocation.openers[0]} has opened {allocation.label} and not closed it")
        for allocation in self.allocations:
            if not allocation.is_freed:
                raise Fault("leak", f"{allocation.owner} has not freed {allocation.label}")

    def state(self) -> Hashable:
        """All that decides how the run can continue, apart from the hosts: two runs with equal states need not both be followed."""
        return (
            tuple((name, len(queue), queue[0].label if queue else "") for name, queue in sorted(self.queues.items())),
            tuple(
                (name, line.tick, line.num_pending, tuple(sorted(line.clock.items())))
                for name, line in sorted(self.lines.items())
            ),
            tuple((address, word.value, word.writer, word.num_writes) for address, word in sorted(self.words.items())),
            tuple((name, tuple(log)) for name, log in sorted(self.logs.items())),
            tuple(tuple(sorted(allocation.written.items())) for allocation in self.allocations),
        )
