"""Cases of `crossfade.p2p` that all ranks of a group run, on CPU tensors or on GPU tensors."""

from __future__ import annotations

from functools import partial
from threading import Thread

import pytest
import torch
import torch.distributed as dist

from crossfade.errors import ChannelBroken, ChannelClosed, ChannelError, ChannelTimeout
from crossfade.p2p import P2P
from crossfade.peers import rendezvous
from tests.helpers.p2p_programs import Way, many_random_programs, opened, over, random_program, world_of_ranks
from tests.helpers.ranks import Case
from tests.helpers.waiting import until


def _peer() -> int:
    rank, num_ranks = world_of_ranks()
    return rank ^ 1 if num_ranks % 2 == 0 else (num_ranks - rank) % num_ranks


def in_reverse(device: str) -> None:
    """Ten tags, received in reverse, of short and of long values, in tensors that others reach and in others."""
    peer = _peer()
    with opened(device) as p2p:
        for size in (5, 200_000):
            for is_shared in (False, True):
                values = [torch.full((size,), float(100 * p2p.rank + k), device=device) for k in range(10)]
                if is_shared:
                    values = [p2p.empty(size, dtype=torch.float32).copy_(value) for value in values]
                works = [p2p.isend(value, peer, tag=k) for k, value in enumerate(values)]
                for k in reversed(range(10)):
                    target = p2p.empty(size, dtype=torch.float32) if is_shared else torch.empty(size, device=device)
                    p2p.recv(target, peer, tag=k)
                    assert target.eq(100.0 * peer + k).all()
                for work in works:
                    work.wait()
                    until(work.is_completed, limit_s=10.0)


def posted_first(device: str) -> None:
    """The receives come first on one side: the sender pushes."""
    rank, peer = dist.get_rank(), _peer()
    with opened(device) as p2p:
        if peer != rank:
            targets = [p2p.empty(1000, dtype=torch.int32).zero_() for _ in range(5)]
            works = [p2p.irecv(target, peer, tag=k) for k, target in enumerate(targets)]
            dist.barrier()
            for k in (3, 1, 4, 0, 2):
                p2p.send(torch.full((1000,), k + 10 * rank, dtype=torch.int32, device=device), peer, tag=k)
            for k, (work, target) in enumerate(zip(works, targets, strict=True)):
                work.wait()
                assert target.eq(k + 10 * peer).all()
        else:
            dist.barrier()


def each_way(device: str) -> None:
    """A posted receive is pushed into, a long value is lent, another one is copied first: once each, by who comes second."""
    rank, num_ranks = world_of_ranks()
    if num_ranks % 2:
        return
    peer = rank ^ 1
    for is_posted, is_shared in ((True, True), (False, True), (False, False)):
        with opened(device) as p2p:
            dist.barrier()
            length = 300_000 if is_shared else 100
            value = p2p.empty(length, dtype=torch.float32).fill_(rank)
            target = p2p.empty(length, dtype=torch.float32)
            if not is_shared and device == "cpu":
                value = value.clone()
            works = []
            for is_first in (True, False):
                if (rank < peer) == is_first:
                    works.append(p2p.irecv(target, peer) if is_posted == is_first else p2p.isend(value, peer))
                dist.barrier()
            for work in works:
                work.wait()
            dist.barrier()
            known = p2p.statistics()
            if Way.transport != "auto":
                is_sender = (rank < peer) != is_posted
                assert known.num_copied_first == (is_sender and Way.transport == "staged")
                assert known.num_pulled == (not is_sender)
                assert is_sender or target.eq(peer).all()
                continue
            is_sender = (rank < peer) != is_posted
            assert (known.num_pushed, known.num_pulled) == (is_sender and is_posted, not is_sender and not is_posted)
            assert known.num_lent == (is_sender and is_shared and not is_posted)
            assert known.num_copied_first == (is_sender and not is_shared)
            assert known.num_bytes == (4 * length if known.num_pushed or known.num_pulled else 0)
            assert is_sender or target.eq(peer).all()


def unknown_shapes(device: str) -> None:
    peer = _peer()
    with opened(device) as p2p:
        values = [
            torch.arange(24, device=device).view(2, 3, 4),
            torch.tensor(7.5, dtype=torch.float64, device=device),
            torch.empty(0, 5, device=device),
            torch.ones(1000, 1000, device=device, dtype=torch.bfloat16),
        ]
        works = [p2p.isend(value, peer, tag=k) for k, value in enumerate(values)]
        for k in (2, 0, 3, 1):
            got = p2p.recv_any(peer, tag=k)
            assert (got.dtype, got.device) == (values[k].dtype, values[k].device)
            assert torch.equal(got, values[k])
        for work in works:
            work.wait()


