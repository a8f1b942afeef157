"""What `crossfade.record` adds to a trace, under the key ``crossfade``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from crossfade.device.clocks import GpuLoad
from crossfade.profile.traces.roles import Role

KEY = "crossfade"
VERSION = 1
_QUEUES = 8  # CUDA's own, where the environment says nothing


class Entry(NamedTuple):
    """One call as torch reported it. ``event`` and ``stream`` are the driver's handles, 0 where there is none."""

    role: Role
    thread: int  # as the operating system numbers it
    time_ns: int  # after a record or a wait, before a synchronisation
    event: int
    stream: int


class TensorUse(NamedTuple):
    """The storages that an operator reads and writes; a view of a tensor is of the same storage."""

    operator: int  # the number that torch's profiler gives it
    reads: Sequence[int]
    writes: Sequence[int]


class Clocks(msgspec.Struct, frozen=True):
    """The GPU's clock and power, every 20 ms; 0, or nothing, where they were not read."""

    samples: Sequence[tuple[int, float, float]] = ()  # time in ns, clock of the SMs in MHz, power in W
    max_mhz: float = 0.0  # the highest clock
    limit_w: float = 0.0  # the power limit
    missing: str = ""  # why nothing was read any more


class Record(msgspec.Struct, frozen=True):
    """What was recorded beside one rank's trace, as the file has it."""

    version: int
    rank: int | None = None  # as torch.distributed or torchrun had it; None where neither did.
    world_size: int | None = None  # how many ranks there are; likewise
    entries: Sequence[Entry] = msgspec.field(default=(), name="calls")  # in the order in which they were reported
    streams: Sequence[tuple[int, int]] = ()  # a stream's handle, and the trace's number of it
    environment: Mapping[str, str] = {}  # variables that matter to CUDA's queues, memory and NCCL
    clocks: Clocks = Clocks()
    memory: Mapping[str, int] = {}  # how often the allocator did something
    untraced_us: float = 0.0  # how long a step took before the trace, without the profiler; 0 where none was measured
    tensors: Sequence[TensorUse] = ()  # what operators read and write, where that was asked for

    @classmethod
    def read(cls, contents: Any) -> Record:
        """Raises a `ValueError` where the contents are of another version, or damaged."""
        try:
            record = msgspec.convert(contents, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"the record in it cannot be read: {error}") from None
        if record.version != VERSION:
            raise ValueError(f"the record in it is of version {record.version}, and this crossfade reads {VERSION}")
        return record

    @property
    def num_retried(self) -> int:
        """How often the allocator had to free memory before it could allocate."""
        return self.memory.get("num_retried", 0)

    @property
    def num_queues(self) -> int:
        """How many hardware queues streams share."""
        value = self.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
        return int(value) if value.isdecimal() and int(value) else _QUEUES

    @property
    def load(self) -> GpuLoad | None:
        """The GPU's clock and power; None where they were not read."""
        clocks_mhz, powers_w = ([sample[place] for sample in self.clocks.samples] for place in (1, 2))
        return GpuLoad.of(clocks_mhz, powers_w, self.clocks.max_mhz, self.clocks.limit_w)
