"""A group of ranks that share buffers and signals: lanes, watching the others, closing; and those of this process that are open."""

from __future__ import annotations

import math
import os
import select
import threading
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary, finalize, ref

from crossfade.device.borrowed import device_of, torch_or_raise
from crossfade.device.signals import Signal
from crossfade.device.tensors import current_stream
from crossfade.device.watchdog import DeathReport, Watchdog, release
from crossfade.errors import ChannelBroken, ChannelClosed, DeviceError
from crossfade.host.memory import align
from crossfade.host.processes import open_pidfd
from crossfade.peers.exchange import barrier
from crossfade.peers.keys import GroupKey
from crossfade.peers.lane import SLOT_ALIGNMENT, Lane
from crossfade.peers.memory import OpenedGroup
from crossfade.peers.steps import end

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed import ProcessGroup

_NUMBERS = count(1)
_OPEN: WeakValueDictionary[str, PeerGroup] = WeakValueDictionary()
_OF: dict[int, dict[str, ref[PeerGroup]]] = {}
"""The open groups of a process group, by its `id` while it lives; by key, in their order."""
NUM_EACH = 2
"""Lanes that a lane of a staged group is in fact, with half a buffer each: pieces of sums go up on one while others come down."""


class PeerGroup:
    """What one rank holds of a group (see `open_group`).

    Attributes:
        memory: the memory and signals.
        rank, num_ranks: this rank, and of how many.
        device_type: ``"cuda"`` or ``"cpu"``.
        number: which of all that were opened of its process group it is; the same on all ranks.
        is_staged: whether its memory is the host's, for GPUs that do not reach each other.
        num_lanes: how many collectives may be in flight at the same time.
        pids: the ranks' processes.
        key: what `crossfade.peers.groups.find_group` finds it by in this process, while it is open.
        belongings: what others keep with this rank's side of it, by names of theirs, until it is closed.
        reports: of ranks that have died.
    """

    def __init__(
        self,
        opened: OpenedGroup,
        lanes: list[Lane],
        device_type: str,
        heap_begin: int,
        *,
        names: Sequence[str] | None = None,
        before_release: Callable[[str], None] | None = None,
        process_group: ProcessGroup | None = None,
        number: int = 0,
        is_staged: bool = False,
    ) -> None:
        memory = self.memory = opened.memory
        self._process_group = None if process_group is None else ref(process_group)
        self.number = number
        self.is_staged = is_staged
        self.belongings: dict[str, Any] = {}
        self.rank = memory.rank
        self.num_ranks = memory.num_ranks
        self.device_type = device_type
        self.pids = opened.pids
        self.key = str(GroupKey(f"group {next(_NUMBERS)}", self.rank, self.num_ranks))
        self._lanes = lanes
        self.num_lanes = len(lanes) // (NUM_EACH if is_staged else 1)
        self._heap_end = heap_begin
        self._tensor: Tensor | None = opened.tensor
        self._give_back = opened.close
        self._watchdog = Watchdog(memory.driver)
        self._pidfds = {rank: open_pidfd(opened.pids[rank]) for rank in memory.peers}
        called = names or [f"rank {rank}" for rank in range(memory.num_ranks)]
        self._names = {pidfd: f"{called[rank]} (process {opened.pids[rank]})" for rank, pidfd in self._pidfds.items()}
        self._poller = select.epoll()
        self._lock = threading.Lock()
        self._first_dead = ""
        self._is_closed = False
        for rank, pidfd in self._pidfds.items():
            name, tell = (
                self._names[pidfd],
                _nothing if before_release is None else partial(before_release, called[rank]),
            )
            self._poller.register(pidfd, select.EPOLLIN)
            release_signals, streams = self._make_release(name), _Streams(lanes)
            self._watchdog.watch(name, pidfd, release_signals, streams, self._on_death, before_release=tell)
        _OPEN[self.key] = self
        if process_group is not None:
            if id(process_group) not in _OF:
                _OF[id(process_group)] = {}
                finalize(process_group, _OF.pop, id(process_group), None).atexit = False
            _OF[id(process_group)][self.key] = ref(self)

    @property
    def process_group(self) -> ProcessGroup | None:
        """torch.distributed's group of the same ranks; None where there is none, as between actors, or it is destroyed.

        It is not kept from ending: the threads of gloo's need the interpreter to free tensors, and end the whole process (SIGABRT)
        where they do so while the interpreter ends.
        """
        process_group = None if self._process_group is None else self._process_group()
        if process_group is None:
            return None
        try:  # who has kept it finds it all the same
            torch_or_raise().distributed.get_rank(process_group)
        except (ValueError, RuntimeError):
            return None
        return process_group

    def is_of(self, process_group: ProcessGroup) -> bool:
        """Whether it was opened of this one. Quicker than asking for its own, which has to find out whether that is destroyed."""
        return self._process_group is not None and self._process_group() is process_group

    @property
    def is_closed(self) -> bool:
        """Whether it has given everything back, or is about to."""
        return self._is_closed

    @property
    def reports(self) -> list[DeathReport]:
        """Ranks that have died."""
        return self._watchdog.reports

    def _make_release(self, name: str) -> Callable[[], list[Signal]]:
        """Gives the signals to set when this rank has died: those of all ranks, for the others stop as well.

        The lanes are broken before the first signal is set, so that no caller takes for a result what a released stream computes.
        """

        def signals() -> list[Signal]:
            self._note(name)
            return [signal for lane in self._lanes for signal in lane.incoming()]

        return signals

    def _note(self, name: str) -> None:
        with self._lock:
            if not self._first_dead:
                self._first_dead = name
                self._break(f"{name} died")

    def _on_death(self, report: DeathReport) -> None:
        with self._lock:
            if report.peer == self._first_dead:
                self._break(str(report))

    def _break(self, why: str) -> None:
        for lane in self._lanes:
            lane.broken = why

    @property
    def device(self) -> torch.device:
        """Where its tensors are."""
        return device_of(self.memory.driver.device)

    def lane(self, index: int = 0) -> Lane:
        """One of the lanes. Each is used by one stream (or thread) at a time.

        Raises:
            ChannelClosed: the group is closed.
        """
        return self.lanes_of(index)[0]

    def lanes_of(self, index: int) -> list[Lane]:
        """A lane and, in a staged group, those that its sums use besides."""
        if self._is_closed:
            raise ChannelClosed("the group is closed", hint="open a new one with open_group")
        if not 0 <= index < self.num_lanes:
            raise ValueError(f"there is no lane {index}\nhint: open_group(num_lanes=...) made {self.num_lanes}")
        return self._lanes[index :: self.num_lanes]

    def empty(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """A tensor that all ranks can write, for ``out`` of `all_gather`, `all_to_all` and `all_reduce`.

        All ranks ask for the same ones in one order. It is part of the group's memory, and not to be used when the group is closed.

        Raises:
            ChannelClosed: the group is closed.
            DeviceError: the heap is used up.
        """
        if self._tensor is None:
            raise ChannelClosed("the group is closed", hint="open a new one with open_group")
        if self.is_staged:
            raise DeviceError("a staged group has no heap", hint="give the collective a tensor of its own")
        begin, size_bytes = self._heap_end, math.prod(shape) * dtype.itemsize
        if begin + size_bytes > self.memory.buffer_bytes:
            raise DeviceError(
                f"a tensor of {size_bytes} bytes does not fit: {self.memory.buffer_bytes - begin} bytes of the heap are left",
                hint="open the group with a larger heap_bytes",
            )
        self._heap_end = align(begin + size_bytes, SLOT_ALIGNMENT)
        return self._tensor[begin : begin + size_bytes].view(dtype).view(shape)

    def shared_offset(self, tensor: Tensor) -> int | None:
        """Where a tensor of `empty` lies in every rank's memory; None for any other tensor."""
        offset = tensor.data_ptr() - self.memory.buffers[self.rank]
        return offset if 0 <= offset < self.memory.buffer_bytes else None

    def current_stream(self) -> int:
        """The stream that calls of this thread use: torch's current one; on a CPU the thread stands for it."""
        if self.device_type == "cpu":
            return threading.get_native_id()
        return current_stream(self.memory.driver.device)

    def is_capturing(self) -> bool:
        """Whether what this thread enqueues now is captured."""
        if self.device_type == "cpu":
            return self.memory.driver.is_capturing(self.current_stream())
        return bool(torch_or_raise().cuda.is_current_stream_capturing())

    def do(self, action: Callable[[], Any]) -> None:
        """Does what uses torch's current stream; on a CPU also what belongs to a captured graph."""
        if self.device_type == "cpu":
            driver: Any = self.memory.driver
            driver.do(action)
        else:
            action()

    def barrier(self, lane: int = 0) -> None:
        """Enqueues on the current stream: behind it, all ranks have reached this point."""
        chosen, stream = self.lane(lane), self.current_stream()
        chosen.begin(stream, is_captured=self.is_capturing())
        try:
            barrier(chosen, stream)
            end(chosen, stream)
        except BaseException as error:
            chosen.cut_off(error)
            raise
        self.check_call(chosen)

    def check(self) -> None:
        """Raises if a rank has died. On GPUs, ask after a synchronisation, before results are trusted.

        Asks the system, and not only this rank's watchdog: one that heard of the death earlier may have let its streams go, and
        what they then gave to this rank is not valid.

        Raises:
            ChannelBroken: it names the rank.
        """
        if not self._is_closed:
            for pidfd, _ in self._poller.poll(0):
                self._note(self._names[pidfd])
        for lane in self._lanes:
            lane.check()

    def check_call(self, lane: Lane) -> None:
        """What a call does at its end: on a CPU it is done, and its result has to be valid."""
        if self.device_type == "cpu":
            self.check()
        else:
            lane.check()

    def streams(self) -> list[int]:
        """All streams that may wait for other ranks."""
        return list(_Streams(self._lanes))

    def let_go(self, why: str) -> None:
        """Gives up: lanes are broken, then streams that wait for other ranks are released, as if all of those had died."""
        with self._lock:
            if not self._first_dead:
                self._break(why)
        release(self.memory.driver, why, lambda: [s for lane in self._lanes for s in lane.incoming()], self.streams())

    def close(self, *, have_met: bool = False) -> None:
        """Gives everything back when all ranks have come here, or one has died. Collective; idempotent.

        Args:
            have_met: the ranks know already that none of them uses the group's memory or streams any more.

        Raises:
            ChannelTimeout: CPU only: not all ranks came. Everything is given back all the same.
        """
        if self._is_closed:
            return
        try:
            if not have_met and not any(lane.broken for lane in self._lanes):
                for lane in self._lanes:
                    stream = self.current_stream()
                    lane.begin(stream, is_captured=False)
                    barrier(lane, stream)
        except ChannelBroken:  # a rank dies just now: there is no rank to wait for
            pass
        finally:
            self._free(is_idle=have_met)

    def _free(self, *, is_idle: bool) -> None:
        self._is_closed = True
        _OPEN.pop(self.key, None)
        for known in list(_OF.values()):
            known.pop(self.key, None)
        if self.device_type == "cuda" and not is_idle:
            torch_or_raise().cuda.synchronize(self.memory.driver.device)
        self._watchdog.close()
        self._poller.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        for lane in self._lanes:
            lane.close()
        self._tensor = None
        self.belongings.clear()
        self._give_back()


def open_by_key(key: str) -> PeerGroup:
    """The open group of a key."""
    group = _OPEN.get(key)
    if group is None:
        raise ChannelClosed(
            f"there is no open group '{key}' in this process",
            hint="keep the group open as long as what was compiled with it is called; with a new one, call torch.compile again",
        )
    return group


def open_of(process_group: ProcessGroup, device_type: str) -> PeerGroup | None:
    """The first open group of a process group for a kind of device, a staged one only where there is no other; None if there is
    none.
    """
    staged = None
    for known in _OF.get(id(process_group), {}).values():
        group = known()
        if group is not None and group.device_type == device_type:
            if not group.is_staged:
                return group
            staged = staged or group
    return staged


def _nothing() -> None: ...


class _Streams(Sequence[int]):
    """All streams that the lanes wait on, as they are at the moment of asking."""

    def __init__(self, lanes: list[Lane]) -> None:
        self._lanes = lanes

    def _now(self) -> list[int]:
        return [stream for lane in self._lanes for stream in list(lane.streams)]

    def __len__(self) -> int:
        return len(self._now())

    def __getitem__(self, index: Any) -> Any:
        return self._now()[index]
