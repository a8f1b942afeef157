"""Vector clocks, and the accesses to memory that they put in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

Clock: TypeAlias = dict[str, int]  # for each timeline (a stream or a host) how much of it is known to have happened


def join(into: Clock, other: Clock) -> None:
    """Makes ``into`` know what ``other`` knows."""
    for line, tick in other.items():
        if tick > into.get(line, 0):
            into[line] = tick


class Access(NamedTuple):
    """One operation's touch of memory."""

    label: str
    line: str  # this and the next: its place on its timeline
    tick: int
    start: int  # this and the next: which bytes of the allocation
    end: int
    is_write: bool


def is_before(access: Access, clock: Clock) -> bool:
    """Whether a reader with this clock knows that the access has happened."""
    return clock.get(access.line, 0) >= access.tick


@dataclass(slots=True)
class Allocation:
    """Memory of the machine, of a device or of the host."""

    label: str  # this and the next: what it is for, and the process that took it
    owner: str
    address: int  # where it begins; all processes see it at one address
    size_bytes: int
    fill: int  # what bytes are that nobody has written
    is_freed: bool = False
    # What was written, by place and length, the last one last.
    written: dict[tuple[int, int], bytes] = field(default_factory=dict)
    openers: list[str] = field(default_factory=list)  # processes that have opened it
    names: list[tuple[int, int, str]] = field(default_factory=list)  # (start, end, name) of parts of it
    accesses: list[Access] = field(default_factory=list)

    def read(self, start: int, size_bytes: int) -> bytes:
        """The bytes in a part, now."""
        found = bytearray([self.fill]) * size_bytes
        for (at, length), data in self.written.items():
            first, last = max(at, start), min(at + length, start + size_bytes)
            if first < last:
                found[first - start : last - start] = data[first - at : last - at]
        return bytes(found)

    def write(self, start: int, data: bytes) -> None:
        """Stores bytes."""
        self.written.pop((start, len(data)), None)
        self.written[start, len(data)] = data

    def name(self, start: int, end: int) -> str:
        """What lies in a range, in words."""
        for first, last, name in self.names:
            if first <= start and end <= last:
                return name
        return f"bytes {start} to {end} of {self.label}"

    def conflict(self, access: Access, clock: Clock) -> Access | None:
        """An earlier access, of which one of the two writes, that nothing puts in order with this one."""
        _, _, _, start, end, is_write = access
        for other in self.accesses:
            overlaps = other.start < end and start < other.end
            if overlaps and (is_write or other.is_write) and clock.get(other.line, 0) < other.tick:
                return other
        return None


@dataclass(slots=True)
class Word:
    """A signal's word, with what its last writer knew."""

    label: str
    value: int = 0
    clock: Clock = field(default_factory=dict)  # all that a reader of this value knows
    writer: str = "(nobody)"  # the last write, in words
    last: Access | None = None  # that write as an access; None before the first
    supplied: dict[int, int] = field(default_factory=dict)  # for each value, how many writes of it were enqueued
    num_writes: int = 0  # writes that were done
