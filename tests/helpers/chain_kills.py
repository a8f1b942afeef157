"""Workers of tests without a GPU: one of two processes is killed, or of three in a chain, where 0 sends to 1, which sends to 2."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from threading import Thread
from typing import Any

import numpy as np

from crossfade.device.records import Enqueued
from crossfade.device.ring_receiver import Lease, RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.watchdog import DeathReport, Watchdog
from crossfade.errors import ChannelBroken
from crossfade.host.processes import Alive, open_pidfd
from tests.helpers.calm import calm_s
from tests.helpers.device_pair import Peer, die, die_after
from tests.helpers.footprint import counts_more, footprint
from tests.helpers.host_cases import (
    PAUSE_S,
    STREAM,
    End,
    Words,
    accept,
    copy_at,
    lengths,
    open_receiver,
    open_sender,
    send,
    until_given_back,
    value,
)
from tests.helpers.waiting import until


class Party:
    """What each of the three does about deaths: it watches both others, and breaks its ends off before it lets anything go.

    Args:
        peers: the others.
        rings: ends of rings, with the number of who is at the other end.
    """

    def __init__(self, peers: dict[int, Peer], rings: Sequence[tuple[int, End, RingSender | RingReceiver]]) -> None:
        self.told: dict[int, float] = {}
        self.broken_off: list[int] = []
        self.reports: list[DeathReport] = []
        self._rings = [(other, ring) for other, _, ring in rings]
        self._pidfds = {number: open_pidfd(peer.pid) for number, peer in peers.items()}
        self.alive = Alive({peers[number].name: pidfd for number, pidfd in self._pidfds.items()})
        self._watchdog = Watchdog(rings[0][1].driver)
        signals = {number: ring.signals for number, _, ring in rings}
        for number, pidfd in self._pidfds.items():
            peer = peers[number]
            self._watchdog.watch(
                peer.name, pidfd, signals.get(number, list), [STREAM], self.reports.append, self._told(peer, number)
            )

    def _told(self, peer: Peer, number: int) -> Callable[[], None]:
        def break_off() -> None:
            self.told[number] = calm_s()  # before anybody can see what follows
            for other, ring in self._rings:
                end = ring.break_off if other == number else ring.give_up
                end(f"{peer.name} died")
            self.broken_off.append(number)

        return break_off

    def close(self) -> None:
        self.alive.close()
        for pidfd in self._pidfds.values():
            self._watchdog.forget(pidfd)
        self._watchdog.close()
        for pidfd in self._pidfds.values():
            os.close(pidfd)

    def go_on(self, work: Callable[[], None]) -> dict[str, Any]:
        """Works until a peer's death ends it."""
        try:
            work()
            text = "no error"
        except ChannelBroken as error:
            text = str(error)
        raised = calm_s()
        dead = self.alive.check()
        result = {
            "error": text,
            "taken_s": raised - min(self.told.values(), default=0.0),
            "dead": dead,
            "is_told": list(self.told),
        }
        self.close()
        return result


def _receive(peer: Peer, ring: RingReceiver, use: Callable[[Enqueued], None]) -> None:
    """Until the ring has ended."""
    while True:
        record = peer.take(PAUSE_S) if peer.has_record(PAUSE_S) else None
        if isinstance(record, Enqueued):
            use(record)
        elif record is not None:
            ring.on_record(record)
        elif ring._ended is not None:  # all records were taken: what a channel asks for before it raises
            raise ring._ended
        ring.collect()


def _send_many(peer: Peer, ring: RingSender, seed: int = 1) -> None:
    for index, num in enumerate(lengths(100_000, seed), start=1):
        send(peer, ring, value(index, max(num % 300_000, 1)))


def _is_whole(words: Words) -> bool:
    step = words[1] - words[0] if len(words) > 1 else 1
    return np.array_equal(words, np.arange(len(words)) * step + words[0])


def _close_sender(end: End, ring: RingSender) -> None:
    until(lambda: ring.is_done, "the end of the copies")
    ring.close()
    end.close()


def _close_receiver(peer: Peer, end: End, ring: RingReceiver) -> None:
    until_given_back(peer, ring)
    end.close()


def dies_sending(peers: dict[int, Peer], other: int, seed: int, num_slots: int) -> None:
    _, ring = open_sender(peers[other], num_slots)
    send(peers[other], ring, value(0, 5))
    die_after(seed)
    _send_many(peers[other], ring, seed)


