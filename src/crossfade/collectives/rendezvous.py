"""How the parties of collectives of device tensors find each other.

They meet in the store, memory that their driver gave to them and to nobody else, and tell each other there which descriptor of
which process is their part of the table. The others open it under /proc, which the kernel allows to processes of the same user, and
look whether it is what was told of: memory that cannot shrink, with a random key in it. All tell how each step went, so that
all have a group or none has.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from crossfade.collectives.table import Part, Table, part_bytes
from crossfade.errors import ChannelError
from crossfade.host.memory import Memory

__all__ = ["Place"]

_FileStore: Any = dist.FileStore  # type: ignore[attr-defined]
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]
_MEET_S = 60.0
_KEY_BITS = 63


class Place:
    """Where the parties of one group tell each other things.

    Args:
        store: memory that all of them see; owned by this object from now on.
        number: of the group, among those of the plan.
        parties: everybody's name, in the same order everywhere.
        me: this party's.

    Attributes:
        rank: this party's place among them.
        store: torch's store for what needs one.
    """

    def __init__(self, store: Memory, number: int, parties: Sequence[str], me: str) -> None:
        self.parties = tuple(parties)
        self.rank = self.parties.index(me)
        self._memory = store
        file_store = _FileStore(f"/proc/self/fd/{store.fd}", -1)
        file_store.set_timeout(datetime.timedelta(seconds=_MEET_S))
        self.store: Any = _PrefixStore(f"device group {number}", file_store)

    @contextmanager
    def reporting(self, step: str) -> Iterator[None]:
        """What fails in here is told to all in the place of what they wait for."""
        try:
            yield
        except Exception as error:
            self.tell(step, None, str(error) or type(error).__name__)
            raise

    def tell(self, step: str, said: object, error: str = "") -> None:
        """Tells all."""
        self.store.set(f"{step} {self.rank}", json.dumps([error, said]))

    def hear(self, step: str) -> list[Any]:
        """What all tell, by rank.

        Raises:
            ChannelError: somebody could not go on, or did not come.
        """
        heard = []
        for rank, party in enumerate(self.parties):
            try:
                error, said = json.loads(self.store.get(f"{step} {rank}"))
            except RuntimeError as failed:
                raise ChannelError(
                    f"{party} did not come to the group of {', '.join(self.parties)}: {failed}"
                ) from None
            if error:
                raise ChannelError(f"{party} cannot take part in a collective: {error}")
            heard.append(said)
        return heard

    def create_part(self, signal_bytes: int, num_slots: int) -> Part:
        """This party's part of a table."""
        return Part.create(f"table-{self.parties[self.rank]}", secrets.randbits(_KEY_BITS), signal_bytes, num_slots)

    @staticmethod
    def where(part: Part) -> list[int]:
        """What the others open it by."""
        return [os.getpid(), part.memory.fd, part.key]

    def open_table(self, own: Part, places: Sequence[Sequence[int]], signal_bytes: int, num_slots: int) -> Table:
        """The table of everybody's part."""
        parts: list[Part] = []
        try:
            for rank, (pid, fd, key) in enumerate(places):
                parts.append(own if rank == self.rank else self._open(rank, pid, fd, key, signal_bytes, num_slots))
        except BaseException:
            for part in parts:
                part.close()
            raise
        return Table(parts, self.rank)

    def _open(self, rank: int, pid: int, fd: int, key: int, signal_bytes: int, num_slots: int) -> Part:
        path = f"/proc/{pid}/fd/{fd}"
        try:
            if not os.readlink(path).startswith("/memfd:"):
                raise ValueError("its descriptor is something else by now")
            memory = Memory(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK))
            try:
                if not fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
                    raise ValueError("it could shrink")
                if memory.size_bytes < part_bytes(signal_bytes, num_slots):
                    raise ValueError("it is too short")
                part = Part(memory, signal_bytes, num_slots)
            except BaseException:
                memory.close()
                raise
            if part.key != key:
                part.close()
                raise ValueError("it is other memory by now")
            return part
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ChannelError(
                f"the table of {self.parties[rank]} in process {pid} cannot be opened: {reason}",
                hint="the actors must run as one user and see each other's process ids",
            ) from None

    def close(self) -> None:
        """Nobody meets here any more. (torch opens a file store's path once more when it lets go of it.)"""
        self.store = None
        self._memory.close()
