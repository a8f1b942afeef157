"""How parties meet, in a store of torch's and a group of gloo: each shows the others that it holds the key before a value is read.

torch's gloo accepts any process that connects to its port and says the right small number, and values are pickles. The group's key
is random and lies in the store, memory that only the parties hold. Between each two parties, over messages of fixed size:

- each sends a nonce of 32 bytes,
- each answers with HMAC-SHA256 of the key over (its own rank, the other's rank, the other's nonce, its own nonce).

The ranks keep an answer from serving for another pair, or for the party that asked. The kernel keeps a connection that was proved
from being taken over afterwards.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from crossfade.errors import ChannelError
from crossfade.host.bulletin import Bulletin
from crossfade.host.memory import Memory

_FileStore: Any = dist.FileStore  # type: ignore[attr-defined]
_PrefixStore: Any = dist.PrefixStore  # type: ignore[attr-defined]
_Store: Any = dist.Store  # type: ignore[attr-defined]
LOOPBACK = "127.0.0.1"

KEY_BYTES = 32
NONCE_BYTES = 32
PROOF_TAG = 0xC0FB
TIME_LIMIT_S = 20.0
MEET_S = 60.0
"""How long parties wait for each other in a store."""


class _BulletinStore(_Store):  # type: ignore[misc]
    """torch's store, whose values the parties of a `Bulletin` tell each other. It raises a ConnectionError or a TimeoutError. It
    has to outlive what torch makes with it, which refers to torch's part of it only.
    """

    def __init__(self, bulletin: Bulletin, prefix: str) -> None:
        super().__init__()
        self._bulletin = bulletin
        self._prefix = prefix

    def set(self, key: str, value: bytes | str) -> None:
        self._bulletin.put(self._prefix + key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._bulletin.get(self._prefix + key, MEET_S)

    def check(self, keys: list[str]) -> bool:
        return self._bulletin.has(self._prefix + key for key in keys)

    def wait(self, keys: list[str], timeout: object = None) -> None:
        for key in keys:
            self.get(key)

    def set_timeout(self, timeout: object) -> None:
        """Nothing: it is always the same."""


def store_in(place: Memory | Bulletin, prefix: str) -> Any:
    """torch's store for parties that meet in memory that all of them see, or over a bulletin; keys have this prefix there."""
    return _BulletinStore(place, prefix) if isinstance(place, Bulletin) else _PrefixStore(prefix, file_store(place))


def file_store(memory: Memory, num_parties: int = -1) -> Any:
    """torch's store in memory that all parties see. It opens a path once more in its destructor: the memory has to outlive it."""
    store = _FileStore(f"/proc/self/fd/{memory.fd}", num_parties)
    store.set_timeout(datetime.timedelta(seconds=MEET_S))
    return store


def open_gloo(store: Any, key: bytes, parties: Sequence[str], me: int, address: str = LOOPBACK) -> Any:
    """A process group of gloo, which listens at this address of the host, and whose members have proved to each other that they
    hold the key. Raises a `ChannelError` if they could not connect.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = datetime.timedelta(days=365)
    try:
        group: Any = dist.ProcessGroupGloo(store, me, len(parties), options)
        prove_all(group, key, parties, me)
    except RuntimeError as error:
        raise ChannelError(f"{parties[me]} could not join the gloo group of {', '.join(parties)}: {error}") from error
    return group


def shared_key(store: Any) -> bytes:
    """The group's key: the first party to ask puts it into the store."""
    if store.add("crossfade/turn", 1) == 1:
        store.set("crossfade/key", os.urandom(KEY_BYTES).hex())
    return bytes.fromhex(store.get("crossfade/key").decode())


def answer(key: bytes, me: int, peer: int, peer_nonce: bytes, my_nonce: bytes) -> bytes:
    """What the party of rank ``me`` answers to ``peer``'s nonce."""
    said = b"crossfade gloo" + me.to_bytes(4, "little") + peer.to_bytes(4, "little") + peer_nonce + my_nonce
    return hmac.digest(key, said, hashlib.sha256)


def prove_all(group: Any, key: bytes, parties: Sequence[str], me: int) -> None:
    """Proves this party to all others, and has them prove themselves, all at once. Raises a `ChannelError` if one of them has
    another key, or did not answer within `TIME_LIMIT_S`.
    """
    deadline = time.monotonic() + TIME_LIMIT_S
    others = [rank for rank in range(len(parties)) if rank != me]
    nonces = {rank: os.urandom(NONCE_BYTES) for rank in others}
    their_nonces = _exchange(group, nonces, parties, deadline)
    answers = {rank: answer(key, me, rank, their_nonces[rank], nonces[rank]) for rank in others}
    for rank, theirs in _exchange(group, answers, parties, deadline).items():
        if not hmac.compare_digest(theirs, answer(key, rank, me, nonces[rank], their_nonces[rank])):
            raise ChannelError(
                f"whoever connected to {parties[me]} over gloo as {parties[rank]} does not hold the group's key",
                hint="another process of this machine connects to the ports of gloo; its values were not read",
            )


def _exchange(group: Any, messages: dict[int, bytes], parties: Sequence[str], deadline: float) -> dict[int, bytes]:
    """Sends each party its message, and gets one of the same size from each."""
    works, incoming = {}, {}
    for rank, message in messages.items():
        incoming[rank] = torch.empty(len(message), dtype=torch.uint8, device="cpu")
        outgoing = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        works[rank] = (
            group.recv([incoming[rank]], rank, PROOF_TAG),
            group.send([outgoing], rank, PROOF_TAG),
            outgoing,
        )
    for rank, (receiving, sending, _) in works.items():
        for work in (receiving, sending):
            left_s = max(0.001, deadline - time.monotonic())
            try:
                work.wait(datetime.timedelta(seconds=left_s))
            except RuntimeError as error:
                raise ChannelError(
                    f"{parties[rank]} did not prove over gloo that it holds the group's key: {error}"
                ) from error
    return {rank: bytes(tensor.tolist()) for rank, tensor in incoming.items()}
