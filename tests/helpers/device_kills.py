"""Workers of the tests in which a process is killed while the other one's streams wait for it."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from crossfade.device.cuda import CudaDriver
from crossfade.device.records import Enqueued
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.tensors import TensorReceiver, TensorSender
from crossfade.device.watchdog import DeathReport, Watchdog
from crossfade.errors import ChannelBroken
from crossfade.host.processes import open_pidfd
from tests.helpers.device_cases import open_receiver, open_sender, start, value, wait_idle
from tests.helpers.device_pair import Peer, die

SLEEP_CYCLES = 8_000_000_000  # some seconds


def _is_usable(device: int) -> bool:
    """Whether the device still computes and copies. (The first call also loads what the tests launch while streams wait.)"""
    value(0, 100_000, device).sum()
    ones = torch.ones(1 << 20, device=f"cuda:{device}")
    return bool((ones + ones).sum().item() == 2 << 20)


def dies_sending(peers: dict[int, Peer], device: int, other: int) -> None:
    """Tells of a value that its device has not begun to copy, and is killed."""
    driver, streams = start(device)
    peer = peers[other]
    ring, _, _ = open_sender(driver, streams, peer, 2)
    sender = TensorSender(driver, ring)
    tensor = value(0, 100_000, device)
    torch.cuda.synchronize()
    peer.meet()
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    assert sender.try_send(tensor)
    peer.get()  # the receiver's stream waits by now
    die()


def survives_receiving(peers: dict[int, Peer], device: int, other: int) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    _is_usable(device)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.mem_get_info(device)[0]
    ring, board, pool = open_receiver(driver, peer, 2, 1 << 20)
    receiver = TensorReceiver(ring)
    report, taken_s, error = _watch_and_die(driver, peer, ring, lambda: _accept_one(peer, receiver))
    usable = _is_usable(device)
    end = time.monotonic() + 5
    while not ring.is_empty and time.monotonic() < end:
        ring.collect()
    board.close()
    pool.close()
    streams.close()
    torch.cuda.empty_cache()
    lost = before_bytes - torch.cuda.mem_get_info(device)[0]
    return {
        "report": report,
        "taken_s": taken_s,
        "error": error,
        "usable": usable,
        "held": driver.ledger.held(),
        "lost_bytes": lost,
    }


def _accept_one(peer: Peer, receiver: TensorReceiver) -> torch.Tensor:
    record = peer.take()
    assert isinstance(record, Enqueued)
    return receiver.accept(record, (100_000,), torch.int64).sum()


def _watch_and_die(driver: CudaDriver, peer: Peer, ring: Any, act: Any) -> tuple[DeathReport, float, str]:
    """Does ``act``, which leaves a stream waiting for the peer, lets the peer die, and sees what the watchdog makes of it."""
    reports: list[DeathReport] = []
    watchdog = Watchdog(driver)
    pidfd = open_pidfd(peer.pid)
    compute = torch.cuda.current_stream().cuda_stream
    streams = [compute] if isinstance(ring, RingReceiver) else [ring._stream]
    peer.meet()
    result = act()
    assert not driver.is_idle(streams[0]), "nothing waits for the peer"
    watchdog.watch(peer.name, pidfd, ring.signals, streams, reports.append)
    begin = time.monotonic()
    peer.put("die")
    torch.cuda.synchronize()  # would hang for ever without the watchdog
    taken_s = time.monotonic() - begin
    while not reports and time.monotonic() < begin + 5:
        time.sleep(0.001)
    watchdog.close()
    os.close(pidfd)
    ring.break_off(str(reports[0]))
    del result
    try:
        if isinstance(ring, RingReceiver):
            ring.accept(Enqueued(0, 0, 8), compute)
        else:
            ring.try_send(0, 8)
        error = "no error"
    except ChannelBroken as broken:
        error = str(broken)
    return reports[0], taken_s, error


def dies_receiving(peers: dict[int, Peer], device: int, other: int) -> None:
    """Enqueues ``free`` behind something long, tells so, and is killed."""
    driver, _ = start(device)
    peer = peers[other]
    ring, _, _ = open_receiver(driver, peer, 1, 1 << 20)
    peer.meet()
    record = peer.take()
    assert isinstance(record, Enqueued)
    lease = ring.accept(record, torch.cuda.current_stream().cuda_stream)
    torch.cuda._sleep(SLEEP_CYCLES)  # type: ignore[no-untyped-call]
    lease.release()
    peer.get()
    die()


def survives_sending(peers: dict[int, Peer], device: int, other: int) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    _is_usable(device)
    torch.cuda.synchronize()
    before_bytes = torch.cuda.mem_get_info(device)[0]
    ring, board, stream = open_sender(driver, streams, peer, 1)
    sender = TensorSender(driver, ring)

    tensors = [value(index, 100_000, device) for index in range(2)]
    torch.cuda.synchronize()

    def send_two() -> None:
        assert sender.try_send(tensors[0])
        while not sender.try_send(tensors[1]):
            ring.on_record(peer.take())

    report, taken_s, error = _watch_and_die(driver, peer, ring, send_two)
    usable = _is_usable(device)
    wait_idle(driver, stream)
    ring.collect()
    sender.close()
    board.close()
    streams.close()
    torch.cuda.empty_cache()
    lost = before_bytes - torch.cuda.mem_get_info(device)[0]
    return {
        "report": report,
        "taken_s": taken_s,
        "error": error,
        "usable": usable,
        "held": driver.ledger.held(),
        "lost_bytes": lost,
    }
