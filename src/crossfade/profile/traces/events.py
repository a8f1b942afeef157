"""What is kept of a trace: what GPUs did, what the host called, and what enclosed the calls.

Times are in microseconds from the trace's first event; `RankTrace.origin_ns` is that event's time.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from crossfade.profile.traces.record import Record
from crossfade.profile.traces.roles import Role


class ActivityKind(IntEnum):
    """What a GPU did."""

    COMPUTE = 0
    COMMUNICATION = 1
    COPY = 2  # between the host's memory and the GPU's, or within it


class Message(NamedTuple):
    """What a collective moves, as the trace says it. Elements are those of one rank."""

    collective: str = ""  # "allreduce", "all_gather_into_tensor_out", ...; empty where the trace does not say
    group: str = ""
    num_in: int = 0
    num_out: int = 0
    dtype: str = ""
    ranks: str = ""


@dataclass(slots=True, eq=False)
class Activity:
    """One kernel, copy or fill on a stream."""

    kind: ActivityKind
    name: str
    device: int
    stream: int
    start_us: float
    end_us: float
    correlation: int
    num_blocks: int
    num_bytes: int
    message: Message  # an empty one where it is no collective
    call: Call | None = None

    @property
    def lane(self) -> tuple[int, int]:
        """Its device and stream."""
        return self.device, self.stream

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    @property
    def short_name(self) -> str:
        """Its name as reports show it, without the arguments of a C++ function."""
        return self.name.split("(")[0][:60]

    @property
    def launched_us(self) -> float:
        """When its call began on the host; its own start where the trace lacks that call."""
        return self.call.start_us if self.call is not None else self.start_us


@dataclass(slots=True, eq=False)
class Call:
    """One CUDA call of a thread of the host."""

    role: Role
    name: str
    thread: int
    start_us: float
    end_us: float
    correlation: int
    activities: list[Activity] = field(default_factory=list)  # in the order of their starts


class CollectiveCall(NamedTuple):
    """Where the host calls a collective, or waits for one (``message.collective`` is then "wait")."""

    thread: int
    start_us: float
    end_us: float
    message: Message


class Scope(NamedTuple):
    """An operator, an annotation or a Python function around something."""

    name: str
    start_us: float
    end_us: float


class Enclosing:
    """Scopes by thread, to find those around a moment. Kept as arrays: a trace has millions."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._columns: dict[int, tuple[array[float], array[float], array[int]]] = {}
        self._arrays: dict[int, tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]] = {}

    def add(self, thread: int, name: str, start_us: float, end_us: float) -> None:
        """Adds a scope; scopes of a thread nest."""
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._names)
            self._names.append(name)
        starts, ends, numbers = self._columns.setdefault(thread, (array("d"), array("d"), array("l")))
        starts.append(start_us)
        ends.append(end_us)
        numbers.append(number)

    def __len__(self) -> int:
        return len(self._names)

    def pack(self, origin_us: float) -> None:
        """Turns what was added into arrays, with times from an origin on."""
        for thread, (starts, ends, numbers) in self._columns.items():
            order = np.lexsort((-np.array(ends), np.array(starts)))
            moved = np.array(starts)[order] - origin_us, np.array(ends)[order] - origin_us
            self._arrays[thread] = (*moved, np.array(numbers)[order])
        self._columns.clear()

    def around(self, thread: int, time_us: float, most: int = 400) -> Iterator[Scope]:
        """The scopes around a moment of a thread, innermost first. Looks at the last ``most`` that began before."""
        if thread not in self._arrays:
            return
        starts, ends, numbers = self._arrays[thread]
        last = bisect_right(starts, time_us)
        for place in range(last - 1, max(last - most, 0) - 1, -1):
            if ends[place] >= time_us:
                yield Scope(self._names[numbers[place]], float(starts[place]), float(ends[place]))

    def named(self, prefix: str) -> list[Scope]:
        """All scopes whose names begin so, by start."""
        wanted = [number for name, number in self._numbers.items() if name.startswith(prefix)]
        found = [
            Scope(self._names[numbers[place]], float(starts[place]), float(ends[place]))
            for starts, ends, numbers in self._arrays.values()
            for place in np.flatnonzero(np.isin(numbers, wanted))
        ]
        return sorted(found, key=lambda scope: scope.start_us)


@dataclass
class RankTrace:
    """What one process's trace says."""

    label: str  # how messages name it: ``rank 0``, or the file's name
    rank: int | None  # its number among the ranks; None where the trace does not say
    world_size: int | None  # how many ranks there are; None where the trace does not say
    origin_ns: float  # the absolute time, in nanoseconds, of microsecond 0 here
    num_sms: int  # streaming multiprocessors of its GPU; 0 where the trace does not say
    gpu: str  # what the GPU is called; may be empty
    activities: list[Activity]  # by start
    calls: list[Call]  # those with a `Role`, by start
    collectives: list[CollectiveCall]  # calls of torch.distributed, by start
    operators: Enclosing  # operators and annotations of the host
    functions: Enclosing  # Python functions, where the trace has stacks
    notes: list[str] = field(default_factory=list)  # what was found odd while reading
    metadata: dict[str, Any] = field(default_factory=dict)  # what the file says besides its events
    threads: dict[Any, int] = field(default_factory=dict)  # the number of each thread, by the operating system's
    # on which stream a wait or a synchronisation is, by its correlation; where the trace was asked for it
    sync_streams: dict[int, int] = field(default_factory=dict)
    record: Record | None = None  # what `crossfade.record` added; None in other traces
    # thread, begin and end of the operators that torch gave a number, by that number; where tensors were recorded
    numbered: dict[int, tuple[int, float, float]] = field(default_factory=dict)
    # when each operator and call began that the profiler kept; ascending
    host_events_us: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0))
    compute_major: int = 0  # of its GPU's compute capability; 0 where the trace does not say
