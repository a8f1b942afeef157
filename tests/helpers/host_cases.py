"""Workers of the tests of `HostDriver`: what a sender and a receiver do, each in a process of its own, with no GPU."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable
from dataclasses import dataclass
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
from crossfade.host.memory import Memory
from tests.helpers.device_pair import LIMIT_S, Peer
from tests.helpers.waiting import until

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


@dataclass
class End:
    """What each side holds."""

    driver: HostDriver
    board: HostBoard
    pool: Pool

    def close(self) -> None:
        self.board.close()
        self.pool.close()

    def held(self) -> list[Any]:
        return self.driver.ledger.held()


def _end(memory: Memory, num_slots: int) -> End:
    driver = HostDriver(LIMIT_S)
    end = End(driver, HostBoard(driver, memory, num_signals(num_slots), "ring"), Pool(driver))
    memory.close()
    return end


def open_sender(peer: Peer, num_slots: int) -> tuple[End, RingSender]:
    end = _end(peer.share(num_signals(num_slots) * WORD_BYTES), num_slots)
    return end, RingSender(end.driver, end.board, STREAM, peer.tell, f"ring to {peer.name}")


def open_receiver(peer: Peer, num_slots: int, slot_bytes: int = 512) -> tuple[End, RingReceiver]:
    end = _end(peer.shared(), num_slots)
    label = f"ring of {peer.name}"
    ring = RingReceiver(end.driver, end.pool, end.board, peer.tell, label, num_slots=num_slots, slot_bytes=slot_bytes)
    return end, ring


def until_sent(peer: Peer, ring: RingSender, try_send: Callable[[], bool]) -> None:
    """Sends one value; the slots that are asked for come by records."""

    def listen() -> None:
        if peer.has_record(PAUSE_S):
            ring.on_record(peer.take())

    until(try_send, "a credit", then=listen)


def send(peer: Peer, ring: RingSender, words: Words) -> None:
    until_sent(peer, ring, lambda: ring.try_send(words.ctypes.data, words.nbytes, keep=words))


def end_sending(peer: Peer, end: End, ring: Any) -> None:
    """When all was sent and taken."""
    ring.close()
    end.close()
    peer.meet()


def end_receiving(peer: Peer, end: End, ring: RingReceiver) -> None:
    """When all was taken and let go of."""
    ring.close()
    until_given_back(peer, ring)
    end.close()
    peer.meet()


def until_given_back(peer: Peer, ring: RingReceiver) -> None:
    def listen() -> None:
        record = peer.take() if peer.has_record(PAUSE_S) else None
        if record is not None and not isinstance(record, Enqueued):
            ring.on_record(record)
        ring.collect()

    until(lambda: ring.is_empty, "the return of the slots", then=listen)


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

    until(lambda: bool(found), "a value", then=listen)
    return found[0]


def ring_sends(peers: dict[int, Peer], other: int, num_values: int, num_slots: int) -> dict[str, Any]:
    peer = peers[other]
    end, ring = open_sender(peer, num_slots)
    for index, num in enumerate(lengths(num_values)):
        send(peer, ring, value(index, num))
    peer.drain(ring.on_record)
    statistics = ring.statistics()
    end_sending(peer, end, ring)
    return {"statistics": statistics, "held": end.held()}


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
    end_receiving(peer, end, ring)
    return {
        "num_wrong": num_wrong,
        "num_copied_out": num_copied_out,
        "num_leased": num_leased,
        "statistics": statistics,
        "held": end.held(),
    }


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
    until(lambda: sender.is_flushed, "a free chunk", then=lambda: sender.on_record(peer.take()))
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
        until(lambda: receiver.next_bytes is not None, "a value", then=lambda: receiver.on_record(peer.take()))
        assert receiver.next_bytes == got.nbytes
        receiver.receive(got.ctypes.data)
        until(lambda: receiver.is_enqueued, "the value's end", then=lambda: receiver.on_record(peer.take()))
        num_wrong += not np.array_equal(got, value(index, num))
    receiver.close()
    peer.meet()
    return {"num_wrong": num_wrong, "held": driver.ledger.held()}
