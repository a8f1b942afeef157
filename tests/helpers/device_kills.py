"""Workers of the tests in which a process is killed: while the other one's streams wait for it, or in the middle of a chain of
large copies, its own or the other one's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from crossfade.device.borrowed import tensor_on
from crossfade.device.cuda import CudaDriver
from crossfade.device.records import Enqueued
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.watchdog import DeathReport, Watchdog
from crossfade.errors import ChannelBroken
from crossfade.host.processes import await_end, open_pidfd
from tests.helpers.device_cases import open_receiver, open_sender, start, value, wait_idle
from tests.helpers.device_pair import Peer, die
from tests.helpers.ring_tensors import TensorReceiver, TensorSender
from tests.helpers.waiting import until

SLEEP_CYCLES = 8_000_000_000  # some seconds
LINK_BYTES = 256 << 20  # 0.7 ms over NVLink
NUM_LINKS, LINKS_PER_MARK = 800, 50  # half a second, which outlasts the end of a process (0.1 s)
NUM_POINTS = 4


class Moment(StrEnum):
    """What goes on when the process is killed."""

    WAITING = "waiting"
    """Copies have not begun: the survivor's stream waits."""
    COPYING = "copying"
    """Large copies follow each other."""

    @property
    def num_words(self) -> int:
        return LINK_BYTES // 8 if self is Moment.COPYING else 100_000


class Chain:
    """Large copies, one behind the other on a stream, with an event now and then."""

    def __init__(self, driver: CudaDriver, stream: int, target: int, source: torch.Tensor) -> None:
        self._driver = driver
        self._marks = []
        for number in range(NUM_LINKS):
            if number % LINKS_PER_MARK == 1:
                self._marks.append(driver.create_event())
                driver.record_event(self._marks[-1], stream)
            driver.copy(target, source.data_ptr(), LINK_BYTES, stream)
        self._marks.append(driver.create_event())
        driver.record_event(self._marks[-1], stream)

    def wait_for(self, point: int) -> None:
        """Until the copies have come to this mark."""
        until(lambda: self._driver.has_happened(self._marks[point]), "this mark", 10.0)

    @property
    def is_running(self) -> bool:
        return self._driver.has_happened(self._marks[0]) and not self._driver.has_happened(self._marks[-1])

    def close(self) -> None:
        while self._marks:
            self._driver.destroy_event(self._marks.pop())


def slot_address(ring: RingSender) -> int:
    assert ring._target is not None
    return ring._target.memory.address


def _is_usable(device: int) -> bool:
    """Whether the device still computes and copies. (The first call also loads what the tests launch while streams wait.)"""
    value(0, 100_000, device).sum()
    ones = torch.ones(1 << 20, device=f"cuda:{device}")
    return bool((ones + ones).sum().item() == 2 << 20)


