"""Workers of the tests of `HostDriver`: what a sender and a receiver do, each in a process of its own, with no GPU."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import Pool
from crossfade.device.records import Enqueued
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import Lease, RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.device.staged import StagedReceiver, StagedSender, StagedStreams
from crossfade.device.staged_layout import StagedLayout
from crossfade.device.watchdog import DeathReport, Watchdog
from crossfade.errors import ChannelBroken
from crossfade.host.processes import open_pidfd
from tests.helpers.calm import calm_s
from tests.helpers.device_pair import LIMIT_S, Peer
from tests.helpers.footprint import footprint, held_more

Words = npt.NDArray[np.int64]
STREAM = 0  # whoever calls is the stream
PAUSE_S = 0.001


def value(index: int, num: int) -> Words:
    """What the index-th value must be."""
    return np.arange(num, dtype=np.int64) * (2 * index + 1) + index


def lengths(num_values: int, seed: int = 1) -> list[int]:
    """Of each value, in words; every other one is longer than all before it, up to 4 MB."""
    draw = random.Random(seed)
    most = [1 + (500_000 * (index + 1) ** 2) // num_values**2 for index in range(num_values)]
    return [longest if index % 2 else draw.choice((0, 1, 7, longest)) for index, longest in enumerate(most)]


def words_at(address: int, size_bytes: int) -> Words:
    return np.frombuffer(memoryview((ctypes.c_uint8 * size_bytes).from_address(address)), dtype=np.int64)


def copy_at(address: int, size_bytes: int) -> Words:
    return words_at(address, size_bytes).copy() if size_bytes else np.empty(0, np.int64)


def until(done: Callable[[], bool], what: str, then: Callable[[], None] = lambda: None) -> None:
    end = time.monotonic() + LIMIT_S
    while not done():
        if time.monotonic() > end:
            raise TimeoutError(f"{what} has not come about in {LIMIT_S} s")
        then()


@dataclass
class End:
    """What each side holds."""

    driver: HostDriver
    board: HostBoard
    pool: Pool


def open_sender(peer: Peer, num_slots: int) -> tuple[End, RingSender]:
    driver = HostDriver(LIMIT_S)
    memory = peer.share(num_signals(num_slots) * WORD_BYTES)
    end = End(driver, HostBoard(driver, memory, num_signals(num_slots), "ring"), Pool(driver))
    memory.close()
    return end, RingSender(driver, end.board, STREAM, peer.tell, f"ring to {peer.name}")


def open_receiver(peer: Peer, num_slots: int, slot_bytes: int = 512) -> tuple[End, RingReceiver]:
    driver = HostDriver(LIMIT_S)
    memory = peer.shared()
    end = End(driver, HostBoard(driver, memory, num_signals(num_slots), "ring"), Pool(driver))
    memory.close()
    label = f"ring of {peer.name}"
    ring = RingReceiver(driver, end.pool, end.board, peer.tell, label, num_slots=num_slots, slot_bytes=slot_bytes)
    return end, ring


def send(peer: Peer, ring: RingSender, words: Words) -> None:
    """Sends one value; the slots that are asked for come by records."""

    def listen() -> None:
        if peer.has_record(PAUSE_S):
            ring.on_record(peer.take())

    until(lambda: ring.try_send(words.ctypes.data, words.nbytes, keep=words), "a credit", listen)


def accept(peer: Peer, ring: RingReceiver) -> Lease:
    found: list[Lease] = []

    def listen() -> None:
        ring.collect()
        if not peer.has_record(PAUSE_S):
            return
        record = peer.take()
        if isinstance(record, Enqueued):
            found.append(ring.accept(record, STREAM))
        else:
            ring.on_record(record)

    until(lambda: bool(found), "a value", listen)
    return found[0]


def ring_sends(peers: dict[int, Peer], other: int, num_values: int, num_slots: int) -> dict[str, Any]:
    peer = peers[other]
    end, ring = open_sender(peer, num_slots)
    for index, num in enumerate(lengths(num_values)):
        send(peer, ring, value(index, num))
    peer.drain(ring.on_record)
    statistics = ring.statistics()
    ring.close()
    end.board.close()
    peer.meet()
    return {"statistics": statistics, "held": end.driver.ledger.held()}


def ring_receives(peers: dict[int, Peer], other: int, num_values: int, num_slots: int, num_kept: int) -> dict[str, Any]:
    """Keeps the last values on their slots, or copies where leases run short, and looks at each when it lets go of it."""
    peer = peers[other]
    end, ring = open_receiver(peer, num_slots)
    kept: list[tuple[int, Lease | Words]] = []
    num_wrong = num_copied_out = num_leased = 0

    def let_go() -> int:
        index, held = kept.pop(0)
        got = copy_at(held.address, held.size_bytes) if isinstance(held, Lease) else held
        if isinstance(held, Lease):
            held.release()
        return int(not np.array_equal(got, value(index, num_words[index])))

    num_words = lengths(num_values)
    for index in range(num_values):
        lease = accept(peer, ring)
        if lease.is_short:
            num_copied_out += 1
            kept.append((index, copy_at(lease.address, lease.size_bytes)))
            lease.release()
        else:
            kept.append((index, lease))
        num_leased = max(num_leased, ring.statistics().num_leased)
        while len(kept) > num_kept:
            num_wrong += let_go()
    while kept:
        num_wrong += let_go()
    statistics = ring.statistics()
    ring.close()
    until(lambda: ring.is_empty, "the return of the slots", lambda: close_down(peer, ring))
    end.board.close()
    end.pool.close()
    peer.meet()
    return {
        "num_wrong": num_wrong,
        "num_copied_out": num_copied_out,
        "num_leased": num_leased,
        "statistics": statistics,
        "held": end.driver.ledger.held(),
    }


def close_down(peer: Peer, ring: RingReceiver) -> None:
    if peer.has_record(PAUSE_S):
        ring.on_record(peer.take())
    ring.collect()


def staged_sends(peers: dict[int, Peer], other: int, num_values: int, layout: StagedLayout) -> dict[str, Any]:
    peer, driver = peers[other], HostDriver(LIMIT_S)
    memory = peer.share(layout.size_bytes)
    sender = StagedSender(driver, memory, layout, StagedStreams(1, 2, 3), peer.tell, "staged")
    memory.close()
    peer.meet()
    for index, num in enumerate(lengths(num_values)):
        words = value(index, num)
        sender.send(words.ctypes.data, words.nbytes, keep=words)
        peer.drain(sender.on_record)
    until(lambda: sender.is_flushed, "a free chunk", lambda: sender.on_record(peer.take()))
    sender.close()
    peer.meet()
    return {"held": driver.ledger.held()}


def staged_receives(peers: dict[int, Peer], other: int, num_values: int, layout: StagedLayout) -> dict[str, Any]:
    peer, driver = peers[other], HostDriver(LIMIT_S)
    memory = peer.shared()
    receiver = StagedReceiver(driver, memory, layout, StagedStreams(1, 2, 3), peer.tell, "staged")
    memory.close()
    peer.meet()
    num_wrong = 0
    for index, num in enumerate(lengths(num_values)):
        got = np.full(num, -1, dtype=np.int64)
        until(lambda: receiver.next_bytes is not None, "a value", lambda: receiver.on_record(peer.take()))
        assert receiver.next_bytes == got.nbytes
        receiver.receive(got.ctypes.data)
        until(lambda: receiver.is_enqueued, "the value's end", lambda: receiver.on_record(peer.take()))
        num_wrong += not np.array_equal(got, value(index, num))
    receiver.close()
    peer.meet()
    return {"num_wrong": num_wrong, "held": driver.ledger.held()}


def die_after(seed: int) -> None:
    """Kills this process at some moment of the next 0.05 s, whatever its main thread does then."""
    draw = random.Random(seed)
    timer = threading.Timer(draw.uniform(0, 0.05), os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()


def dies_sending(peers: dict[int, Peer], other: int, seed: int, num_slots: int) -> None:
    peer = peers[other]
    _, ring = open_sender(peer, num_slots)
    send(peer, ring, value(0, 5))
    die_after(seed)
    for index, num in enumerate(lengths(100_000, seed), start=1):
        send(peer, ring, value(index, max(num % 300_000, 1)))


def dies_receiving(peers: dict[int, Peer], other: int, seed: int, num_slots: int) -> None:
    peer = peers[other]
    _, ring = open_receiver(peer, num_slots)
    accept(peer, ring).release()
    die_after(seed)
    while True:
        accept(peer, ring).release()


@dataclass
class Survivor:
    """Watches the peer; ``work`` goes on until it raises `ChannelBroken`."""

    peer: Peer
    end: End
    ring: RingSender | RingReceiver
    reports: list[DeathReport] = field(default_factory=list)

    def run(self, work: Callable[[], None]) -> dict[str, Any]:
        watchdog = Watchdog(self.end.driver)
        pidfd = open_pidfd(self.peer.pid)
        heard: list[float] = []

        def on_death(report: DeathReport) -> None:
            heard.append(calm_s())  # before anybody can see what follows
            self.reports.append(report)
            self.ring.break_off(str(report))

        watchdog.watch(self.peer.name, pidfd, self.ring.signals, [STREAM], on_death)
        try:
            work()
            text, raised = "no error", calm_s()
        except ChannelBroken as error:
            text, raised = str(error), calm_s()
        watchdog.forget(pidfd)
        watchdog.close()
        os.close(pidfd)
        return {"error": text, "taken_s": raised - heard[0] if heard else -1.0}


def survives_receiving(peers: dict[int, Peer], other: int, num_slots: int) -> dict[str, Any]:
    peer = peers[other]
    before = footprint(os.getpid())
    end, ring = open_receiver(peer, num_slots)
    last: list[tuple[Lease, Words]] = []
    num_wrong = 0

    def work() -> None:
        nonlocal num_wrong
        while True:
            record = peer.take(PAUSE_S) if peer.has_record(PAUSE_S) else None
            if isinstance(record, Enqueued):
                lease = ring.accept(record, STREAM)
                words = copy_at(lease.address, lease.size_bytes)
                step = words[1] - words[0] if len(words) > 1 else 1
                num_wrong += not np.array_equal(words, np.arange(len(words)) * step + words[0])
                while last:
                    last.pop()[0].release()
                last.append((lease, words))
            elif record is not None:
                ring.on_record(record)
            elif ring._ended is not None:  # all records were taken: what a channel asks for before it raises
                raise ring._ended
            ring.collect()

    result = Survivor(peer, end, ring).run(work)
    lease, words = last.pop()
    is_kept_whole = bool(np.array_equal(copy_at(lease.address, lease.size_bytes), words))
    lease.release()
    until(lambda: ring.is_empty, "the return of the slots", ring.collect)
    end.board.close()
    end.pool.close()
    return {
        **result,
        "num_wrong": num_wrong,
        "is_kept_whole": is_kept_whole,
        "held": end.driver.ledger.held(),
        "grown": _held_more(before),
    }


def survives_sending(peers: dict[int, Peer], other: int, num_slots: int) -> dict[str, Any]:
    peer = peers[other]
    before = footprint(os.getpid())
    end, ring = open_sender(peer, num_slots)

    def work() -> None:
        for index, num in enumerate(lengths(100_000)):
            send(peer, ring, value(index, max(num % 300_000, 1)))

    result = Survivor(peer, end, ring).run(work)
    until(lambda: ring.is_done, "the end of the copies")
    ring.close()
    end.board.close()
    return {**result, "held": end.driver.ledger.held(), "grown": _held_more(before)}


def _held_more(before: Any) -> dict[str, int]:
    """Descriptors, threads, mappings: everything but memory that the interpreter keeps."""
    grown = held_more(before)
    return {name: grown[name] for name in ("num_descriptors", "num_threads", "num_ring_mappings") if name in grown}


def waits_for_the_dead(peers: dict[int, Peer], other: int) -> dict[str, Any]:
    """Waits for a signal that the other process would have set."""
    peer = peers[other]
    end, ring = open_receiver(peer, 2)
    watchdog, reports = Watchdog(end.driver), list[DeathReport]()
    pidfd = open_pidfd(peer.pid)
    watchdog.watch(peer.name, pidfd, ring.signals, [STREAM], reports.append)
    peer.put("die")
    begin = calm_s()
    ring.accept(Enqueued(0, 1, 8), STREAM).release()  # a breach of PL-5: nothing was enqueued
    taken_s = calm_s() - begin
    until(lambda: bool(reports), "the report")
    watchdog.close()
    os.close(pidfd)
    ring.break_off(str(reports[0]))
    ring.collect()
    end.board.close()
    end.pool.close()
    return {"taken_s": taken_s, "waited_for": reports[0].waited_for, "held": end.driver.ledger.held()}


def dies_when_told(peers: dict[int, Peer], other: int) -> None:
    peer = peers[other]
    open_sender(peer, 2)
    peer.get()
    os.kill(os.getpid(), signal.SIGKILL)
