"""What each party does in the tests of collectives of device tensors, between processes, and what it must get by plain torch."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch

from crossfade.collectives.end import GroupCollective
from crossfade.collectives.opening import open_group
from crossfade.collectives.terms import Offer, Terms, reference
from crossfade.device.context import DeviceContext
from crossfade.errors import Failure
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.memory import Memory
from crossfade.types import CollectiveKind, ReduceOp, Transport
from tests.helpers.device_pair import Peer

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MOVED = (*FLOATS, *WHOLE, torch.bool, torch.complex64)
Peers = Mapping[int, Peer]


def name(rank: int) -> str:
    return f"A{rank}"


def names(num_parties: int) -> tuple[str, ...]:
    return tuple(map(name, range(num_parties)))


class Ring:
    """The doorbell of this process, and those of the others."""

    def __init__(self, peers: Peers, rank: int) -> None:
        self.doorbell = Doorbell(*Doorbell.create_fds(name(rank)))
        self.bells: dict[str, Bell] = {name(rank): self.doorbell.bell()}
        for other, peer in sorted(peers.items()):
            for fd in (self.doorbell.memory_fd, self.doorbell.event_fd):
                send_handle(peer._objects, fd, peer.pid)
            memory_fd, event_fd = (recv_handle(peer._objects) for _ in range(2))
            self.bells[name(other)] = Bell(Memory(memory_fd), event_fd)

    def close(self) -> None:
        for bell in self.bells.values():
            bell.close()
        self.doorbell.close()


def shared_store(peers: Peers, rank: int) -> Memory:
    """One memory for all, made by rank 0."""
    if rank:
        return Memory(recv_handle(peers[0]._objects))
    store = Memory.create("store", 0)
    for peer in peers.values():
        send_handle(peer._objects, store.fd, peer.pid)
    return store


class Party:
    """One party of a group.

    Args:
        peers: the other workers.
        ring: the doorbells.
        rank: of this one.
        all_terms: of the group's collectives.
        home: its device; None for the CPU.
        number: of the group.
        transport: moves the tensors; `transport` of this class if it is None.
        options: of `open_group`.
    """

    transport = Transport.COPY

    def __init__(
        self,
        peers: Peers,
        ring: Ring,
        rank: int,
        all_terms: Sequence[Terms],
        home: DeviceContext | None = None,
        *,
        number: int = 0,
        transport: Transport | None = None,
        **options: Any,
    ) -> None:
        self.me = name(rank)
        self._doorbell = ring.doorbell
        store, parties = shared_store(peers, rank), names(len(peers) + 1)
        self.group = open_group(
            transport or Party.transport, store, number, parties, self.me, ring.bells, all_terms, home, **options
        )
        self.ends = [
            GroupCollective(self.group, terms, k, terms.parties.index(self.me), 1) for k, terms in enumerate(all_terms)
        ]

    def finish(self, end: GroupCollective, timeout_s: float = 20.0) -> Sequence[Any]:
        """What comes out of what was started."""
        found: list[Sequence[Any]] = []

        def ready() -> bool:
            result = end.try_finish()
            if result is not None:
                found.append(result)
            return bool(found)

        if not self._doorbell.wait_until(ready, timeout_s, end.is_idle):
            raise TimeoutError(f"nothing comes out of {end.terms.label}")
        return found[0]

    def do(self, number: int, values: Sequence[object]) -> Sequence[Any]:
        """Starts one and waits for what comes out."""
        self.ends[number].start(values)
        return self.finish(self.ends[number])

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.group.ask_to_end()
        self.group.close(time.monotonic() + 10.0)


@contextmanager
def joined(peers: Peers, rank: int, all_terms: Sequence[Terms], *args: Any, **options: Any) -> Iterator[Party]:
    """The only group of some workers."""
    ring = Ring(peers, rank)
    party = Party(peers, ring, rank, all_terms, *args, **options)
    yield party
    party.close()
    ring.close()


# What is done: random all_terms, and random tensors for each of them


def draw_terms(draw: random.Random, number: int, num_parties: int) -> Terms:
    """One of every kind, with ranks in any order."""
    kind = draw.choice(list(CollectiveKind))
    op = draw.choice(list(ReduceOp)) if kind.reduces else None
    parties = list(names(num_parties))
    if draw.random() < 0.5:
        draw.shuffle(parties)
    root = draw.randrange(num_parties) if kind is CollectiveKind.BROADCAST else 0
    return Terms(f"c{number}", kind, op, root, tuple(parties))


Layout = tuple[torch.dtype, tuple[int, ...]]


def draw_layouts(draw: random.Random, terms: Terms) -> list[Layout]:
    """What everybody brings, in one execution."""
    dtypes = MOVED if terms.op is None else FLOATS if terms.op is ReduceOp.AVG else FLOATS + WHOLE
    num = draw.choice((1, 1, 3, 7)) if terms.kind is CollectiveKind.ALLREDUCE else 1
    layouts = []
    for _ in range(num):
        first = draw.choice((0, 1, 2, 5, 13, 100, draw.randrange(3000), draw.randrange(40_000)))
        shape: tuple[int, ...] = (first, *draw.choice(((), (1,), (3,), (2, 2))))
        if terms.kind is CollectiveKind.REDUCESCATTER:
            shape = (len(terms.parties) * shape[0], *shape[1:])
        elif terms.kind in (CollectiveKind.ALLREDUCE, CollectiveKind.BROADCAST) and draw.random() < 0.1:
            shape = ()
        layouts.append((draw.choice(dtypes), shape))
    return layouts


def make(dtype: torch.dtype, shape: Sequence[int], seed: int) -> torch.Tensor:
    """A tensor of small numbers: sums of a few are exact in every dtype, and so are products."""
    generator = torch.Generator().manual_seed(seed)
    low = 0 if dtype in (torch.uint8, torch.bool) else -2
    return torch.randint(low, 2 if dtype is torch.bool else 3, tuple(shape), generator=generator).to(dtype)


def make_all(terms: Terms, layouts: Sequence[Layout], seed: int) -> list[list[torch.Tensor]]:
    """What each rank brings; who only receives brings nothing."""
    is_broadcast = terms.kind is CollectiveKind.BROADCAST
    return [
        []
        if is_broadcast and rank != terms.root
        else [make(dtype, shape, 1000 * seed + 10 * rank + k) for k, (dtype, shape) in enumerate(layouts)]
        for rank in range(len(terms.parties))
    ]


def same(found: Sequence[Any], wanted: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        isinstance(a, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.cpu(), b)
        for a, b in zip(found, wanted, strict=True)
    )


def random_calls(
    party: Party, all_terms: Sequence[Terms], seed: int, num_rounds: int, device: str = "cpu"
) -> list[str]:
    """Rounds in which every collective is started, in order, some together, with tensors of new shapes; says what was wrong."""
    draw, wrong = random.Random(seed), []
    for round_ in range(num_rounds):
        bring = []
        for k, terms in enumerate(all_terms):
            layouts = draw_layouts(draw, terms)
            bring.append((layouts, make_all(terms, layouts, 97 * seed + 13 * round_ + k)))
        num_ahead = draw.choice((1, len(all_terms)))
        for begin in range(0, len(all_terms), num_ahead):
            block = range(begin, min(begin + num_ahead, len(all_terms)))
            for k in block:
                rank = all_terms[k].parties.index(party.me)
                party.ends[k].start([_strided(t.to(device), seed + k) for t in bring[k][1][rank]])
            for k in block:
                found = party.finish(party.ends[k])
                rank = all_terms[k].parties.index(party.me)
                wanted = reference(all_terms[k], [Offer(tuple(each)) for each in bring[k][1]])[rank]
                if not same(found, wanted):
                    wrong.append(f"round {round_}, {all_terms[k]} of {bring[k][0]}: {found} and not {wanted}"[:500])
    return wrong


def _strided(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Some tensors with gaps."""
    if seed % 3 or not tensor.dim():
        return tensor
    return tensor.repeat_interleave(2, dim=0)[::2]


def failure_of(values: Sequence[Any]) -> BaseException:
    """The error that came out in the place of tensors."""
    (failure,) = values
    assert isinstance(failure, Failure), failure
    return failure.to_error()
