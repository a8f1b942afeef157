"""How the connections between a plan's parties on different hosts are made. Nobody waits for them: what is sent before is kept.

Of two parties the one whose name comes first lets the other connect.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from crossfade.channels.wire import Wire
from crossfade.engines.board import wired_peers
from crossfade.engines.control import Addresses
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.tcp import Meeting, Stream, meet
from crossfade.plan.plan import Plan

__all__ = ["Rendezvous", "listeners", "open_wires"]

_CONNECT_S = 20.0


class Rendezvous:
    """Where peers connect to one party of a plan."""

    def __init__(self, address: str, key: bytes) -> None:
        self._lock = threading.Lock()
        self._wires: dict[str, Wire] = {}  # by peer
        self._come: dict[str, Stream] = {}  # those whose wire is not there yet
        self._meeting = Meeting(address, key, self._on_come)
        self.port = self._meeting.port

    def _on_come(self, peer: str, stream: Stream) -> bool:
        with self._lock:
            wire = self._wires.pop(peer, None)
            if wire is None:
                if peer in self._come:
                    return False
                self._come[peer] = stream
                return True
        wire.connect(stream)
        return True

    def expect(self, wire: Wire) -> None:
        """A wire's peer connects here, or has done so."""
        with self._lock:
            stream = self._come.pop(wire.peer, None)
            if stream is None:
                self._wires[wire.peer] = wire
                return
        wire.connect(stream)

    def close(self) -> None:
        """Nobody is let in any more. Idempotent."""
        self._meeting.close()
        with self._lock:
            while self._come:
                self._come.popitem()[1].close()


def listeners(plan: Plan) -> list[str]:
    """The parties to which others connect."""
    return [party for party in plan.programs if any(party < peer for peer in wired_peers(plan, party))]


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
        if party < peer and rendezvous is not None:
            rendezvous.expect(wire)
        elif addresses is not None:
            arguments = (wire, *addresses.of[peer], addresses.key, party)
            threading.Thread(target=_connect, args=arguments, name="crossfade-connect", daemon=True).start()
    return wires


def _connect(wire: Wire, address: str, port: int, key: bytes, party: str) -> None:
    try:
        stream = meet(address, port, key, party, _CONNECT_S)
    except (OSError, EOFError) as error:
        wire.break_off(f"it could not be opened: {error}")
    else:
        wire.connect(stream)
