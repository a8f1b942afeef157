"""Workers of the tests of collectives of device tensors."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from crossfade.collectives.opening import host_context
from crossfade.collectives.terms import Terms
from crossfade.errors import ChannelBroken, ChannelError, DeviceError, Failure
from crossfade.types import CollectiveKind, ReduceOp, Transport
from tests.helpers.calm import calm_s
from tests.helpers.collective_cases import Party, Peers, Ring, draw_terms, failure_of, joined, name, names, random_calls
from tests.helpers.device_pair import die
from tests.helpers.footprint import counts_more, footprint, held_more


def sums(num_parties: int, count: int = 1) -> list[Terms]:
    return [Terms(f"c{k}", CollectiveKind.ALLREDUCE, ReduceOp.SUM, 0, names(num_parties)) for k in range(count)]


def random_work(peers: Peers, rank: int, seed: int, num_rounds: int, buffer_bytes: int) -> list[str]:
    """Random collectives of one group, and of a second one beside it."""
    torch.set_num_threads(1)
    num_parties, draw = len(peers) + 1, random.Random(seed)
    ring, wrong = Ring(peers, rank), []
    groups = []
    for number in range(2):
        all_terms = [draw_terms(draw, k, num_parties) for k in range(draw.choice((1, 2, 5)))]
        groups.append((Party(peers, ring, rank, all_terms, number=number, buffer_bytes=buffer_bytes), all_terms))
    for number in range(2):
        for party, all_terms in groups:
            wrong += random_calls(party, all_terms, seed + number, num_rounds)
    for party, _ in groups:
        party.close()
    ring.close()
    return wrong


def of_a_process_group(peers: Peers, rank: int, seed: int, num_rounds: int, by_nccls_calls: bool = False) -> list[str]:
    """Random collectives over gloo; or over gloo, but by the calls that are made of NCCL."""
    draw = random.Random(seed)
    all_terms = [draw_terms(draw, k, len(peers) + 1) for k in range(6)]
    with joined(peers, rank, all_terms, transport=Transport.GLOO) as party:
        mover: Any = party.group._mover
        mover._is_gloo = not by_nccls_calls
        wrong = random_calls(party, all_terms, seed, num_rounds)
        mover._is_gloo = True
    return wrong


def what_goes_wrong(peers: Peers, rank: int) -> list[str]:
    """One party brings something that does not do: all get the same error, and the next one is right again."""
    num_parties, said = len(peers) + 1, []
    error = Failure.capture(KeyError("x" * 5000), actor="A1", node="n1")
    with joined(peers, rank, sums(num_parties)) as party:
        for value in (
            error if rank == 1 else torch.ones(3),
            torch.ones(3 + rank),
            "text" if rank == 0 else torch.ones(3),
            torch.ones(3, dtype=torch.bool),
        ):
            said.append(str(failure_of(party.do(0, [value]))))
            (total,) = party.do(0, [torch.full((3,), float(rank))])
            assert total.tolist() == [sum(range(num_parties))] * 3
    return said


def broadcasts(peers: Peers, rank: int) -> list[bool]:
    """Shapes that nobody but the root knows, some of them twice in a row."""
    terms, good = Terms("c0", CollectiveKind.BROADCAST, None, 1, names(len(peers) + 1)), []
    with joined(peers, rank, [terms], buffer_bytes=1 << 12) as party:
        for k, shape in enumerate([(3,), (3,), (), (5, 2000), (5, 2000), (0,), (3,)]):
            wanted = torch.full(shape, float(k))
            (got,) = party.do(0, [wanted] if rank == 1 else [])
            good.append(torch.equal(got, wanted))
    return good


def one_element(peers: Peers, rank: int) -> list[float]:
    """A gather of tensors of one element, which is contiguous whatever its stride is."""
    with joined(peers, rank, [Terms("c0", CollectiveKind.ALLGATHER, None, 0, names(len(peers) + 1))]) as party:
        (gathered,) = party.do(0, [torch.tensor([rank, 9], dtype=torch.float16)[::2]])
    return list(gathered.tolist())


def one_is_busy(peers: Peers, rank: int) -> float:
    """Rank 0 starts, and then waits outside of the group for what rank 1 sends after the exchange (PL-2, PL-5)."""
    with joined(peers, rank, sums(len(peers) + 1, 2)) as party:
        for end in party.ends:
            end.start([torch.ones(50_000)])
        if rank == 0:
            peers[1].get(10.0)
        totals = [party.finish(end)[0] for end in party.ends]
        if rank == 1:
            peers[0].put("it is done")
    return float(sum(total.sum() for total in totals))


def one_gives_up(peers: Peers, rank: int) -> str:
    """Something breaks in rank 0 after all have met: the others do not wait for it."""

    def fail(*args: Any) -> None:
        raise RuntimeError("no memory for this")

    with joined(peers, rank, sums(len(peers) + 1)) as party:
        party.do(0, [torch.ones(4)])
        if rank == 0:
            party.group._mover.move = fail  # type: ignore[method-assign,assignment]
        begin, said = time.monotonic(), ""
        try:
            party.do(0, [torch.ones(4)])
        except ChannelBroken as error:
            said = str(error)
        assert time.monotonic() - begin < 4
    return said


def one_cannot_open(peers: Peers, rank: int) -> str:
    """Rank 0 has no memory for the group's buffers: nobody has a group, and nothing stays."""
    ring, num_descriptors = Ring(peers, rank), footprint(os.getpid()).num_descriptors
    home = host_context()
    if rank == 0:

        def refuse(*args: Any) -> Any:
            raise DeviceError("allocating memory failed")

        home.pool.take = refuse  # type: ignore[method-assign,assignment]
    said = ""
    try:
        Party(peers, ring, rank, sums(len(peers) + 1), home)
    except (ChannelError, DeviceError) as error:
        said = str(error)
    home.pool.close()
    assert footprint(os.getpid()).num_descriptors == num_descriptors
    ring.close()
    return said


