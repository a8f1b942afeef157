"""What `crossfade.record` adds to a trace, under the key ``crossfade``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


class _Clocks(msgspec.Struct):
    samples: list[tuple[int, float, float]] = []
    max_mhz: float = 0.0
    limit_w: float = 0.0
    missing: str = ""


class _Contents(msgspec.Struct):
    version: int
    rank: int | None = None
    world_size: int | None = None
    calls: list[tuple[int, int, int, int, int]] = []
    streams: list[tuple[int, int]] = []
    environment: dict[str, str] = {}
    clocks: _Clocks = msgspec.field(default_factory=_Clocks)
    memory: dict[str, int] = {}
    untraced_us: float = 0.0
    tensors: list[tuple[int, list[int], list[int]]] = []


@dataclass(frozen=True)
class Record:
    """What was recorded beside one rank's trace."""

    rank: int | None  # as torch.distributed or torchrun had it; None where neither did.
    world_size: int | None  # how many ranks there are; likewise
    entries: Sequence[Entry]  # calls, in the order in which they were reported
    streams: Mapping[int, int]  # the trace's number of a stream, by its handle
    environment: Mapping[str, str]  # variables that matter to CUDA's queues, memory and NCCL
    clocks_mhz: Sequence[float]  # of the SMs, every 20 ms
    powers_w: Sequence[float]  # at the same times
    max_mhz: float  # the highest clock; 0 where it is not known
    limit_w: float  # the power limit; likewise
    num_retried: int  # how often the allocator had to free memory before it could allocate
    untraced_us: float  # how long a step took before the trace, without the profiler; 0 where none was measured
    tensors: Sequence[TensorUse]  # what operators read and write, where that was asked for

    @classmethod
    def read(cls, contents: Any) -> Record:
        """Raises a `ValueError` where the contents are of another version, or damaged."""
        try:
            read = msgspec.convert(contents, _Contents)
            entries = tuple(Entry(Role(role), *rest) for role, *rest in read.calls)
        except (msgspec.ValidationError, ValueError) as error:
            raise ValueError(f"the record in it cannot be read: {error}") from None
        if read.version != VERSION:
            raise ValueError(f"the record in it is of version {read.version}, and this crossfade reads {VERSION}")
        clocks = read.clocks
        return cls(
            read.rank,
            read.world_size,
            entries,
            dict(read.streams),
            read.environment,
            tuple(sample[1] for sample in clocks.samples),
            tuple(sample[2] for sample in clocks.samples),
            clocks.max_mhz,
            clocks.limit_w,
            read.memory.get("num_retried", 0),
            read.untraced_us,
            tuple(TensorUse(*use) for use in read.tensors),
        )

    @property
    def num_queues(self) -> int:
        """How many hardware queues streams share."""
        value = self.environment.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
        return int(value) if value.isdecimal() and int(value) else _QUEUES

    @property
    def load(self) -> GpuLoad | None:
        """The GPU's clock and power; None where they were not read."""
        return GpuLoad.of(self.clocks_mhz, self.powers_w, self.max_mhz, self.limit_w)