def _is_left_alone(ring: RingReceiver, device: int) -> bool:
    """Whether nothing writes into the slots any more."""
    block = ring._generations[0].block
    words = tensor_on(block.address, (block.size_bytes // 8,), torch.int64, device)
    first = words.sum().item()
    time.sleep(0.05)  # nothing would tell of a copy that is still under way
    return bool(words.sum().item() == first)


@dataclass
class _Death:
    """What a survivor saw."""

    report: DeathReport
    taken_s: float
    error: str
    was_copying: bool


def _watch_and_die(
    driver: CudaDriver,
    peer: Peer,
    ring: RingSender | RingReceiver,
    stream: int,
    act: Callable[[], Chain | None],
    point: int,
) -> _Death:
    """Does ``act``, which leaves a stream waiting for the peer, lets the peer die, and sees what the watchdog makes of it."""
    reports: list[DeathReport] = []
    watchdog = Watchdog(driver)
    pidfd = open_pidfd(peer.pid)
    peer.meet()
    chain = act()
    assert not driver.is_idle(stream), "nothing waits for the peer"
    watchdog.watch(peer.name, pidfd, ring.signals, [stream], reports.append)
    if chain is not None:
        chain.wait_for(point)
    begin = time.monotonic()
    peer.put("die")
    assert await_end(pidfd, 10)
    was_copying = chain is not None and chain.is_running
    torch.cuda.synchronize()  # would hang for ever without the watchdog
    taken_s = time.monotonic() - begin
    until(lambda: reports, "the report", 5.0, pause_s=0.001)
    watchdog.close()
    os.close(pidfd)
    if chain is not None:
        chain.close()
    ring.break_off(str(reports[0]))
    try:
        ring.accept(Enqueued(0, 0, 8), stream) if isinstance(ring, RingReceiver) else ring.try_send(0, 8)
        error = "no error"
    except ChannelBroken as broken:
        error = str(broken)
    return _Death(reports[0], taken_s, error, was_copying)


def _result(driver: CudaDriver, device: int, before_bytes: int, death: _Death, **more: bool) -> dict[str, Any]:
    torch.cuda.empty_cache()
    return {
        **vars(death),
        **more,
        "held": driver.ledger.held(),
        "lost_bytes": before_bytes - torch.cuda.mem_get_info(device)[0],
    }


def dies_sending(peers: dict[int, Peer], device: int, other: int, moment: Moment, point: int = 0) -> None:
    """Tells of a value whose copy has not begun, or stands behind a chain of copies, and is killed."""
    driver, streams = start(device)
    peer = peers[other]
    ring, _, stream = open_sender(driver, streams, peer, 2)
    sender = TensorSender(driver, ring)
    tensor = value(0, moment.num_words, device)
    torch.cuda.synchronize()
    peer.meet()
    chain = None
    if moment is Moment.COPYING:
        chain = Chain(driver, stream, slot_address(ring), tensor)
    else:
        torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    assert sender.try_send(tensor)
    peer.get()  # the receiver's stream waits by now
    if chain is not None:
        chain.wait_for(point)
        assert chain.is_running, "the copies are over: NUM_LINKS is too small"
    die()


def survives_receiving(peers: dict[int, Peer], device: int, other: int, moment: Moment) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    _is_usable(device)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.mem_get_info(device)[0]
    ring, board, pool = open_receiver(driver, peer, 2, moment.num_words * 8)
    receiver = TensorReceiver(ring)

    def accept_one() -> None:
        record = peer.take()
        assert isinstance(record, Enqueued)
        receiver.accept(record, (moment.num_words,), torch.int64).sum()

    death = _watch_and_die(driver, peer, ring, torch.cuda.current_stream().cuda_stream, accept_one, 0)
    usable = _is_usable(device)
    is_left_alone = _is_left_alone(ring, device)
    until(lambda: ring.is_empty, "the return of the slots", 5.0, then=ring.collect)
    board.close()
    pool.close()
    streams.close()
    return _result(driver, device, before_bytes, death, usable=usable, is_left_alone=is_left_alone)


def dies_receiving(peers: dict[int, Peer], device: int, other: int, moment: Moment) -> None:
    """Enqueues ``free`` behind something long, tells so, and is killed: while the sender waits, or copies."""
    driver, _ = start(device)
    peer = peers[other]
    ring, _, _ = open_receiver(driver, peer, 1, moment.num_words * 8)
    peer.meet()
    record = peer.take()
    assert isinstance(record, Enqueued)
    lease = ring.accept(record, torch.cuda.current_stream().cuda_stream)
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    lease.release()
    peer.get()
    die()


def survives_sending(peers: dict[int, Peer], device: int, other: int, moment: Moment, point: int = 0) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    _is_usable(device)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.mem_get_info(device)[0]
    ring, board, stream = open_sender(driver, streams, peer, 1)
    sender = TensorSender(driver, ring)

    def send_two() -> Chain | None:
        first, second = (value(index, moment.num_words, device) for index in range(2))
        torch.cuda.synchronize()
        assert sender.try_send(first)
        chain = Chain(driver, stream, slot_address(ring), first) if moment is Moment.COPYING else None
        while not sender.try_send(second):
            ring.on_record(peer.take())
        return chain

    death = _watch_and_die(driver, peer, ring, stream, send_two, point)
    usable = _is_usable(device)
    wait_idle(driver, stream)
    ring.collect()
    sender.close()
    board.close()
    streams.close()
    return _result(driver, device, before_bytes, death, usable=usable, is_left_alone=True)
