"""How the connections between a plan's parties on different hosts are made: wires, which nobody waits for, since what is sent
before is kept, and those of bulletins.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeAlias

from crossfade.channels.wire import Wire
from crossfade.engines.board import told_peers, wired_peers
from crossfade.engines.control import Addresses
from crossfade.host.bulletin import Bulletin
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.tcp import Meeting, Stream, meet
from crossfade.plan.plan import Plan

_CONNECT_S = 20.0
_BULLETIN = "\0"
"""With this before its name whoever connects says that it is for its bulletin. No actor's name begins so."""

Taker: TypeAlias = Callable[[Stream], None]


class Rendezvous:
    """Where peers connect to one party of a plan."""

    def __init__(self, address: str, key: bytes) -> None:
        self._lock = threading.Lock()
        self._takers: dict[str, Taker] = {}  # of those who have not come, by what they say
        self._come: dict[str, Stream] = {}  # those whose taker is not there yet
        self._meeting = Meeting(address, key, self._on_come)
        self.port = self._meeting.port

    def _on_come(self, name: str, stream: Stream) -> bool:
        with self._lock:
            taker = self._takers.pop(name, None)
            if taker is None:
                if name in self._come:
                    return False
                self._come[name] = stream
                return True
        taker(stream)
        return True

    def expect(self, name: str, taker: Taker) -> None:
        """Somebody connects here who says this, or has done so: ``taker`` gets the stream."""
        with self._lock:
            stream = self._come.pop(name, None)
            if stream is None:
                self._takers[name] = taker
                return
        taker(stream)

    def close(self) -> None:
        """Nobody is let in any more. Idempotent."""
        self._meeting.close()
        with self._lock:
            while self._come:
                self._come.popitem()[1].close()


def listeners(plan: Plan) -> list[str]:
    """The parties to which others connect."""
    peers = {party: (*wired_peers(plan, party), *told_peers(plan, party)) for party in plan.programs}
    return [party for party in peers if any(party < peer for peer in peers[party])]


def open_wires(
    plan: Plan,
    party: str,
    bell: Bell,
    doorbell: Doorbell,
    addresses: Addresses | None,
    rendezvous: Rendezvous | None,
) -> Mapping[str, Wire]:
    """A party's wires, by peer. They connect in the background; one that cannot has a fault."""
    wires = {peer: Wire(bell, doorbell, peer, plan.host_of(peer)) for peer in wired_peers(plan, party)}
    for peer, wire in wires.items():
        _join(party, peer, "", wire.connect, wire.break_off, addresses, rendezvous)
    return wires


def open_bulletin(
    plan: Plan,
    party: str,
    addresses: Addresses | None,
    rendezvous: Rendezvous | None,
) -> Bulletin | None:
    """A party's bulletin, if it has collectives or NCCL edges with parties of other hosts. It connects in the background."""
    peers = told_peers(plan, party)
    if not peers or addresses is None:
        return None
    bulletin = Bulletin(party, addresses.of_host[plan.host_of(party)], peers)
    for peer in peers:
        take, fail = partial(bulletin.connect, peer), partial(bulletin.lose, peer)
        _join(party, peer, _BULLETIN, take, fail, addresses, rendezvous)
    return bulletin


def _join(
    party: str,
    peer: str,
    what: str,  # before the name
    taker: Taker,
    fail: Callable[[str], None],
    addresses: Addresses | None,
    rendezvous: Rendezvous | None,
) -> None:
    """Of two parties the one whose name comes first lets the other connect."""
    if party < peer and rendezvous is not None:
        rendezvous.expect(what + peer, taker)
    elif addresses is not None:
        arguments = (what + party, *addresses.of[peer], addresses.key, taker, fail)
        threading.Thread(target=_connect, args=arguments, name="crossfade-connect", daemon=True).start()


def _connect(name: str, address: str, port: int, key: bytes, taker: Taker, fail: Callable[[str], None]) -> None:
    try:
        stream = meet(address, port, key, name, _CONNECT_S)
    except (OSError, EOFError) as error:
        fail(f"it could not be opened: {error}")
    else:
        taker(stream)