def dies_receiving(peers: dict[int, Peer], other: int, seed: int, num_slots: int) -> None:
    _, ring = open_receiver(peers[other], num_slots)
    accept(peers[other], ring).release()
    die_after(seed)
    while True:
        accept(peers[other], ring).release()


def survives_receiving(peers: dict[int, Peer], other: int, num_slots: int) -> dict[str, Any]:
    before = footprint(os.getpid())
    end, ring = open_receiver(peers[other], num_slots)
    last: list[tuple[Lease, Words]] = []
    num_wrong = 0

    def use(record: Enqueued) -> None:
        nonlocal num_wrong
        lease = ring.accept(record, STREAM)
        words = copy_at(lease.address, lease.size_bytes)
        num_wrong += not _is_whole(words)
        while last:
            last.pop()[0].release()
        last.append((lease, words))

    result = Party(peers, [(other, end, ring)]).go_on(lambda: _receive(peers[other], ring, use))
    lease, words = last.pop()
    is_kept_whole = bool(np.array_equal(copy_at(lease.address, lease.size_bytes), words))
    lease.release()
    _close_receiver(peers[other], end, ring)
    more = {"num_wrong": num_wrong, "is_kept_whole": is_kept_whole}
    return {**result, **more, "held": end.held(), "grown": counts_more(before)}


def survives_sending(peers: dict[int, Peer], other: int, num_slots: int) -> dict[str, Any]:
    before = footprint(os.getpid())
    end, ring = open_sender(peers[other], num_slots)
    result = Party(peers, [(other, end, ring)]).go_on(lambda: _send_many(peers[other], ring))
    _close_sender(end, ring)
    return {**result, "held": end.held(), "grown": counts_more(before)}


def waits_for_the_dead(peers: dict[int, Peer], other: int) -> dict[str, Any]:
    """Waits for a signal that the other process would have set."""
    end, ring = open_receiver(peers[other], 2)
    party = Party(peers, [(other, end, ring)])

    def order_death() -> None:
        until(lambda: not end.driver.is_idle(STREAM), "the wait")
        peers[other].put("die")

    thread = Thread(target=order_death)
    thread.start()
    begin = calm_s()
    ring.accept(Enqueued(0, 1, 8), STREAM).release()  # a breach of PL-5: nothing was enqueued
    taken_s = calm_s() - begin
    thread.join()
    until(lambda: bool(party.reports), "the report")
    party.close()
    _close_receiver(peers[other], end, ring)
    return {"taken_s": taken_s, "waited_for": party.reports[0].waited_for, "held": end.held()}


def dies_when_told(peers: dict[int, Peer], other: int) -> None:
    open_sender(peers[other], 2)
    peers[other].get()
    die()


def sources(peers: dict[int, Peer], num_slots: int, victim: int, seed: int) -> dict[str, Any]:
    """Sends value after value until it is killed, or another one is."""
    before = footprint(os.getpid())
    end, ring = open_sender(peers[1], num_slots)
    party = Party(peers, [(1, end, ring)])

    def work() -> None:
        send(peers[1], ring, value(0, 5))
        if victim == 0:
            peers[2].get()
            die_after(seed)
        _send_many(peers[1], ring)

    result = party.go_on(work)
    _close_sender(end, ring)
    _meet(peers, victim)
    return {**result, "num_wrong": 0, "held": end.held(), "grown": counts_more(before)}


def relays(peers: dict[int, Peer], num_slots: int, victim: int, seed: int) -> dict[str, Any]:
    """Hands every value on from the slot in which it came, one more in each word."""
    before = footprint(os.getpid())
    end_in, ring_in = open_receiver(peers[0], num_slots)
    end_out, ring_out = open_sender(peers[2], num_slots)
    party = Party(peers, [(0, end_in, ring_in), (2, end_out, ring_out)])

    def use(record: Enqueued) -> None:
        lease = ring_in.accept(record, STREAM)
        words = copy_at(lease.address, lease.size_bytes) + 1
        lease.release()
        send(peers[2], ring_out, words)
        if victim == 1 and len(words) == 5:
            peers[2].get()
            die_after(seed)

    result = party.go_on(lambda: _receive(peers[0], ring_in, use))
    _close_sender(end_out, ring_out)
    _close_receiver(peers[0], end_in, ring_in)
    held = [*end_in.held(), *end_out.held()]
    _meet(peers, victim)
    return {**result, "num_wrong": 0, "held": held, "grown": counts_more(before)}


