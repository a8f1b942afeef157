"""One direction between two parties over NCCL's send and receive: a communicator for each device of the writer's.

NCCL starts a transfer when both sides have enqueued it, and sides that enqueue in different orders hang. So all values of a link
are numbered. The writer enqueues them as they are written; the reader enqueues a receive when its program has asked for the value,
in the order in which it asks (PL-1), and the number in the message shows whether that is the writer's order. Each link has streams
of its own: waiting for one peer holds up no other, and no computation.

Nothing can release a transfer that only one side has enqueued, but the end of the communicator. So a reader that closes receives
what was sent and not asked for, into memory that is dropped, until the writer has closed too. When that takes too long, or the peer
is dead, the communicator is aborted.

The process groups are the plan's own. NCCL meets over the loopback interface, or between hosts over that of the host's address.
"""

from __future__ import annotations

import datetime
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist

from crossfade.channels.gloo_proof import LOOPBACK, MEET_S, store_in
from crossfade.device.completion import CompletionMark
from crossfade.device.context import DeviceContext
from crossfade.device.recorded import Begin
from crossfade.device.streams import Role
from crossfade.edges.arrivals import Arrivals, Arriving, Requests
from crossfade.edges.reader import DeviceReader
from crossfade.errors import ChannelBroken, ChannelError, DeviceError
from crossfade.host.bulletin import Bulletin
from crossfade.host.memory import Memory
from crossfade.host.tcp import let_nccl_meet_at

_WRITER, _READER = 0, 1
_TAG = 0
_GRACE_S = 2.0  # how long a link that closes waits for what is under way


class Group(Protocol):
    """What is needed of a process group of two. What it gives has a ``wait``, for torch's current stream and not for the host."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Enqueues one tensor's sending, behind torch's current stream."""

    def recv(self, tensors: list[torch.Tensor], rank: int, tag: int) -> Any:
        """Enqueues one tensor's receiving, behind torch's current stream."""

    def shutdown(self) -> None:
        """Ends it when all has been done. May wait."""

    def abort(self) -> None:
        """Ends it at once, and releases streams that wait for the other side. May wait."""


GroupFactory: TypeAlias = Callable[[Any, int, DeviceContext, str], Group]
"""A store, this side's rank, its device and its host's address, to a process group of two."""


def nccl_group(store: Any, rank: int, home: DeviceContext, address: str = LOOPBACK) -> Group:
    """NCCL's own, which meets at this address of the host. Raises a `DeviceError` if there is no GPU, or torch has no NCCL."""
    if home.is_host or not dist.is_nccl_available():
        raise DeviceError(
            "the transport 'nccl' needs a GPU on both sides, and torch built with NCCL",
            hint="'copy' and 'staged' also run where memory of the host has to stand in for a GPU's",
        )
    let_nccl_meet_at(address)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = datetime.timedelta(days=365)  # deaths are found in other ways
    group: Any = dist.ProcessGroupNCCL(store, rank, 2, options)
    return group  # type: ignore[no-any-return]