def one_closes(peers: Peers, rank: int) -> str:
    """Rank 0 has started one and closes; the others start two and are told."""
    ring = Ring(peers, rank)
    party = Party(peers, ring, rank, sums(len(peers) + 1, 2))
    said = "nothing"
    try:
        for end in party.ends[: 1 if rank == 0 else 2]:
            end.start([torch.ones(4)])
        if rank:
            party.finish(party.ends[1])
    except ChannelBroken as error:
        said = str(error)
    party.close()
    for peer in peers.values():
        peer.meet()
    ring.close()
    return said


def leaves_nothing(peers: Peers, rank: int) -> dict[str, int]:
    """What a process holds more after groups were opened, used and closed, in another order on each."""
    torch.set_num_threads(1)
    ring, num_parties = Ring(peers, rank), len(peers) + 1

    def use() -> None:
        parties = [
            Party(peers, ring, rank, sums(num_parties), number=number, buffer_bytes=1 << 14) for number in range(3)
        ]
        for party in parties:
            party.do(0, [torch.ones(10_000)])
        for party in parties[:: 1 if rank % 2 else -1]:
            party.close()

    for _ in range(2):
        use()
    before = footprint(os.getpid())
    for _ in range(5):
        use()
    grown = held_more(before)
    assert [thread.name for thread in threading.enumerate() if "crossfade" in thread.name] == []
    for peer in peers.values():
        peer.meet()
    ring.close()
    return {key: value for key, value in grown.items() if key not in ("private_bytes", "shared_bytes")}


CASES: dict[str, Callable[..., Any]] = {
    "random": random_work,
    "process group": of_a_process_group,
    "wrong": what_goes_wrong,
    "broadcasts": broadcasts,
    "one element": one_element,
    "busy": one_is_busy,
    "cannot open": one_cannot_open,
    "gives up": one_gives_up,
    "closes": one_closes,
    "leaves nothing": leaves_nothing,
}


def several(peers: Peers, rank: int, cases: Sequence[tuple[Any, ...]], transport: str = "copy") -> list[Any]:
    """What each of several cases says; one set of processes for all."""
    torch.set_num_threads(1)
    Party.transport = Transport(transport)
    said = []
    for case, *args in cases:
        try:
            said.append(CASES[case](peers, rank, *args))
        except BaseException as error:
            error.add_note(f"case {case} {args}")
            raise
        for peer in peers.values():
            peer.meet()
    return said


def dies(peers: Peers, rank: int, moment: str, delay_s: float, transport: str) -> dict[str, Any]:
    """The last party kills itself; the others say how long it took until they were told, what, and what they hold after."""
    torch.set_num_threads(1)
    num_parties = len(peers) + 1
    ring = Ring(peers, rank)
    before = footprint(os.getpid())
    party = Party(peers, ring, rank, sums(num_parties, 2), transport=Transport(transport))
    watched: list[int] = []
    for other, peer in peers.items():
        watched.append(pidfd := os.pidfd_open(peer.pid))
        ring.doorbell.watch(pidfd, partial(_gone, party, ring, pidfd, other))
    party.do(0, [torch.ones(10)])
    for peer in peers.values():
        peer.meet()
    if rank == num_parties - 1:
        if moment == "in an exchange":
            threading.Timer(delay_s, _die, [peers]).start()
            while True:
                party.do(0, [torch.ones(1 << 20)])
        if moment == "after its offer":
            party.group._mover.move = lambda *args: _die(peers)  # type: ignore[method-assign]
            party.do(0, [torch.ones(10)])
        time.sleep(delay_s)  # the moment itself is what is tried
        _die(peers)
    said = ""
    try:
        while True:
            (total,) = party.do(0, [torch.ones(1 << 20 if moment == "in an exchange" else 10)])
            assert total[0] == total[-1] == num_parties, "a wrong result was given"
    except ChannelBroken as error:
        said = str(error)
    told_s = calm_s() - peers[num_parties - 1].get()
    party.close()
    for pidfd in watched:
        ring.doorbell.unwatch(pidfd)
        os.close(pidfd)
    kept = counts_more(before)
    ring.close()
    return {"said": said, "told_s": told_s, "held": kept}


def _die(peers: Peers) -> None:
    for peer in peers.values():
        peer.put(calm_s())
    die()


def _gone(party: Party, ring: Ring, pidfd: int, other: int) -> None:
    """As an actor does it."""
    ring.doorbell.unwatch(pidfd)
    for end in party.ends:
        end.break_off(f"the process of {name(other)} is gone")
