"""The writing end of a shared-memory ring whose values may hold tensors of a device."""

from __future__ import annotations

import mmap
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from crossfade.channels.ring_layout import RingLayout
from crossfade.channels.shm_ring import SLOT_MESSAGE, WRITER_GONE, ShmWriter
from crossfade.channels.values.codec import PLAIN_TYPES, is_plain
from crossfade.channels.values.device_codec import HostSplit, Placed, split_for_host
from crossfade.channels.values.layout import Encoded
from crossfade.device.moments import Moment
from crossfade.device.recorded import Begin
from crossfade.edges.host_copies import HostCopies
from crossfade.edges.pinned import PinnedWriterSlots
from crossfade.edges.short_failure import short_failure
from crossfade.errors import CrossfadeError, DeviceError, Failure
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Heap
from crossfade.host.semaphore import FENCE_AFTER_POST

__all__ = ["DeviceToHostWriter"]


class DeviceToHostWriter(ShmWriter):
    """A `ShmWriter` of a process that has devices; its readers are any.

    A tensor of a device is a buffer of the message like one of the CPU, for which the message in the slot has room, and the
    copy engine fills it. Such a value is *pending* until that is done: its record lies on the board and its readers are not
    told. What is written behind a pending value is pending as well, so all come in order (CH-1). A value without device tensors
    goes at once when none is pending.

    Args:
        name, board, offset, layout, heap, bells: see `ShmWriter`.
        copies: what the channels of this process share.
        buffer_bytes: see `ShmWriter`; these slots are pinned now.
        actor: who writes, for errors.
        node: what makes the values, for errors.
        distrust: asked when the bytes of a value are there, before its readers are told, in any thread: why they cannot be
            trusted, if so. (A stream that waited for the dead was let go, and computed rubbish.) Must not block or raise.

    Attributes:
        begins: who records the copies, by device; empty for nobody.
    """

    def __init__(
        self,
        name: str,
        board: mmap.mmap,
        offset: int,
        layout: RingLayout,
        heap: Heap,
        bells: Sequence[Bell],
        copies: HostCopies,
        *,
        buffer_bytes: int = 0,
        actor: str = "",
        node: str = "",
        distrust: Callable[[], CrossfadeError | None] | None = None,
    ) -> None:
        super().__init__(name, board, offset, layout, heap, bells)
        self._copies = copies
        self.begins: Mapping[int, Begin] = {}
        self._where = (actor, f"{node or f'the value of channel {name}'}, copying it from the GPU to the host,")
        self._distrust = distrust
        self._jobs = copies.publisher.jobs
        self._pinned = PinnedWriterSlots(heap, self._base, layout, copies.pins, f"slots of {name}")
        self._slots = self._pinned
        self._readers, self._posts = self._posts, []  # so `ShmWriter.publish` takes the record, and tells nobody
        self._num_taken = self._num_told = 0  # values that were pending
        self._unused: list[int] = []  # slots that readers will not free
        if buffer_bytes:
            self._pinned.set_aside(layout.depth, buffer_bytes)
            try:
                self._pinned.pin_all()
            except BaseException:
                self._pinned.close()
                raise

    def try_write(self, value: object) -> bool:
        """See the protocol.

        Raises:
            ChannelBroken: values cannot be trusted any more.
            DeviceError: no memory for it can be pinned, or the device refused. Nothing was written; the ring goes on.
        """
        if self._distrust is not None and (error := self._distrust()) is not None:
            self.break_off(str(error))
        if self._jobs:
            self._copies.poll()
        while self._unused:
            self._slots.put_back(self._unused.pop())
        if type(value) in PLAIN_TYPES or _is_plain(value):
            return super().try_write(value)
        if not self.has_room():
            return False
        split = split_for_host(value, self._copies.is_on_device)
        if split.tensors and isinstance(split.message, Encoded):
            self._write_tensors(split.message, split)
        else:
            self.stage(split.message)
            self.publish()
        return True

    def _write_tensors(self, message: Encoded, split: HostSplit) -> None:
        slot = self._put_in_slot(SLOT_MESSAGE, message)
        try:
            address = self._pinned.address(slot)
        except DeviceError as error:
            self._slots.put_back(slot)
            raise DeviceError(
                f"channel {self.name} has no memory for {message.size_bytes} bytes to which a GPU can copy: {error}",
                hint="let fewer executions be under way, or return less: memory of the host is pinned for each of them",
            ) from error
        try:
            moments = self._copies.copy_out(address, split.tensors, self.begins)
        except BaseException:
            self._abandon(slot, split.tensors)
            raise
        at = self._at
        super().publish()
        self._submit(at, slot, moments, split.tensors)

    def _abandon(self, slot: int, tensors: tuple[Placed, ...]) -> None:
        """Some of a value's copies are enqueued and others were refused: the slot is used again when those are done."""
        moments = self._copies.ends_of_copies()
        self._copies.publisher.submit(moments, lambda _: self._unused.append(slot), keep=tensors)

    def publish(self) -> None:
        """Gives what is staged to the readers, behind what is pending. Cannot fail."""
        if self._num_taken == self._num_told:
            self._posts = self._readers
            try:
                super().publish()
            finally:
                self._posts = []
        else:
            at = self._at
            super().publish()
            self._submit(at, -1, (), ())

    def _submit(self, at: int, slot: int, moments: tuple[Moment, ...], tensors: tuple[Placed, ...]) -> None:
        self._num_taken += 1
        start_ns = 0 if self.on_moved is None or slot < 0 else time.monotonic_ns()
        self._copies.publisher.submit(moments, partial(self._finish, at, slot, start_ns), keep=tensors)

    def _finish(self, at: int, slot: int, start_ns: int, error: DeviceError | None) -> None:
        """The bytes of the record at ``at`` are there, or never will be. By any thread, one value after the other."""
        reason: CrossfadeError | None = error
        if slot >= 0:
            if reason is None and self._distrust is not None:
                reason = self._distrust()
            if reason is not None:
                self._put_pickle(at, short_failure(reason, *self._where))
                self._unused.append(slot)
        self._tell()
        self._num_told += 1
        if start_ns and self.on_moved is not None:
            self.on_moved(start_ns, time.monotonic_ns())

    def _tell(self) -> None:
        """The readers may have one more record."""
        for post, flags, ring in self._readers:
            post()
            if FENCE_AFTER_POST:
                self._fence()
            if flags[0]:
                ring()

    def try_flush(self) -> bool:
        """Whether the readers were told of every value."""
        if self._num_taken != self._num_told:
            self._copies.publisher.poll()
        return self._num_taken == self._num_told

    def close(self) -> None:
        """Closes this end. Idempotent. What is pending still comes; the memory goes back behind it."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._copies.is_pending:
            self._copies.publisher.submit((), lambda _: self._finish_close())
        else:
            self._finish_close()

    def _finish_close(self) -> None:
        self._tell_closed(WRITER_GONE, self._bells)
        self._slots.close()


def _is_plain(value: object) -> bool:
    """Whether there is no tensor in a value, as far as its type tells."""
    kind = type(value)
    if kind is Failure or is_plain(value):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject  # type: ignore[attr-defined]