class _Lane:
    """One communicator, with the stream on which its transfers are ordered."""

    def __init__(self, home: DeviceContext, group: Group, stream: int) -> None:
        self.arrivals = Arrivals(home, stream)  # memory for what comes
        self.number = 0  # of the values sent or received until now
        self.group: Group | None = group
        self._driver = home.driver
        self._stream = stream
        self._tail = CompletionMark(home.driver, [stream])
        self._kept: deque[tuple[int, Any]] = deque()

    def greet(self, is_writer: bool) -> None:
        """Makes the communicator, by a first transfer, and waits for that. Raises a `ChannelError` if the other side did not come
        in time.
        """
        if self.group is None:
            return
        hello = self.arrivals.allocate(1)
        with self.arrivals.on_stream():
            if is_writer:
                self.group.send([hello], _READER, _TAG).wait()
            else:
                self.group.recv([hello], _WRITER, _TAG).wait()
        deadline = time.monotonic() + MEET_S
        while not self._driver.is_idle(self._stream):
            if time.monotonic() > deadline:
                raise ChannelError("the other side did not take part in a first transfer over NCCL")
            time.sleep(0.001)  # a wait for the device has no time limit, and this is done once

    def send(self, tensors: Sequence[torch.Tensor], ready: int, keep: Any, begin: Begin | None = None) -> None:
        """Enqueues the next value's tensors, behind an event; ``keep`` is held until they are gone, ``begin`` records it."""
        group = self._open()
        self.number += 1
        self._tail.is_longer = True
        self._driver.wait_event(self._stream, ready)
        end = begin(self._stream) if begin is not None else None
        with self.arrivals.on_stream():
            for tensor in tensors:
                group.send([tensor.reshape(-1).view(torch.uint8)], _READER, _TAG).wait()
        if end is not None:
            end(sum(tensor.nbytes for tensor in tensors))
        self.collect()
        event = self._driver.create_event()
        self._driver.record_event(event, self._stream)
        self._kept.append((event, keep))

    def receive(self, arriving: Arriving, places: Sequence[tuple[int, int]], begin: Begin | None = None) -> None:
        """Enqueues the receiving of the next value's tensors: (offset, length) of each. ``begin`` records it. Raises a
        `DeviceError` if there is no memory for it: it cannot go by, so the link cannot continue.
        """
        group = self._open()
        buffer = arriving.buffer
        if buffer is None:
            raise DeviceError(
                f"no memory for {arriving.size_bytes} bytes that NCCL brings: {arriving.refusal}",
                hint="'staged' and 'copy' go on in such a case; NCCL cannot",
            )
        self.number += 1
        self._tail.is_longer = True
        end = begin(self._stream) if begin is not None else None
        with self.arrivals.on_stream():
            for offset, size_bytes in places:
                group.recv([buffer[offset : offset + size_bytes]], _WRITER, _TAG).wait()
        if end is not None:
            end(sum(size_bytes for _, size_bytes in places))
        self.arrivals.filled(arriving)

    def _open(self) -> Group:
        if self.group is None:
            raise ChannelBroken("the communicator is closed")
        return self.group

    def collect(self) -> None:
        """Releases the tensors that were sent."""
        while self._kept and self._driver.has_happened(self._kept[0][0]):
            self._driver.destroy_event(self._kept.popleft()[0])

    @property
    def is_done(self) -> bool:
        """Whether the device has done everything."""
        return self._tail.has_passed()

    def close(self) -> None:
        """Gives its events back."""
        while self._kept:
            self._driver.destroy_event(self._kept.popleft()[0])
        self._tail.close()
        self.arrivals.close()


