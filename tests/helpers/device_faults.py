"""Rings and staged copies with a fault each, for the fake machine to find."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from crossfade.device.records import FreeEnqueued
from crossfade.device.ring_receiver import Lease, RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import Counter
from crossfade.device.staged import StagedReceiver, StagedSender


class FlagBeforeData(RingSender):
    def _enqueue(self, target: Any, slot: int, parts: Sequence[tuple[int, int, int]], ready: int | None) -> int:
        ((_, address, size_bytes),) = parts
        number: int = target.num_uses[slot] + 1
        target.num_uses[slot] = number
        self._driver.wait_event(self._stream, ready or 0)
        target.free[slot].wait(self._stream, number - 1)
        target.full[slot].set(self._stream, number)
        self._driver.copy(target.memory.address + slot * target.offer.slot_bytes, address, size_bytes, self._stream)
        return number


class ReuseBeforeFree(RingSender):
    def _enqueue(self, target: Any, slot: int, parts: Sequence[tuple[int, int, int]], ready: int | None) -> int:
        ((_, address, size_bytes),) = parts
        number: int = target.num_uses[slot] + 1
        target.num_uses[slot] = number
        self._driver.wait_event(self._stream, ready or 0)
        self._driver.copy(target.memory.address + slot * target.offer.slot_bytes, address, size_bytes, self._stream)
        target.full[slot].set(self._stream, number)
        return number


class UncomputedSource(RingSender):
    def _enqueue(self, target: Any, slot: int, parts: Sequence[tuple[int, int, int]], ready: int | None) -> int:
        return super()._enqueue(target, slot, parts, None)


class MissingFree(RingReceiver):
    """Gives the credit back, and enqueues no ``free``."""

    def _end(self, lease: Lease) -> None:
        self._generations[lease.generation].leased.remove(lease.slot)
        self.driver.ledger.drop(lease._number)
        self._tell(FreeEnqueued(lease.generation, lease.slot))


class MissingCredit(RingReceiver):
    """Enqueues ``free``, and tells nobody."""

    def _end(self, lease: Lease) -> None:
        tell, self._tell = self._tell, lambda record: None
        super()._end(lease)
        self._tell = tell


class StagedTooEarly(StagedReceiver):
    """Frees a chunk before it was copied."""

    def _enqueue(self, pieces: list[tuple[int, int, int]], execution: int | None) -> None:
        super()._set(self._free, self._number + 1)
        super()._enqueue(pieces, execution)

    def _set(self, counter: Counter, value: int) -> None:
        pass


class StagedTooEager(StagedSender):
    """Waits for chunks whose release is not enqueued."""

    def _pump(self) -> None:
        self._credits += 2
        super()._pump()


class StagedFlagBeforeData(StagedSender):
    """Says that a chunk is full before it is copied."""

    def _enqueue(self, pieces: list[tuple[int, int, int]], execution: int | None) -> None:
        super()._set(self._full, self._number + 1)
        super()._enqueue(pieces, execution)

    def _set(self, counter: Counter, value: int) -> None:
        pass
