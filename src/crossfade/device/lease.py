"""One generation of slots as the receiver of a ring sees it, and the leases on them (ring.py tells the whole)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from crossfade.device.memory import Block
from crossfade.device.records import Offer
from crossfade.device.ring import ring_signals
from crossfade.device.signals import SignalBoard
from crossfade.interrupted import brief

__all__ = ["Lease", "Leased", "LeasedSlots"]

_getpid = os.getpid


class _Ring(Protocol):
    """The receiver, as a lease needs it."""

    @property
    def streams(self) -> set[int]:
        """All streams that have been given a wait for a value."""

    def end_lease(self, lease: Lease) -> None:
        """See `Lease.release`."""


class LeasedSlots:
    """A generation, as the receiver sees it."""

    def __init__(self, offer: Offer, block: Block, board: SignalBoard, label: str) -> None:
        self.offer = offer
        self.block = block
        self.full, self.free = ring_signals(board, offer, label)
        self.addresses = [block.address + slot * offer.slot_bytes for slot in range(offer.num_slots)]
        self.leased: set[int] = set()
        self.num_uses = [0] * offer.num_slots
        self.num_sent: int | None = None  # values in all; known once the sender has closed its side

    def is_unused(self, has_ended: Callable[[], bool]) -> bool:
        """Whether no operation on the slots can still come or run.

        As long as values are accepted, each of them ends in a ``free`` that happens. Afterwards some may never be taken: then it is
        enough that this side's streams have done what they were given for this ring, which ``has_ended`` says. (It is asked after
        the leases: a lease is noted there before it is gone here.)
        """
        if self.leased or self.num_sent is None:
            return False
        if has_ended():
            return True
        if sum(self.num_uses) < self.num_sent:
            return False
        return all(free.is_at_least(number) for free, number in zip(self.free, self.num_uses, strict=True))


class Lease:
    """A value in its slot. It ends by `release`, once."""

    __slots__ = (
        "__weakref__",
        "_pid",
        "_ring",
        "address",
        "generation",
        "is_short",
        "number",
        "size_bytes",
        "slot",
        "slots",
        "stream",
    )

    def __init__(
        self,
        ring: _Ring,
        slots: LeasedSlots,
        generation: int,
        slot: int,
        size_bytes: int,
        stream: int,
        is_short: bool,
    ) -> None:
        self.number = -1  # in the ledger, once it is there
        self._pid = _getpid()
        self._ring = ring
        self.generation = generation
        self.slot = slot
        self.size_bytes = size_bytes
        self.address = slots.addresses[slot]  # where the value lies
        # Whether the value should be copied out, and the lease ended at once, so that the ring never stops. So it is where all
        # slots of the newest generation but one were leased before; and where only one more generation could be offered: what is
        # accepted then must not keep its own, or the ring could not grow any more.
        self.is_short = is_short
        self.slots = slots
        self.stream = stream  # it waits for the value, and uses it

    def move_to(self, stream: int) -> None:
        """Another stream is going to wait for the value: before `RingReceiver.expect`."""
        if stream != self.stream:
            self.stream = stream
            self._ring.streams.add(stream)

    def release(self) -> None:
        """Enqueues ``free`` behind the last use and gives the credit back. Any thread may call it, once or more.

        While its stream is captured it is left to the next `RingReceiver.collect`: in the graph it would happen at each
        replay, and not now.
        """
        self._ring.end_lease(self)


class Leased(Lease):
    """A lease that ends when it dies itself: what the tensors of a value hold."""

    __slots__ = ()

    @brief
    def __del__(self) -> None:
        if _getpid() == self._pid:  # a forked child drops copies of tensors: the slot is still its parent's
            self._ring.end_lease(self)