def very_many(device: str) -> None:
    """More than there are windows, or letters that find room; received in reverse."""
    peer, num = _peer(), 700
    with opened(device) as p2p:
        works = [p2p.isend(torch.full((3,), float(k), device=device), peer, tag=k) for k in range(num)]
        targets = [torch.empty(3, device=device) for _ in range(num)]
        for k in reversed(range(num)):
            p2p.recv(targets[k], peer, tag=k)
        for k, (work, target) in enumerate(zip(works, targets, strict=True)):
            work.wait()
            assert target.eq(float(k)).all()


def several_destinations(device: str) -> None:
    rank, num_ranks = world_of_ranks()
    with opened(device) as p2p:
        work = p2p.isend(torch.full((300_000,), float(rank), device=device), range(num_ranks), tag=9)
        for src in reversed(range(num_ranks)):
            target = torch.empty(300_000, device=device)
            p2p.recv(target, src, tag=9)
            assert target.eq(src).all()
        assert work.wait()


def a_tensor_that_is_changed_after_the_wait(device: str) -> None:
    peer = _peer()
    with opened(device) as p2p:
        for size in (100, 500_000):
            value = p2p.empty(size, dtype=torch.float32).fill_(1.0)
            work, other = p2p.isend(value, peer), p2p.irecv(target := torch.empty(size, device=device), peer)
            work.wait()
            value.fill_(2.0)
            other.wait()
            assert target.eq(1.0).all()


def lengths_that_differ(device: str) -> None:
    """Whoever comes second finds it out, and both are told; the pair continues."""
    rank, peer = dist.get_rank(), _peer()
    with opened(device) as p2p:
        for k, sender_is_first in enumerate((True, False)):
            is_sender, work = rank < peer, None
            for is_first in (True, False):
                if peer != rank and (is_sender == sender_is_first) == is_first:
                    if is_sender:
                        work = p2p.isend(p2p.empty(300_000, dtype=torch.float32), peer, tag=k)
                    else:
                        work = p2p.irecv(p2p.empty(10, dtype=torch.float32), peer, tag=k)
                dist.barrier()
            if work is not None and is_sender and (Way.transport == "staged" or Way.waits == "stream"):
                work.wait()  # its value was copied, and that was all
            elif work is not None:
                other_bytes = 40 if is_sender else 1_200_000
                text = f"met a transfer of {other_bytes} bytes: nothing was copied\nhint: the k-th send"
                with pytest.raises(ChannelError, match=text):
                    work.wait()
                assert work.is_completed()
                assert isinstance(work.exception(), ChannelError)
        p2p.isend(torch.ones(3, device=device), peer)
        assert p2p.recv_any(peer).eq(1).all()


def a_wait_that_is_too_long(device: str) -> None:
    """It says who waits for what, and whose time was over; and what comes later is received."""
    rank, peer = dist.get_rank(), _peer()
    with opened(device) as p2p:
        if peer == rank:
            for _ in range(4):
                dist.barrier()
            return
        target = torch.zeros(4, device=device)
        work = p2p.irecv(target, peer, tag=33)
        over_time = f"no longer waits for a receive from rank {peer} with tag 33 (16 bytes): its time was over"
        with pytest.raises(
            ChannelTimeout, match=f"a receive from rank {peer} with tag 33 .16 bytes. has not met"
        ) as failed:
            work.wait(timeout=0.4)
        assert over_time in str(failed.value)
        dist.barrier()
        if rank < peer:
            with pytest.raises(ChannelTimeout) as failed:
                p2p.recv_any(peer, tag=34, timeout=0.2)
            theirs = over_time.replace(f"from rank {peer}", f"from rank {rank}")
            assert theirs in str(failed.value) or "does not say here" in str(failed.value)
        dist.barrier()
        p2p.isend(torch.ones(4, device=device), peer, tag=34)
        p2p.isend(torch.ones(4, device=device), peer, tag=33)
        work.wait()
        assert target.eq(1).all()
        assert p2p.recv_any(peer, tag=34).eq(1).all()
        dist.barrier()
        if rank < peer:
            with pytest.raises(ChannelTimeout) as failed:
                p2p.recv_any(peer, tag=35, timeout=0.2)
            assert "with tag 33" not in str(failed.value), "it has come"
        dist.barrier()


def waits_that_differ(device: str) -> None:
    """All ranks hear that they were opened differently."""
    asked = ("host", "stream")[dist.get_rank() % 2]
    with pytest.raises(ValueError, match=r"some ranks were opened with waits='stream', and some without\nhint: all"):
        P2P(device=device, waits=asked)
    with pytest.raises(ValueError, match=r"waits is 'long'\nhint: it is one of host, stream"):
        P2P(device=device, waits="long")


