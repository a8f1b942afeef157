"""The sending end of a ring (ring.py tells the whole)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, NamedTuple

from crossfade.device.completion import CompletionMark
from crossfade.device.copies import EDGE_BYTES, cut, enqueue
from crossfade.device.driver import Driver, OwnerGone
from crossfade.device.memory import OpenedMemory
from crossfade.device.recorded import Around
from crossfade.device.records import Enqueued, Finished, FreeEnqueued, Offer, Record, Refused, Retired, Wanted
from crossfade.device.ring import RingStatistics, ring_signals
from crossfade.device.signals import Counter, SignalBoard
from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError, DeviceError


class _Target:
    """A generation, as the sender sees it."""

    def __init__(self, driver: Driver, board: SignalBoard, offer: Offer, label: str) -> None:
        self.offer = offer
        self.memory = OpenedMemory(driver, offer.handle, offer.num_slots * offer.slot_bytes, f"slots of {label}")
        self.full, self.free = ring_signals(board, offer, label)
        self.credits = deque(range(offer.num_slots))
        self.num_uses = [0] * offer.num_slots
        self.places = [(offer.generation, slot) for slot in range(offer.num_slots)]
        self.addresses = [self.memory.address + slot * offer.slot_bytes for slot in range(offer.num_slots)]


class _Kept(NamedTuple):
    """The memory that a copy reads from, and how to know that it is done."""

    full: Counter  # the slot's
    number: int  # what it says then
    source: Any


class RingSender:
    """The sending end. One thread uses it."""

    def __init__(
        self,
        driver: Driver,
        board: SignalBoard,  # the ring's signals
        stream: int,  # the copy stream; others may use it as well
        tell: Callable[[Record], None],  # takes records to the receiver, in order
        label: str,
        *,
        tells_values: bool = True,  # whether each value is told by `Enqueued`; otherwise the caller tells it
    ) -> None:
        self._driver = driver
        self._board = board
        self._stream = stream
        self._tell = tell
        self._tells_values = tells_values
        self.label = label
        # Called with the copy stream before a value's copies are enqueued, behind what they wait for; what it gives is called
        # behind them. None, the default, costs nothing.
        self.around: Around | None = None
        self._target: _Target | None = None
        self._closing: deque[tuple[_Target, int]] = deque()  # earlier generations, each with the event of its last copy
        self._wanted_bytes = 0
        self._refused: Refused | None = None
        self._kept: deque[_Kept] = deque()
        self._events: list[int] = []  # spare ones
        self._tail = CompletionMark(driver, [stream])
        self._ended: ChannelError | None = None
        self._is_telling = True  # nobody listens any more when it is False
        self._num_values = self._num_bytes = 0

    def on_record(self, record: Record) -> None:
        match record:
            case FreeEnqueued(generation, slot):
                self.credit(generation, slot)
            case Offer():
                self._accept(record)
            case Refused():
                self._refused = record
            case _:
                raise ChannelError(f"{self.label}: a sender cannot take {record}: this is a bug in crossfade")

    def credit(self, generation: int, slot: int) -> None:
        """`FreeEnqueued` arrived, in whichever form."""
        if self._target is not None and self._target.offer.generation == generation:
            self._target.credits.append(slot)

    def _accept(self, offer: Offer) -> None:
        if self._ended is not None:
            return  # the receiver knows by `Finished` that it is not used
        before, event = self._target, -1
        try:
            event = event if before is None else self._mark()
            target = _Target(self._driver, self._board, offer, self.label)
        except DeviceError as error:  # the slots before stay what they are: the device may still copy into them
            if event >= 0:
                self._events.append(event)
            if isinstance(error, OwnerGone):  # who watches the receiver's process will tell
                return
            reason = f"its slots cannot be opened: {error}"
            self.give_up(reason)
            raise DeviceError(f"{self.label}: {reason}") from error
        if before is not None:
            self._closing.append((before, event))
        self._target = target
        self._wanted_bytes = 0
        self._refused = None

    def can_send(self, size_bytes: int) -> bool:
        """Whether `try_send` would enqueue a value of this length; asks for larger slots where it needs them.

        Raises `ChannelClosed` or `ChannelBroken` (CH-2), and a `DeviceError` if the receiver has no memory for it: the ring
        continues, and the next try asks again.
        """
        if self._ended is not None:
            raise copy(self._ended)
        if self._closing or self._kept:
            self.collect()
        target = self._target
        if target is None or size_bytes > target.offer.slot_bytes:
            self._want(max(size_bytes, 1))
            return False
        return bool(target.credits)

    def has_slot(self, size_bytes: int) -> bool:
        """A quick look: whether a value of this length may be sent now. If not, `can_send` asks for what it needs."""
        target = self._target
        return (
            target is not None
            and self._ended is None
            and size_bytes <= target.offer.slot_bytes
            and len(target.credits) > 0
        )

    def _want(self, size_bytes: int) -> None:
        refused, self._refused = self._refused, None
        if refused is not None and size_bytes >= refused.size_bytes:
            self._wanted_bytes = 0
            raise DeviceError(
                f"{self.label}: the receiver has no memory for slots of {refused.size_bytes} bytes: {refused.reason}",
                hint="keep fewer tensors on the receiver's device, or let fewer executions be under way",
            )
        if size_bytes > self._wanted_bytes or refused is not None:
            self._wanted_bytes = size_bytes
            self._tell(Wanted(size_bytes))

    def try_send(self, address: int, size_bytes: int, *, ready: int | None = None, keep: Any = None) -> bool:
        """Enqueues a value; False if no slot may be filled yet. Raises as `can_send` does.

        The value must not change until its copy is done, and ``keep`` is held until then. ``ready`` is an event behind the value's
        computation; None if the value is there already.
        """
        return self.try_send_parts([(0, address, size_bytes)], ready=ready, keep=keep)

    def try_send_parts(
        self, parts: Sequence[tuple[int, int, int]], *, ready: int | None = None, keep: Any = None
    ) -> bool:
        """`try_send` of several parts into one slot: (offset in the slot, address, length), in order, none overlapping."""
        size_bytes = parts[-1][0] + parts[-1][2] if parts else 0
        if not self.can_send(size_bytes):
            return False
        self.send(parts, size_bytes, ready=ready, keep=keep)
        return True

    def send(
        self, parts: Sequence[tuple[int, int, int]], size_bytes: int, *, ready: int | None = None, keep: Any = None
    ) -> tuple[int, int]:
        """`try_send_parts` right after `can_send` or `has_slot` has said yes to ``size_bytes``. Returns the (generation, slot) that
        the value took. Raises a `DeviceError` if the driver failed.
        """
        target = self._target
        if target is None:
            raise ChannelError(f"{self.label}: there are no slots: this is a bug in crossfade")
        slot = target.credits.popleft()
        number = self._enqueue(target, slot, parts, ready)
        if keep is not None:
            self._kept.append(_Kept(target.full[slot], number, keep))
        self._num_values += 1
        self._num_bytes += size_bytes
        if self._tells_values:
            self._tell(Enqueued(target.offer.generation, slot, size_bytes))
        return target.places[slot]

    @property
    def next_place(self) -> tuple[int, int] | None:
        """(generation, slot) that the next value takes; None while no slot may be filled."""
        target = self._target
        return (target.offer.generation, target.credits[0]) if target is not None and target.credits else None

    def place_of_next(self) -> tuple[int, int]:
        """(generation, slot) that the next value takes, right after `can_send` has said yes."""
        target = self._target
        if target is None or not target.credits:
            raise ChannelError(f"{self.label}: there is no free slot: this is a bug in crossfade")
        return target.places[target.credits[0]]

    def _enqueue(self, target: _Target, slot: int, parts: Sequence[tuple[int, int, int]], ready: int | None) -> int:
        stream, driver = self._stream, self._driver
        self._tail.is_longer = True
        if ready is not None:
            driver.wait_event(stream, ready)
        number = target.num_uses[slot] = target.num_uses[slot] + 1
        if not target.free[slot].has(number - 1):  # often it is free already, which saves the stream an operation
            target.free[slot].wait(stream, number - 1)
        there = target.addresses[slot]
        end = self.around(stream) if self.around is not None and parts else None
        for offset, address, size_bytes in parts:
            if not (there + offset) % EDGE_BYTES and size_bytes:
                driver.copy(there + offset, address, size_bytes, stream)
            else:
                enqueue(driver, cut(there + offset, address, size_bytes), stream)
        if end is not None:
            end(sum(part[2] for part in parts))
        target.full[slot].set(stream, number)
        return number

    def _mark(self) -> int:
        """An event for all that the copy stream was given until now."""
        if not self._events:
            self._events.append(self._driver.create_event())
        self._driver.record_event(self._events[-1], self._stream)  # may be refused
        return self._events.pop()

    def collect(self) -> None:
        """Releases sources whose copies are done, and closes earlier generations."""
        self.let_go_of_copied()
        while self._closing and self._driver.has_happened(self._closing[0][1]):
            self.let_go_of_copied()  # all that went into it: once it is retired, its counters may begin anew
            target, event = self._closing.popleft()
            self._events.append(event)
            self._retire(target)

    def let_go_of_copied(self) -> None:
        """Releases sources whose copies are done."""
        while self._kept and self._kept[0].full.has(self._kept[0].number):
            self._kept.popleft()

    def _retire(self, target: _Target) -> None:
        target.memory.close()
        if self._is_telling:
            self._tell(Retired(target.offer.generation, sum(target.num_uses)))

    @property
    def is_growing(self) -> bool:
        """Whether earlier slots are not closed yet. While they are not, do not only wait for records, but `collect` now and then:
        the receiver may need them back for what it is asked for.
        """
        return bool(self._closing)

    @property
    def is_done(self) -> bool:
        """Whether the device has finished everything that was sent."""
        return self._tail.has_passed()

    def signals(self) -> list[Counter]:
        """What this end's stream may wait for: the ``free`` of every slot. Any thread may ask."""
        targets = [target for target, _ in list(self._closing)] + [self._target]
        return [signal for target in targets if target is not None for signal in target.free]

    def break_off(self, reason: str) -> None:
        """The receiver is gone; calls raise `ChannelBroken` from now on. Any thread may call it."""
        self._is_telling = False
        self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """Another party is gone, and the receiver is not: calls raise `ChannelBroken` from now on, and `close` tells the receiver,
        who waits for it before it gives the slots back. Any thread may call it.
        """
        self._ended = self._ended or ChannelBroken(f"{self.label}: {reason}")

    def close(self) -> None:
        """Closes this end. The device must have finished (`is_done`), else a `ChannelError` is raised. Idempotent."""
        if not self.is_done:
            raise ChannelError(
                f"{self.label}: copies are still under way",
                hint="wait for is_done, or release the signals that they wait for",
            )
        self.collect()
        target, self._target = self._target, None
        if target is not None:
            self._retire(target)
        if self._is_telling:
            self._tell(Finished())
            self._is_telling = False
        self._tail.close()
        while self._events:
            self._driver.destroy_event(self._events.pop())
        self._ended = self._ended or ChannelClosed(f"{self.label}: closed by this side")

    def statistics(self) -> RingStatistics:
        offer = self._target.offer if self._target else None
        return RingStatistics(
            num_values=self._num_values,
            num_bytes=self._num_bytes,
            num_slots=offer.num_slots if offer else 0,
            slot_bytes=offer.slot_bytes if offer else 0,
            num_leased=0,
            num_credits=len(self._target.credits) if self._target else 0,
            num_generations=offer.generation + 1 if offer else 0,
        )