class NcclLink:
    """One party's side of a direction. Making it waits for the other party, and raises a `DeviceError` if there is no NCCL here or
    a `ChannelError` if the parties could not connect.
    """

    def __init__(
        self,
        # Memory that both parties see, or what they tell each other between hosts; stays the caller's.
        store: Memory | Bulletin,
        pair: tuple[str, str],  # the writer and the reader
        me: str,
        homes: Sequence[DeviceContext],  # for each of the writer's devices, this process's device
        make_group: GroupFactory | None = None,  # makes the process groups; None for `nccl_group`
    ) -> None:
        self.reason = ""  # why it is broken; empty while it is not
        self.readers: list[DeviceReader] = []  # this side's ends of channels, if it reads; the opener of one adds it
        self.requests = Requests()  # for values of all of them, in the order in which programs ask
        self._is_writer = me == pair[0]
        self._label = f"{pair[0]} to {pair[1]} over NCCL"
        self._enter_thread = homes[0].driver.enter_thread
        self._closing_since: float | None = None
        self._is_drained = False
        self._end_once = threading.Lock()  # acquired by the thread that ends the link, and never released
        self._late: dict[
            tuple[int, int], list[tuple[int, int]]
        ] = {}  # sent and not asked for: (lane, number) to its places
        address = store.address if isinstance(store, Bulletin) else LOOPBACK
        # torch opens its path again in the store's destructor
        self._store = Memory(os.dup(store.fd)) if isinstance(store, Memory) else None
        self._stores: list[Any] = []  # of the groups, each of which refers to a part of it only
        self.lanes: list[_Lane] = []  # one for each of the writer's devices
        with ExitStack() as undo:
            undo.callback(self._give_up)
            try:
                for source, home in enumerate(homes):
                    with torch.cuda.device(home.device):  # for this thread, which may be a new one; nothing on the host
                        self._stores.append(store_in(self._store or store, f"nccl/{pair[0]}/{pair[1]}/{source}"))
                        stream = home.streams.get(Role.NCCL, f"{pair[0]} to {pair[1]} {source}")
                        group = (make_group or nccl_group)(
                            self._stores[-1], _WRITER if self._is_writer else _READER, home, address
                        )
                        self.lanes.append(_Lane(home, group, stream))
                        self.lanes[-1].greet(self._is_writer)
            except RuntimeError as error:  # its traceback may hold the store, which therefore stays open
                raise ChannelError(f"{me} could not open {self._label}: {error}") from error
            undo.pop_all()

    def _give_up(self) -> None:
        """It could not be made: ends the communicators that were, and then gives back what their lanes have. The store stays open
        for the error, whose traceback holds torch's end of it.
        """
        lanes = self.lanes

        def close() -> None:
            for lane in lanes:
                lane.close()

        self._end("abort", close)

    def receive(self, source: int, number: int, places: list[tuple[int, int]], begin: Begin | None = None) -> Arriving:
        """A value's message has come. The value will not if the link is broken, or breaks now: since it is not the next one (PL-1),
        since there is no memory for it, or since NCCL failed. ``begin`` records it.
        """
        lane = self.lanes[source]
        if self._closing_since is not None:
            self._late[source, number] = places
        elif number != lane.number:
            self.break_off(f"PL-1: value {number} of {self._label} was asked for where {lane.number} comes next")
        elif not self.reason:
            try:
                return self._receive(lane, places, begin)
            except (ChannelError, DeviceError, RuntimeError) as error:
                self.break_off(f"{self._label}: {error}")
        return Arriving(0, None, self.reason)

    def _receive(self, lane: _Lane, places: list[tuple[int, int]], begin: Begin | None = None) -> Arriving:
        arriving = lane.arrivals.expect(places[-1][0] + places[-1][1])
        lane.receive(arriving, places, begin)
        return arriving

    def _receive_rest(self) -> bool:
        """Receives what was sent and not asked for; whether nothing more can come."""
        is_over = all(reader.ring.is_other_gone for reader in self.readers)  # before the last look
        for reader in self.readers:
            reader.discard()
        for source, lane in enumerate(self.lanes):
            while (places := self._late.pop((source, lane.number), None)) is not None:
                self._receive(lane, places)
        return is_over

    def collect(self) -> None:
        """Releases the tensors that were sent."""
        for lane in self.lanes:
            lane.collect()

    def break_off(self, reason: str) -> None:
        """The other side is gone, or transfers mismatch: streams that wait for it are released. Any thread may call it."""
        self.reason = self.reason or reason
        self._end("abort", self._close_store)

    def _close_store(self) -> None:
        self._stores.clear()
        if self._store is not None:
            self._store.close()

    def _end(self, how: str, and_then: Callable[[], None]) -> None:
        """Ends the communicators, in a thread, for that may take a while; ``and_then`` is called there once they are gone."""
        if not self._end_once.acquire(blocking=False):
            return
        groups, enter_thread = [lane.group for lane in self.lanes], self._enter_thread
        for lane in self.lanes:
            lane.group = None

        def work() -> None:
            enter_thread()
            while groups:
                getattr(groups.pop(), how)()
            and_then()

        threading.Thread(target=work, name=f"crossfade-nccl-{how}", daemon=True).start()

    def drain(self) -> bool:
        """Closes it, without waiting. True once no device uses it any more."""
        if self._is_drained:
            return True
        now = time.monotonic()
        if self._closing_since is None:
            self._closing_since = now
        left_s = self._closing_since + _GRACE_S - now
        if not self.reason:
            try:
                is_over = self._receive_rest()
            except (ChannelError, DeviceError, RuntimeError) as error:
                self.break_off(str(error))
                return False
            if not (is_over and all([lane.is_done for lane in self.lanes])):
                if left_s < 0:
                    self.break_off("what was under way when it closed did not end")
                return False
        elif not all([lane.is_done for lane in self.lanes]) and left_s > -_GRACE_S:
            return False
        for lane in self.lanes:
            lane.close()
        self._end("shutdown", self._close_store)
        self.readers.clear()
        self.requests.clear()
        self._is_drained = True
        return True
