"""How the parties of a group find each other, before they have a table.

They meet in the store, memory that their driver gave to them alone, and publish there which descriptor of which process is their
part of the table, and a random key that lies in it (`Memory.open_in`). Parties of several hosts meet over a `Bulletin`, and tell
each other what changes in the parts. All publish how each step went, so that all have a group or
none has.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from crossfade.channels.gloo_proof import LOOPBACK, MEET_S, store_in
from crossfade.collectives.table import Part, RendezvousTable, part_bytes
from crossfade.errors import ChannelError
from crossfade.host.bulletin import Bulletin
from crossfade.host.memory import Memory

_LOOK_S = 0.001


class Rendezvous:
    """The place where the parties of one group publish values for each other, step by step.

    Owns ``place`` if it is memory, which all of them see; ``number`` tells the groups of a plan apart; ``parties`` has the same
    order everywhere. ``store`` is torch's view of it, for movers that need one, and keep it.
    """

    def __init__(self, place: Memory | Bulletin, number: int, parties: Sequence[str], me: str) -> None:
        self.parties = tuple(parties)
        self.me = me
        self.rank = self.parties.index(me)
        self._place = place
        self._topic = f"table {number}"
        self.bulletin = place if isinstance(place, Bulletin) else None
        self.store: Any = store_in(place, f"group {number}")

    @property
    def address(self) -> str:
        """The address of this host at which the others connect to what movers open."""
        return LOOPBACK if self.bulletin is None else self.bulletin.address

    @contextmanager
    def reporting(self, step: str) -> Iterator[None]:
        """Publishes an error that is raised in here, in the place of the step's value."""
        try:
            yield
        except Exception as error:
            self.publish(step, None, str(error) or type(error).__name__)
            raise

    def publish(self, step: str, value: object, error: str = "") -> None:
        """Publishes this party's value of a step."""
        self.store.set(f"{step} {self.rank}", json.dumps([error, value]))

    def gather(self, step: str) -> list[Any]:
        """The values of all parties, by rank; waits for them. Raises a `ChannelError` if a party could not continue, or did not
        come.
        """
        values = []
        for rank, party in enumerate(self.parties):
            key, deadline = f"{step} {rank}", time.monotonic() + MEET_S
            while not self.store.check([key]):  # its own wait looks every 10 ms only
                if time.monotonic() > deadline:
                    raise ChannelError(
                        f"{party} did not come to the group of {', '.join(self.parties)} within {MEET_S:.0f} s"
                    )
                time.sleep(_LOOK_S)
            error, value = json.loads(self.store.get(key))
            if error:
                raise ChannelError(f"{party} cannot take part in a collective: {error}")
            values.append(value)
        return values

    def create_part(self, signal_bytes: int, num_slots: int) -> Part:
        """This party's part of a table."""
        return Part.create(f"table-{self.me}", secrets.token_bytes(Part.KEY_BYTES), signal_bytes, num_slots)

    @staticmethod
    def address_of(part: Part) -> tuple[int, int, str]:
        """Process, descriptor and key, by which the others open a part."""
        return os.getpid(), part.memory.fd, part.key.hex()

    def open_table(
        self, own: Part, addresses: Sequence[tuple[int, int, str]], signal_bytes: int, num_slots: int
    ) -> RendezvousTable:
        """The table of all parts; ``own`` is closed with it."""
        if self.bulletin is not None:
            return self._far_table(self.bulletin, own, signal_bytes, num_slots)
        parts: list[Part] = []
        try:
            for rank, (pid, fd, key) in enumerate(addresses):
                parts.append(own if rank == self.rank else self._open(rank, pid, fd, key, signal_bytes, num_slots))
        except BaseException:
            for part in parts:
                part.close()
            raise
        return RendezvousTable(parts, self.rank)

    def _far_table(self, bulletin: Bulletin, own: Part, signal_bytes: int, num_slots: int) -> RendezvousTable:
        parts = [
            own if rank == self.rank else Part.create(f"table-{party}", bytes(Part.KEY_BYTES), signal_bytes, num_slots)
            for rank, party in enumerate(self.parties)
        ]
        table = RendezvousTable(parts, self.rank, partial(bulletin.tell, self._topic))
        bulletin.listen(self._topic, lambda party, news: table.hear(self.parties.index(party), news))
        return table

    def _open(self, rank: int, pid: int, fd: int, key: str, signal_bytes: int, num_slots: int) -> Part:
        try:
            size_bytes = part_bytes(signal_bytes, num_slots)
            memory = Memory.open_in(pid, fd, size_bytes, bytes.fromhex(key), Part.KEY_AT)
            try:
                return Part(memory, signal_bytes, num_slots)
            except BaseException:
                memory.close()
                raise
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ChannelError(
                f"the table of {self.parties[rank]} in process {pid} cannot be opened: {reason}",
                hint="the actors must run as one user and see each other's process ids",
            ) from None

    def close(self) -> None:
        """The group does not meet here any more. (torch opens a file store's path once more when it destroys the store.)"""
        self.store = None
        if isinstance(self._place, Memory):
            self._place.close()
