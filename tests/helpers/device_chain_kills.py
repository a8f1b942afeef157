"""Workers of the test in which the first of three GPUs' processes in a chain is killed, with everything enqueued beforehand.

The first computes for a while and pushes to the second, which adds one and pushes to the third. When the first is killed, what the
second had enqueued runs on, and gives the third a value that looks right.
"""

from __future__ import annotations

import os
import random
import time
from typing import Any

import torch

from crossfade.device.cuda import CudaDriver
from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.signals import HostBoard
from crossfade.device.streams import Streams
from crossfade.device.watchdog import DeathReport, Watchdog
from crossfade.host.processes import Alive, open_pidfd
from tests.helpers.device_cases import open_receiver, open_sender, start, value, wait_idle
from tests.helpers.device_pair import Peer, die, run_workers
from tests.helpers.ring_tensors import TensorReceiver, TensorSender
from tests.helpers.waiting import until

NUM_WORDS = 4 << 20
NUM_SLOTS = 2
CYCLES_PER_S = 1_800_000_000
MOST_S = 0.03
"""How long the first one computes, and lives, at most."""


def check_a_chain(devices: tuple[int, int, int], seed: int) -> None:
    """The third takes no rubbish for a value, and what the two survivors had comes back."""
    workers = [makes_and_dies, relays_ahead, sinks]
    _, relay, sink = run_workers(workers, [(device, seed) for device in devices], dying={0})
    assert sink["is_right"] or sink["dead"] == ["worker 0"]
    assert relay.pop("is_told_first")
    for survivor in (relay, sink):
        assert survivor["held"] == []
        assert survivor["lost_bytes"] <= 0
        assert survivor["is_usable"]


def _start(device: int) -> tuple[CudaDriver, Streams, int]:
    """Loads what is used while streams wait, and gives its memory to torch's pool; also gives how much memory is free then."""
    driver, streams = start(device)
    made = value(0, NUM_WORDS, device) + 1
    made.cpu()
    torch.cuda._sleep(1_000)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    del made
    return driver, streams, torch.cuda.mem_get_info(device)[0]


def makes_and_dies(peers: dict[int, Peer], device: int, seed: int) -> None:
    driver, streams, _ = _start(device)
    ring, _, _ = open_sender(driver, streams, peers[1], NUM_SLOTS)
    sender, draw = TensorSender(driver, ring), random.Random(seed)
    peers[1].meet()
    torch.cuda._sleep(int(draw.uniform(0, MOST_S) * CYCLES_PER_S))  # type: ignore[no-untyped-call]
    assert sender.try_send(value(seed, NUM_WORDS, device))
    peers[1].get()  # the others have enqueued everything
    time.sleep(draw.uniform(0, MOST_S))  # the moment is what is random here
    die()


def relays_ahead(peers: dict[int, Peer], device: int, seed: int) -> dict[str, Any]:
    driver, streams, before_bytes = _start(device)
    ring_in, board_in, pool = open_receiver(driver, peers[0], NUM_SLOTS, NUM_WORDS * 8)
    ring_out, board_out, push = open_sender(driver, streams, peers[2], NUM_SLOTS)
    receiver, sender = TensorReceiver(ring_in), TensorSender(driver, ring_out)
    reports: list[DeathReport] = []
    told: list[float] = []

    def before_release() -> None:
        ring_in.break_off("worker 0 died")
        ring_out.give_up("worker 0 died")
        told.append(time.monotonic())

    watchdog, pidfd = Watchdog(driver), open_pidfd(peers[0].pid)
    watched = [torch.cuda.current_stream().cuda_stream, push]
    watchdog.watch("worker 0", pidfd, ring_in.signals, watched, reports.append, before_release)
    peers[0].meet()
    record = peers[0].take()
    assert isinstance(record, Enqueued)
    arrived = receiver.accept(record, (NUM_WORDS,), torch.int64)
    assert sender.try_send(arrived + 1)
    del arrived
    peers[2].get()  # it has enqueued everything as well
    peers[0].put("go")
    torch.cuda.synchronize()  # would hang for ever without the watchdog
    until(lambda: reports, "the report", 5.0, pause_s=0.001)
    watchdog.forget(pidfd)
    watchdog.close()
    os.close(pidfd)
    wait_idle(driver, push)
    peers[2].drain(ring_out.on_record)
    sender.close()
    _give_back(ring_in, peers[0], [board_in, board_out], pool)
    streams.close()
    peers[2].meet()
    driver.close()
    torch.cuda.empty_cache()
    return {
        "is_told_first": bool(told) and reports[0].is_free and time.monotonic() > told[0],
        "held": driver.ledger.held(),
        "lost_bytes": before_bytes - torch.cuda.mem_get_info(device)[0],
        "is_usable": _is_usable(device),
    }


def sinks(peers: dict[int, Peer], device: int, seed: int) -> dict[str, Any]:
    driver, streams, before_bytes = _start(device)
    ring, board, pool = open_receiver(driver, peers[1], NUM_SLOTS, NUM_WORDS * 8)
    receiver = TensorReceiver(ring)
    pidfds = [open_pidfd(peers[number].pid) for number in range(2)]
    alive = Alive({peers[number].name: pidfd for number, pidfd in enumerate(pidfds)})
    expected = value(seed, NUM_WORDS, device).add_(1).cpu()
    record = peers[1].take()
    assert isinstance(record, Enqueued)
    arrived = receiver.accept(record, (NUM_WORDS,), torch.int64)
    peers[1].put("enqueued")
    on_host = arrived.cpu()
    dead = alive.check()
    del arrived
    ring.give_up("worker 0 died")
    _give_back(ring, peers[1], [board], pool)
    alive.close()
    for pidfd in pidfds:
        os.close(pidfd)
    streams.close()
    peers[1].meet()
    driver.close()
    torch.cuda.empty_cache()
    return {
        "dead": dead,
        "is_right": bool(torch.equal(on_host, expected)),
        "held": driver.ledger.held(),
        "lost_bytes": before_bytes - torch.cuda.mem_get_info(device)[0],
        "is_usable": _is_usable(device),
    }


def _give_back(ring: RingReceiver, peer: Peer, boards: list[HostBoard], pool: Pool) -> None:
    """Waits for the end of a ring that was broken off or given up."""

    def listen() -> None:
        record = peer.take() if peer.has_record(0.001) else None
        if record is not None and not isinstance(record, Enqueued):
            ring.on_record(record)
        ring.collect()

    until(lambda: ring.is_empty, "the return of the slots", then=listen)
    for board in boards:
        board.close()
    pool.close()


def _is_usable(device: int) -> bool:
    ones = torch.ones(1 << 20, device=f"cuda:{device}")
    return bool((ones + ones).sum().item() == 2 << 20)
