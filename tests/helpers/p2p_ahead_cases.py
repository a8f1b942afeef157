"""Cases of `crossfade.p2p` on GPUs whose streams wait for receives before the sends have begun."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossfade.errors import ChannelBroken, ChannelError, ChannelTimeout
from crossfade.p2p import P2P
from tests.helpers.p2p_cases import CASES as ALL
from tests.helpers.p2p_cases import RANDOM
from tests.helpers.p2p_programs import Way, ahead, over
from tests.helpers.ranks import Case

SIZE = 300_000


@contextmanager
def hosts() -> Iterator[Callable[[], None]]:
    """A barrier of the hosts alone."""
    group = dist.new_group(backend="gloo")
    yield partial(dist.barrier, group=group)
    dist.destroy_process_group(group)


@contextmanager
def opened(timeout_s: float = 20.0) -> Iterator[tuple[P2P, int, bool]]:
    """A communicator, this rank's partner, and whether this one receives."""
    rank = dist.get_rank()
    with P2P(device="cuda", transport=Way.transport, waits="stream", timeout_s=timeout_s) as p2p:
        yield p2p, rank ^ 1, rank % 2 == 0


def before_the_send(device: str) -> None:
    """The receiver's host goes on, and what its stream computes then is right; also behind ten of them, on two streams."""
    with hosts() as meet, opened() as (p2p, peer, is_receiver):
        values = [torch.full((SIZE,), float(k), device=device) for k in range(10)]
        assert (
            values[1].sum() / SIZE == 1
        )  # a kernel that is loaded while a stream waits for another rank would keep the host
        if is_receiver:
            targets = [torch.empty(SIZE, device=device) for _ in values]
            other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            sums = []
            for k, target in enumerate(targets):
                work = p2p.irecv(target, peer, tag=k)
                with torch.cuda.stream(other if k % 3 == 2 else torch.cuda.current_stream()):
                    work.wait()
                    sums.append(target.sum() / SIZE)
            meet()
            torch.cuda.synchronize()
            assert [float(each) for each in sums] == [float(k) for k in range(10)]
            assert p2p.statistics().num_ahead == 10
        else:
            meet()
            for k in (3, 0, 9, 1, 2, 8, 4, 7, 5, 6):
                p2p.isend(values[k], peer, tag=k)
        meet()
        p2p.check()


def in_turns(device: str) -> None:
    """A value goes there and back many times, with a computation on each side; long ones that are lent, among them."""
    with opened() as (p2p, peer, is_first):
        for size, num in ((SIZE, 40), (20 << 20, 4)):
            value = torch.zeros(size, device=device)
            for step in range(num):
                if is_first:
                    p2p.isend(value + 1, peer, tag=step).wait()
                    p2p.irecv(value, peer, tag=step).wait()
                else:
                    received = torch.empty_like(value)
                    p2p.irecv(received, peer, tag=step).wait()
                    p2p.isend(received * 1.0, peer, tag=step).wait()
            torch.cuda.synchronize()
            if is_first:
                assert value.eq(num).all()


def lengths_that_differ(device: str) -> None:
    """The stream is let go, and the next call tells."""
    with hosts() as meet, opened() as (p2p, peer, is_receiver):
        if is_receiver:
            p2p.irecv(torch.empty(SIZE, device=device), peer, tag=1).wait()
            meet()
            torch.cuda.synchronize()
            meet()
            for call in (p2p.check, partial(p2p.isend, torch.ones(1, device=device), peer)):
                with pytest.raises(ChannelError, match="met a transfer of 80 bytes: nothing was copied"):
                    call()
        else:
            meet()
            p2p.isend(torch.ones(20, device=device), peer, tag=1)
            meet()
        meet()


