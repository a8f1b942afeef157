"""The receiving end of a ring, and the leases on its slots (ring.py tells the whole)."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from copy import copy
from typing import TypeVar

from crossfade.device.driver import Driver
from crossfade.device.memory import Block, Pool
from crossfade.device.records import Enqueued, Finished, FreeEnqueued, Offer, Record, Refused, Retired, Wanted
from crossfade.device.ring import NUM_GROUPS, RingStatistics, num_signals, ring_signals
from crossfade.device.signals import Counter, SignalBoard
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError, DeviceError
from crossfade.host.memory import align
from crossfade.interrupted import brief

_getpid = os.getpid

_SLOT_ALIGN_BYTES = 512
_L = TypeVar("_L", bound="Lease")


class _LeasedSlots:
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
        return all(free.has(number) for free, number in zip(self.free, self.num_uses, strict=True))


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
        ring: RingReceiver,
        slots: _LeasedSlots,
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


class RingReceiver:
    """The receiving end. One thread uses it; leases may end in any thread."""

    def __init__(
        self,
        driver: Driver,
        pool: Pool,
        board: SignalBoard,  # the ring's signals, at least `num_signals` of them
        # Takes records to the sender, in order; called by the thread that ends a lease, too.
        tell: Callable[[Record], None],
        label: str,
        *,
        num_slots: int = 2,  # how many values can be on their way or leased
        slot_bytes: int,  # length of the first slots; 0 to make none until the first value comes
        # Tells the sender, in the thread that ends a lease, that ``free`` of a (generation, slot) is enqueued; None to ``tell``
        # it as `FreeEnqueued`.
        on_free: Callable[[int, int], None] | None = None,
    ) -> None:
        if board.num_signals < (needed := num_signals(num_slots)):
            raise ValueError(f"{board.num_signals} signals for a ring of {num_slots} slots: it needs {needed}")
        self.driver = driver
        self.label = label
        self._ledger = driver.ledger
        self._ledger_entries = [("lease", f"slot {k} of {label}") for k in range(num_slots)]
        self._pool = pool
        self._board = board
        self._tell = tell
        self._on_free = on_free or (lambda generation, slot: self._tell(FreeEnqueued(generation, slot)))
        self._num_slots = num_slots
        self._generations: dict[int, _LeasedSlots] = {}
        self._num_generations = 0
        self._wanted_bytes = 0
        self.is_finished = False  # the sender's side is closed
        self._ended: ChannelError | None = None
        self._num_values = self._num_bytes = 0
        self._last: dict[int, int] = {}  # once ended: for each stream, the event of the last thing it was given
        self._is_marked = False  # once ended: those events stand for all that came before the end
        self.streams: set[int] = set()  # all that have been given a wait for a value
        self._ending = threading.RLock()  # of leases; one may end anywhere, also where this thread has it
        self._postponed: deque[Lease] = deque()
        if slot_bytes:
            self._offer(slot_bytes)

    def _offer(self, slot_bytes: int, *, gives_back: bool = True) -> bool:
        """Offers slots; False while the signals of all groups are in use. ``gives_back``: see `Pool.take`."""
        used = {slots.offer.group for slots in self._generations.values()}
        group = next((group for group in range(NUM_GROUPS) if group not in used), None)
        if group is None:
            return False
        slot_bytes = align(max(slot_bytes, 1), _SLOT_ALIGN_BYTES)
        generation = self._num_generations
        user = f"{self.label} (generation {generation})"
        block = self._pool.take(slot_bytes * self._num_slots, f"slots of {self.label}", user, gives_back=gives_back)
        try:
            offer = Offer(generation, group, self._num_slots, slot_bytes, block.handle)
            slots = _LeasedSlots(offer, block, self._board, self.label)
            for counter in (*slots.full, *slots.free):
                counter.reset()
            for k, address in enumerate(slots.addresses):
                self.driver.name_range(address, slot_bytes, f"slot {k} of {self.label}")
        except DeviceError:
            block.release()
            raise
        self._generations[generation] = slots
        self._num_generations += 1
        self._tell(offer)
        return True

    def on_record(self, record: Record) -> None:
        """A record of the sender's arrived that is no value: `Wanted`, `Retired` or `Finished`."""
        match record:
            case Wanted(size_bytes):
                newest = self._generations.get(self._num_generations - 1)
                if newest is None or size_bytes > newest.offer.slot_bytes:  # else that offer is on its way
                    self._wanted_bytes = size_bytes
            case Retired(generation, num_values):
                if generation in self._generations:  # else it was given back when the sender's death was heard of
                    self._generations[generation].num_sent = num_values
            case Finished():
                self._finish(0)
            case _:
                raise ChannelError(f"{self.label}: {record} is no record for here: this is a bug in crossfade")
        self.collect()

    def _finish(self, num_values: int | None) -> None:
        """No more values come: of each generation that is not retired ``num_values`` did; None for those that were accepted."""
        self.is_finished = True
        for slots in list(self._generations.values()):
            if slots.num_sent is None:
                slots.num_sent = sum(slots.num_uses) if num_values is None else num_values

    def accept(self, record: Enqueued, stream: int) -> Lease:
        """Lets ``stream`` wait for a value whose record arrived, and leases its slot. Raises as `lease_ahead` does."""
        return self.accept_at(record.generation, record.slot, record.size_bytes, stream, Lease)

    def accept_at(self, generation: int, slot: int, size_bytes: int, stream: int, of: type[_L]) -> _L:
        """`accept` of a value that was announced in another form than `Enqueued`; ``of`` says which kind of lease it gives."""
        self.expect(lease := self.lease_ahead(generation, slot, size_bytes, stream, of))
        return lease

    def lease_ahead(self, generation: int, slot: int, size_bytes: int, stream: int, of: type[_L]) -> _L:
        """The part of `accept_at` that may come before the value is enqueued: nothing waits for it yet, see `expect`. Raises
        `ChannelClosed` or `ChannelBroken` (CH-2).
        """
        if self._postponed:  # a capture may be over
            self.collect()
        if self._ended is not None:
            raise copy(self._ended)  # one that is kept would keep the frames that it passes, and their leases
        generations = self._generations
        slots = generations[generation]
        newest = generations.get(self._num_generations - 1)
        is_nearly_full = newest is not None and len(newest.leased) >= self._num_slots - 1
        is_short = is_nearly_full or len(generations) >= NUM_GROUPS - 1
        lease = of(self, slots, generation, slot, size_bytes, stream, is_short)
        self.streams.add(stream)
        slots.num_uses[slot] += 1
        slots.leased.add(slot)
        ledger = self._ledger
        number = lease.number = next(ledger.numbers)
        ledger.entries[number] = self._ledger_entries[slot]  # from now on it has an end
        return lease

    def expect(self, lease: Lease) -> None:
        """Lets the lease's stream wait for its value, which is enqueued (PL-5). Raises as `lease_ahead` does.

        Where that is refused the lease may end without it: ``free`` says then that nobody reads, and not that the value has come.
        The sender's copies into one slot come one after the other in any case.
        """
        if self._ended is not None:
            raise copy(self._ended)
        slots, slot = lease.slots, lease.slot
        full, number = slots.full[slot], slots.num_uses[slot]
        if not full.has(number):  # if it is there already, the stream is saved an operation
            full.wait(lease.stream, number)
        self._num_values += 1
        self._num_bytes += lease.size_bytes

    @property
    def is_growing(self) -> bool:
        """Whether the sender asked for slots that could not be offered yet. While it is so, do not only wait for records, but
        `collect` now and then: earlier slots come back when the device is further.
        """
        return self._wanted_bytes > 0

    def end_lease(self, lease: Lease) -> None:
        """Any thread may call it, once or more for a lease (see `Lease.release`)."""
        if self._ledger.entries.pop(lease.number, None) is None:  # it has ended before
            return
        if self.driver.is_capturing(lease.stream):
            self._postponed.append(lease)
        else:
            self._end_now(lease)

    def _end_now(self, lease: Lease) -> None:
        stream, slots, slot = lease.stream, lease.slots, lease.slot
        try:
            slots.free[slot].set(stream, slots.num_uses[slot])
        except DeviceError as error:  # in a destructor, as a rule, where nobody would hear of it
            self.give_up(f"the end of a value's use could not be enqueued: {error}")
        is_running = self._ended is None
        if not is_running:
            self._mark(stream)
        # Now that the end of the use is enqueued and noted, `collect` may see the slot without a lease; and the next value of the
        # slot may come as soon as the credit is back. Between the two nobody may look: slots that were offered anew on the same
        # signals would get a credit that is not theirs.
        with self._ending:
            slots.leased.remove(slot)
            if is_running:
                self._on_free(lease.generation, slot)

    def _mark(self, stream: int) -> None:
        """Once this end has ended: notes how far the stream has to come before slots can be given back."""
        event = self._last.get(stream)
        if event is None:
            made = self.driver.create_event()
            event = self._last.setdefault(stream, made)
            if event != made:  # another thread was quicker
                self.driver.destroy_event(made)
        self.driver.record_event(event, stream)

    def collect(self) -> None:
        """Ends leases that ended within a capture, gives slots back that nobody uses any more, and offers what was asked for."""
        while self._postponed and not self.driver.is_capturing(self._postponed[0].stream):
            self._end_now(self._postponed.popleft())
        for generation, slots in list(self._generations.items()):
            with self._ending:
                is_unused = slots.is_unused(self._has_ended)
                if is_unused:
                    del self._generations[generation]
            if is_unused:
                slots.block.release()
        if self._wanted_bytes and self._ended is None and not self.is_finished:
            self._offer_wanted(self._wanted_bytes)
        if self._ended is not None and not self._generations:
            while self._last:
                self.driver.destroy_event(self._last.popitem()[1])

    def _offer_wanted(self, size_bytes: int) -> None:
        """Offers slots for values of this length and a little longer ones, which shall not move every time.

        Values that have grown before get slots half as long again as the last ones, where memory is free: so outgrown ones, which
        the pool keeps, come to no more than twice the last.
        """
        little = size_bytes + size_bytes // 8
        newest = self._generations.get(self._num_generations - 1)
        ample = newest.offer.slot_bytes * 3 // 2 if newest is not None and self._num_generations > 1 else 0
        try:
            if (ample > little and self._offers_freely(ample)) or self._offer(little):
                self._wanted_bytes = 0
        except DeviceError as error:
            self._wanted_bytes = 0
            self._tell(Refused(size_bytes, str(error)))

    def _offers_freely(self, slot_bytes: int) -> bool:
        """Offers slots if nobody has to give memory back for them."""
        try:
            return self._offer(slot_bytes, gives_back=False)
        except DeviceError:
            return False

    def _has_ended(self) -> bool:
        return self._is_marked and all(map(self.driver.has_happened, list(self._last.values())))

    def signals(self) -> list[Counter]:
        """What this end's streams may wait for: the ``full`` of every slot. Any thread may ask."""
        return [signal for slots in list(self._generations.values()) for signal in slots.full]

    def break_off(self, reason: str) -> None:
        """The sender is gone: its side of every generation counts as closed, calls raise `ChannelBroken`. Leases stay good.

        Nothing writes into the slots any more: the driver takes a process's copies away before its end can be seen. Any thread may
        call it.
        """
        self.give_up(reason)
        self._finish(None)

    def give_up(self, reason: str) -> None:
        """Another party is gone, and the sender is not: calls raise `ChannelBroken` from now on. Leases stay good.

        The sender may still be copying, so slots go back when it has closed its side, as after `close`. Any thread may call it.
        """
        self._end_with(ChannelBroken(f"{self.label}: {reason}"))

    def close(self) -> None:
        """Closes this end; leases stay good. Idempotent.

        Slots go back in `collect` once the sender has closed its side as well, so continue with `on_record`.
        """
        self._end_with(ChannelClosed(f"{self.label}: closed by this side"))

    def _end_with(self, error: ChannelError) -> None:
        if self._ended is None:
            self._ended = error
            for stream in list(self.streams):
                self._mark(stream)
            self._is_marked = True

    @property
    def is_empty(self) -> bool:
        """Whether all slots have been given back, and everything else that this end took."""
        return not self._generations and not self._last

    def statistics(self) -> RingStatistics:
        slots = self._generations.get(self._num_generations - 1)
        return RingStatistics(
            num_values=self._num_values,
            num_bytes=self._num_bytes,
            num_slots=self._num_slots,
            slot_bytes=slots.offer.slot_bytes if slots else 0,
            num_leased=sum(len(each.leased) for each in self._generations.values()),
            num_credits=0,
            num_generations=self._num_generations,
        )
