"""How each transport's transfers are enqueued, as parts to time (see ``timing.py``).

======  ============================================  ==========================
 part   the source's                                  the target's
======  ============================================  ==========================
copy    copies into the target's opened memory        idle
staged  copies up, chunk by chunk                     copies down, chunk by chunk
nccl    one group of sends and receives on each rank, for all transfers of a step
======  ============================================  ==========================
"""

from __future__ import annotations

from collections.abc import Generator
from itertools import count
from typing import Any

from crossfade.device.records import Record, pack, unpack
from crossfade.device.staged import StagedReceiver, StagedSender, StagedStreams
from crossfade.profile.context import BUFFER_BYTES, STAGED_LAYOUT, Context, Told
from crossfade.profile.steps import COPY, NCCL, STAGED, Step
from crossfade.profile.timing import IDLE, Part

_MOST_QUEUED = 64
"""Transfers that are enqueued ahead: far less than what a stream holds without blocking the host."""


def most_at_once(transport: str, size_bytes: int) -> int:
    """How many transfers of this size may be enqueued before the first begins."""
    if transport == STAGED:
        return max(1, STAGED_LAYOUT.num_chunks // -(-size_bytes // STAGED_LAYOUT.chunk_bytes))
    return _MOST_QUEUED


def parts_of(context: Context, step: Step) -> Generator[Any, Told, list[Part]]:
    """The parts of a step's transfers, the same list on each rank."""
    if step.transport == NCCL:
        return [_Nccl(context, step)]
    if step.transport == STAGED:
        return (yield from _staged(context, step))
    if step.transport != COPY:
        raise ValueError(f"there is no transport {step.transport!r} to measure: this is a bug in crossfade")
    is_target = any(target == context.rank for _, target in step.transfers)
    handles = yield context.handle("target") if is_target else None
    lanes = count()
    return [
        _Copy(context, handles[target], next(lanes)) if source == context.rank else IDLE
        for source, target in step.transfers
    ]


class _Copy(Part):
    """Copies to one peer, by a stream of their own. Sources that share a target write to different places where there is room."""

    def __init__(self, context: Context, handle: str, lane: int) -> None:
        self._context = context
        self._source = context.buffer("source")
        self._target = context.opened(handle)
        self.timed: int = context.lane(lane)

    def begin(self, size_bytes: int, num: int) -> Any:
        offset = self._context.rank * size_bytes % (BUFFER_BYTES - size_bytes + 1)
        for _ in range(num):
            self._context.driver.copy(self._target + offset // 256 * 256, self._source, size_bytes, self.timed)


class _Nccl(Part):
    def __init__(self, context: Context, step: Step) -> None:
        self._bench = context.bench
        self._to = [target for source, target in step.transfers if source == context.rank]
        self._of = [source for source, target in step.transfers if target == context.rank]
        self.timed: int = context.lane(0)

    def begin(self, size_bytes: int, num: int) -> Any:
        for _ in range(num):
            sends, receives = [(rank, size_bytes) for rank in self._to], [(rank, size_bytes) for rank in self._of]
            self._bench.exchange(sends, receives, self.timed)


def _staged(context: Context, step: Step) -> Generator[Any, Told, list[Part]]:
    """Ends for this step. Their counters lie in memory that earlier steps have used, so they are reset before anybody begins."""
    context.close_staged()
    lanes = count(step=len(StagedStreams._fields))
    parts: list[Part] = []
    for source, target in step.transfers:
        if context.rank == source:
            parts.append(_StagedSource(context, source, next(lanes)))
        elif context.rank == target:
            parts.append(_StagedTarget(context, source, next(lanes)))
        else:
            parts.append(IDLE)
    for end in context.staged_ends:
        for counter in end.signals():
            counter.reset()
    yield None
    return parts


class _StagedEnd(Part):
    """What both ends hold. Records go with the meetings: the source's before the gate opens, the target's credits after."""

    def __init__(self, context: Context, source: int, lane: int) -> None:
        self.context = context
        self.source = source
        self.all_streams = StagedStreams(*(context.lane(lane + place) for place in range(len(StagedStreams._fields))))
        self.timed: int = self.all_streams.copies
        self.told: list[Record] = []

    def records(self) -> list[str]:
        """What the end said since last time."""
        records = [pack(record).hex() for record in self.told]
        self.told.clear()
        return records


class _StagedSource(_StagedEnd):
    def __init__(self, context: Context, source: int, lane: int) -> None:
        super().__init__(context, source, lane)
        memory = context.stagings[source]
        self.end = StagedSender(context.driver, memory, STAGED_LAYOUT, self.all_streams, self.told.append, "up")
        context.staged_ends.append(self.end)
        self._address = context.buffer("source")

    def begin(self, size_bytes: int, num: int) -> Any:
        for _ in range(num):
            self.end.send(self._address, size_bytes)
        return self.records()

    def settle(self, told: Told) -> None:
        for records in told.values():
            for record in records or ():
                self.end.on_record(unpack(bytes.fromhex(record)))


class _StagedTarget(_StagedEnd):
    def __init__(self, context: Context, source: int, lane: int) -> None:
        super().__init__(context, source, lane)
        memory = context.stagings[source]
        self.end = StagedReceiver(context.driver, memory, STAGED_LAYOUT, self.all_streams, self.told.append, "down")
        context.staged_ends.append(self.end)
        self._address = context.buffer("target")

    def finish(self, told: Told) -> None:
        for record in told[self.source] or ():
            self.end.on_record(unpack(bytes.fromhex(record)))
            if self.end.next_bytes is not None:
                self.end.receive(self._address)

    def leftover(self) -> Any:
        return self.records()