def too_long(device: str) -> None:
    """The stream is let go once the time is over, and the error says who waits for what."""
    with hosts() as meet, opened(1.0) as (p2p, peer, is_receiver):
        meet()
        if is_receiver:
            work = p2p.irecv(torch.empty(SIZE, device=device), peer, tag=33)
            work.wait()
            begin_s = time.monotonic()
            torch.cuda.synchronize()
            assert 0.5 < time.monotonic() - begin_s < 2.5
            with pytest.raises(ChannelTimeout, match=f"from rank {peer} with tag 33 .* has not met .* within 1 s"):
                p2p.check()
            assert isinstance(work.exception(), ChannelTimeout)
        meet()
        if not is_receiver:
            with pytest.raises(ChannelBroken, match="has closed its communicator"):
                p2p.isend(torch.ones(SIZE, device=device), peer, tag=33)


def closed_meanwhile(device: str) -> None:
    """A rank that closes lets the other one's stream go, whose own `close` tells if nothing has."""
    rank = dist.get_rank()
    with hosts() as meet:
        p2p = P2P(device="cuda", transport=Way.transport, waits="stream")
        if rank % 2:
            meet()
            p2p.close()
            return
        work = p2p.irecv(torch.empty(SIZE, device=device), rank ^ 1)
        work.wait()
        meet()
        for call in (p2p.close, p2p.check):
            with pytest.raises(ChannelBroken, match="has closed its communicator"):
                call()
        p2p.close()
        torch.cuda.synchronize()
        assert isinstance(work.exception(), ChannelBroken)


def behind_what_is_lent(device: str) -> None:
    """Values too long for cells, begun early, do not hold up those for which the other rank waits ahead."""
    with opened() as (p2p, peer, is_first):
        long, value = torch.full((20 << 20,), 3.0, device=device), torch.full((SIZE,), 5.0, device=device)
        if is_first:
            sent = p2p.isend(value, peer, tag=2)
            received = torch.empty(SIZE, device=device)
            p2p.irecv(received, peer, tag=5).wait()
            p2p.isend(long * received[0], peer, tag=1).wait()
            sent.wait()
        else:
            early, received = torch.empty_like(long), torch.empty_like(value)
            work = p2p.irecv(early, peer, tag=1)
            p2p.irecv(received, peer, tag=2).wait()
            p2p.isend(received + 1, peer, tag=5).wait()
            work.wait()
            assert early.eq(18.0).all()
        torch.cuda.synchronize()


def long_ones_in_any_order(device: str) -> None:
    """Long values that two streams compute for long, into tensors of two streams, received and used in any order."""
    orders = ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 0, 1, 5, 3, 4))
    with opened() as (p2p, peer, is_receiver):
        cuda: Any = torch.cuda  # of which not all has types
        streams = cuda.current_stream(), cuda.Stream()
        made = [torch.zeros(10 << 20, device=device) for _ in orders[0]]
        assert [float(each) for each in made[0].aminmax()] == [
            0.0,
            0.0,
        ]  # a kernel that is loaded meanwhile would keep the host
        for number, (received, used) in enumerate(product(orders, orders)):
            torch.cuda.synchronize()
            if is_receiver:
                works, seen = {}, {}
                for k in received:
                    with torch.cuda.stream(streams[(k + number) % 2]):
                        works[k] = p2p.irecv(made[k], peer, tag=k)
                for k in used:
                    with torch.cuda.stream(streams[(k // 2 + number) % 2]):
                        works[k].wait()
                        seen[k] = made[k].aminmax()
                torch.cuda.synchronize()
                for k in orders[0]:
                    assert [float(each) for each in seen[k]] == [float(k + number)] * 2
            else:
                sends = []
                for k in orders[0]:
                    with torch.cuda.stream(streams[k % 2]):
                        cuda._sleep(2_000_000)
                        sends.append(p2p.isend(made[k].fill_(k + number), peer, tag=k))
                for send in sends:
                    send.wait()
        p2p.check()


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        before_the_send,
        in_turns,
        lengths_that_differ,
        too_long,
        closed_meanwhile,
        behind_what_is_lent,
        long_ones_in_any_order,
    )
}
_OTHERS = {name: case for name, case in {**ALL, **RANDOM}.items() if name != "each_way"}  # which goes by cells only
USUAL: dict[str, Case] = {name: partial(ahead, case) for name, case in _OTHERS.items()}
STAGED: dict[str, Case] = {name: partial(over, "staged", case) for name, case in {**CASES, **USUAL}.items()}