def sinks(peers: dict[int, Peer], num_slots: int, victim: int, seed: int) -> dict[str, Any]:
    """Publishes every value for which its check finds nobody dead."""
    before = footprint(os.getpid())
    end, ring = open_receiver(peers[1], num_slots)
    party = Party(peers, [(1, end, ring)])
    num_wrong = num_published = 0

    def use(record: Enqueued) -> None:
        nonlocal num_wrong, num_published
        lease = ring.accept(record, STREAM)
        words = copy_at(lease.address, lease.size_bytes) - 1
        lease.release()
        if party.alive.check():
            return
        num_published += 1
        num_wrong += not _is_whole(words)
        if num_published == 1:
            die_after(seed) if victim == 2 else peers[victim].put("go")

    result = party.go_on(lambda: _receive(peers[1], ring, use))
    _close_receiver(peers[1], end, ring)
    assert num_published > 0
    _meet(peers, victim)
    return {**result, "num_wrong": num_wrong, "held": end.held(), "grown": counts_more(before)}


def _meet(peers: dict[int, Peer], victim: int) -> None:
    """Nobody ends, which would be one more death, before all who live have heard of the first one."""
    for number, peer in peers.items():
        if number != victim:
            peer.meet()


# Rubbish, on its way through a process whose stream was given everything beforehand

NUM_WORDS = 1000


def dies_before_it_copies(peers: dict[int, Peer]) -> None:
    """Tells of a value, as a host that runs ahead of its device does, and dies before the device has come to it."""
    _, ring = open_sender(peers[1], 1)
    peers[1].drain(ring.on_record)
    peers[1].tell(Enqueued(0, 0, NUM_WORDS * 8))
    peers[1].get()
    die()


def relays_ahead(peers: dict[int, Peer]) -> dict[str, Any]:
    """Gives its stream the wait for the value, and its copy to the next process, then tells of it. The stream, a capture that is
    launched in this thread, does nothing before the launch and stands still in the wait.
    """
    end_in, ring_in = open_receiver(peers[0], 1, NUM_WORDS * 8)
    end_out, ring_out = open_sender(peers[2], 1)
    driver = end_in.driver
    ring_out.on_record(peers[2].take())
    record = peers[0].take()
    assert isinstance(record, Enqueued)
    out = end_out.driver
    driver.begin_capture(STREAM)
    lease = ring_in.accept(record, STREAM)
    waits = driver.end_capture(STREAM)
    out.begin_capture(STREAM)
    assert ring_out.try_send(lease.address, lease.size_bytes)  # the record goes out here
    copies = out.end_capture(STREAM)
    party = Party(peers, [(0, end_in, ring_in), (2, end_out, ring_out)])
    peers[0].put("die")
    driver.launch(waits, STREAM)
    is_told = list(party.broken_off)
    out.launch(copies, STREAM)
    until(lambda: bool(party.reports), "the report")
    peers[2].get()
    party.close()
    lease.release()
    driver.destroy_graph(waits)
    out.destroy_graph(copies)
    _close_sender(end_out, ring_out)
    _close_receiver(peers[0], end_in, ring_in)
    held = [*end_in.held(), *end_out.held()]
    return {"is_told": is_told, "waited_for": party.reports[0].waited_for, "held": held}


def sinks_rubbish(peers: dict[int, Peer]) -> dict[str, Any]:
    """Takes what comes, with nothing but its check to tell it what it is."""
    end, ring = open_receiver(peers[1], 1, NUM_WORDS * 8)
    pidfds = [open_pidfd(peers[number].pid) for number in (0, 1)]
    alive = Alive({peers[number].name: pidfd for number, pidfd in enumerate(pidfds)})
    record = peers[1].take()
    assert isinstance(record, Enqueued)
    lease = ring.accept(record, STREAM)  # waits here, for a full that is correct
    words = copy_at(lease.address, lease.size_bytes)
    dead = alive.check()
    lease.release()
    alive.close()
    peers[1].put("done")
    ring.give_up("worker 0 died")
    _close_receiver(peers[1], end, ring)
    for pidfd in pidfds:
        os.close(pidfd)
    return {"dead": dead, "is_rubbish": not np.array_equal(words, value(0, NUM_WORDS)), "held": end.held()}
