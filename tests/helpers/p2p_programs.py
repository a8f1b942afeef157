"""Random programs of `crossfade.p2p`, and what all its cases open."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from crossfade.p2p import P2P, Work
from tests.helpers.ranks import Case

_SIZES = (0, 1, 7, 1000, 5000, 70_000, 300_000)
_DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.uint8)


class Message(NamedTuple):
    src: int
    dst: int
    tag: int
    number: int  # what its bytes are made of
    size: int
    dtype: torch.dtype

    def value(self, device: str) -> torch.Tensor:
        """The same on the sender and on the receiver."""
        generator = torch.Generator().manual_seed(self.number)
        raw = torch.randint(0, 2 if self.dtype == torch.bool else 100, (self.size,), generator=generator)
        return raw.to(self.dtype).to(device)


class Way:
    """How cases open communicators."""

    transport = "auto"
    waits = "host"


@contextmanager
def opened(device: str, **options: Any) -> Iterator[P2P]:
    p2p = P2P(device=device, transport=Way.transport, waits=Way.waits, **{"timeout_s": 20.0, **options})
    yield p2p
    p2p.close()


def over(transport: str, case: Case, device: str) -> None:
    """A case over a transport."""
    Way.transport = transport
    try:
        case(device)
    finally:
        Way.transport = "auto"


def ahead(case: Case, device: str) -> None:
    """A case whose streams wait ahead."""
    Way.waits = "stream"
    try:
        case(device)
    finally:
        Way.waits = "host"


def world_of_ranks() -> tuple[int, int]:
    return dist.get_rank(), dist.get_world_size()


def random_program(seed: int, device: str, *, buffer_bytes: int | None = None, most: int = 14) -> None:
    """Messages between all ranks, begun by each in an order of its own, in steps: each rank waits for all of a step at its end."""
    rank, num_ranks = world_of_ranks()
    shared, own = random.Random(seed), random.Random(seed * 31 + rank)
    limit = shared.choice([1 << 12, 1 << 20, 1 << 28]) if buffer_bytes is None else buffer_bytes
    with opened(device, buffer_bytes=limit) as p2p:
        for step in range(shared.randint(1, 3)):
            messages = [
                Message(
                    shared.randrange(num_ranks),
                    shared.randrange(num_ranks),
                    shared.randint(-1, 2),
                    seed * 1000 + step * 100 + number,
                    shared.choice(_SIZES),
                    shared.choice(_DTYPES),
                )
                for number in range(shared.randint(1, most))
            ]
            _do_step(p2p, device, messages, own)


def _do_step(p2p: P2P, device: str, messages: list[Message], own: random.Random) -> None:
    """The order of a rank's calls with one partner and tag is the order of the messages; else it is any."""
    queues: dict[tuple[str, int, int], list[Message]] = {}
    for message in messages:
        if message.src == p2p.rank:
            queues.setdefault(("send", message.dst, message.tag), []).append(message)
        if message.dst == p2p.rank:
            queues.setdefault(("receive", message.src, message.tag), []).append(message)
    works: list[Work] = []
    got: list[tuple[Message, torch.Tensor]] = []
    while queues:
        key = own.choice(list(queues))
        message = queues[key].pop(0)
        if not queues[key]:
            del queues[key]
        if key[0] == "send":
            value = message.value(device)
            if own.random() < 0.3:
                value = p2p.empty(message.size, dtype=message.dtype).copy_(value)
            works.append(p2p.isend(value, message.dst, message.tag))
            continue
        target = torch.empty(message.size, dtype=message.dtype, device=device)
        if own.random() < 0.5:
            target = p2p.empty(message.size, dtype=message.dtype)
        elif own.random() < 0.3:
            target = torch.empty(2 * message.size, dtype=message.dtype, device=device)[::2]
        works.append(p2p.irecv(target, message.src, message.tag))
        got.append((message, target))
    own.shuffle(works)
    for work in works:
        work.wait()
    for message, tensor in got:
        assert torch.equal(tensor, message.value(device)), f"rank {p2p.rank}: {message}"


def many_random_programs(first: int, num: int, device: str) -> None:
    for seed in range(first, first + num):
        random_program(seed, device)