def two_threads(device: str) -> None:
    """Each talks to the other rank's thread of the same number, at the same time."""
    peer = _peer()
    failed: list[BaseException] = []
    place = torch.empty(0, device=device).device  # a new thread's current GPU is the first

    def talk(p2p: P2P, thread: int) -> None:
        try:
            for k in range(60):
                work = p2p.isend(torch.full((50 * k,), float(k), device=place), peer, tag=thread)
                target = torch.empty(50 * k, device=place)
                p2p.recv(target, peer, tag=thread)
                assert target.eq(k).all()
                work.wait()
        except BaseException as error:
            failed.append(error)

    with opened(device) as p2p:
        threads = [Thread(target=talk, args=(p2p, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not failed, failed


def a_sender_that_is_busy_elsewhere(device: str) -> None:
    """Values that find no room are sent by the attendant, while the program waits in something else."""
    rank, peer = dist.get_rank(), _peer()
    with opened(device, buffer_bytes=4096) as p2p:
        works = [p2p.isend(torch.full((50_000,), float(k), device=device), peer, tag=k) for k in range(6)]
        dist.barrier()
        if rank % 2:
            targets = [torch.empty(50_000, device=device) for _ in range(6)]
            received = [p2p.irecv(target, peer, tag=5 - k) for k, target in enumerate(targets)]
            dist.barrier()
        else:
            targets, received = [], []
            for k in range(6):
                targets.append(torch.empty(50_000, device=device))
                p2p.recv(targets[-1], peer, tag=5 - k)
            dist.barrier()  # here the other rank's receives wait for this one's attendant
        for work in received:
            work.wait()
        for k, target in enumerate(targets):
            assert target.eq(5.0 - k).all()
        for work in works:
            work.wait()


def after_the_end(device: str) -> None:
    rank, peer = dist.get_rank(), _peer()
    p2p = P2P(device=device, timeout_s=20.0)
    assert repr(p2p) == f"P2P(rank {rank} of {dist.get_world_size()})"
    waiting = p2p.irecv(torch.zeros(3, device=device), peer, tag=1)
    target = torch.zeros(3, device=device)
    done = [p2p.isend(torch.ones(3, device=device), rank, tag=2), p2p.irecv(target, rank, tag=2)]
    for number in (30_000, 3_000_000):  # of these, the last one is lent
        done.append(p2p.isend(torch.ones(number, device=device), rank, tag=3))
        done.append(p2p.irecv(torch.zeros(number, device=device), rank, tag=3))
    for work in done:
        work.wait()
    dist.barrier()
    p2p.close()
    p2p.close()
    with pytest.raises(ChannelError):
        waiting.wait()
    assert isinstance(waiting.exception(), ChannelClosed | ChannelBroken)
    for work in done:  # what they asked is unmapped by now
        assert work.wait()
        assert work.is_completed()
    assert target.tolist() == [1.0] * 3
    with pytest.raises(ChannelClosed, match="is closed\nhint: open a new one"):
        p2p.isend(torch.zeros(3, device=device), peer)
    assert "closed" in repr(p2p)


def come_and_go(device: str) -> None:
    """Nothing is left behind by many communicators."""
    import gc
    import os

    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    random_program(1, device)
    gc.collect()
    before = num_descriptors()
    for seed in range(5):
        random_program(seed, device)
    gc.collect()
    assert num_descriptors() <= before + 1


def on_two_hosts(case: Case, device: str) -> None:
    """A case as if the first half of the ranks were on one host, and the others on another one."""
    rank, num_ranks = world_of_ranks()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_host_number", lambda: 2 * rank // num_ranks)
        case(device)


CASES: dict[str, Case] = {
    case.__name__: case
    for case in (
        in_reverse,
        posted_first,
        each_way,
        unknown_shapes,
        very_many,
        several_destinations,
        a_tensor_that_is_changed_after_the_wait,
        lengths_that_differ,
        a_wait_that_is_too_long,
        waits_that_differ,
        two_threads,
        a_sender_that_is_busy_elsewhere,
        after_the_end,
        come_and_go,
    )
}
RANDOM: dict[str, Case] = {
    f"programs {first} to {first + 19}": partial(many_random_programs, first, 20) for first in range(0, 100, 20)
}

STAGED: dict[str, Case] = {name: partial(over, "staged", case) for name, case in {**CASES, **RANDOM}.items()}
_SOME = dict(list(RANDOM.items())[:2])  # opening connections takes long
FAR: dict[str, Case] = {name: partial(over, "tcp", case) for name, case in {**CASES, **_SOME}.items()}
HOSTS: dict[str, Case] = {name: partial(on_two_hosts, case) for name, case in {**CASES, **_SOME}.items()}
