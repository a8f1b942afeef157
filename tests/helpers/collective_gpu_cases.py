"""What the processes of GPU tests of collectives between actors do: one GPU each, or shared ones."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from crossfade.collectives.terms import Offer, Terms, reference
from crossfade.device.context import DeviceContext
from crossfade.device.cuda import CudaDriver
from crossfade.device.memory import Pool
from crossfade.device.streams import Streams
from crossfade.errors import ChannelBroken
from crossfade.types import CollectiveKind, ReduceOp, Transport
from tests.helpers.collective_cases import Party, Peers, Ring, draw_terms, make_all, names, random_calls, same
from tests.helpers.device_pair import die, run_workers
from tests.helpers.peer_gpu_cases import peers_meet

SIZES = (1 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20)
KINDS = list(CollectiveKind)


def gpu_home(rank: int) -> DeviceContext:
    gpu = rank % torch.cuda.device_count()
    torch.cuda.set_device(gpu)
    torch.cuda.set_stream(torch.cuda.Stream(gpu))  # type: ignore[no-untyped-call,unused-ignore]
    driver = CudaDriver(gpu)
    return DeviceContext(driver, Pool(driver), Streams(driver))


def held(home: DeviceContext) -> list[str]:
    """What is left when all is given back."""
    torch.cuda.synchronize()
    home.streams.close()
    home.pool.close()
    home.driver.close()  # type: ignore[attr-defined]
    return home.driver.ledger.held()


def right_values(peers: Peers, rank: int, seed: int, num_rounds: int, by_nccl: bool) -> dict[str, Any]:
    """Random collectives of two groups, on GPU tensors and on CPU tensors."""
    home, ring, draw = gpu_home(rank), Ring(peers, rank), random.Random(seed)
    transport, wrong, groups = Transport.NCCL if by_nccl else Transport.COPY, [], []
    for number in range(2):
        all_terms = [draw_terms(draw, k, len(peers) + 1) for k in range(draw.choice((2, 5)))]
        groups.append((Party(peers, ring, rank, all_terms, home, number=number, transport=transport), all_terms))
    for device in ("cuda", "cpu", "cuda"):
        for party, all_terms in groups:
            wrong += random_calls(party, all_terms, seed, num_rounds, device)
    for party, _ in groups:
        party.close()
    ring.close()
    return {"wrong": wrong, "held": held(home)}


def all_sizes(peers: Peers, rank: int) -> dict[str, Any]:
    """All kinds, 1 KB to 256 MB, several in flight before anything is looked at; values against plain torch on the CPU."""
    home, ring, parties = gpu_home(rank), Ring(peers, rank), names(len(peers) + 1)
    all_terms = [
        Terms(f"c{k}", kind, ReduceOp.SUM if kind.reduces else None, 0, parties) for k, kind in enumerate(KINDS)
    ]
    party, wrong = Party(peers, ring, rank, all_terms, home), []
    for size_bytes in SIZES:
        for dtype in (torch.float32, torch.bfloat16) if size_bytes < 256 << 20 else (torch.float32,):
            rows = size_bytes // dtype.itemsize // len(parties) // 16 * len(parties)
            bring = [make_all(terms, [(dtype, (max(rows, len(parties)), 16))], k) for k, terms in enumerate(all_terms)]
            for end, each in zip(party.ends, bring, strict=True):
                end.start([tensor.cuda() for tensor in each[rank]])
            found = [party.finish(end) for end in party.ends]
            for terms, each, values in zip(all_terms, bring, found, strict=True):
                if not same(values, reference(terms, [Offer(tuple(row)) for row in each])[rank]):
                    wrong.append(f"{terms.kind} of {size_bytes} bytes of {dtype}")
            del bring, found
    party.close()
    ring.close()
    return {"wrong": wrong, "held": held(home)}


def overlaps(peers: Peers, rank: int) -> dict[str, float]:
    """What a long computation on the compute stream does to a gather that was started before it, and to the host."""
    home, ring, parties = gpu_home(rank), Ring(peers, rank), names(len(peers) + 1)
    all_terms = [Terms("c0", CollectiveKind.ALLGATHER, None, 0, parties)]
    party, tensor = Party(peers, ring, rank, all_terms, home), torch.full((16 << 20,), float(rank), device="cuda")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    party.do(0, [tensor])
    torch.mm(a, a)
    torch.cuda.synchronize()
    peers_meet(peers)
    begin: Any
    computed: Any
    begin, computed = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call,unused-ignore]
    begin.record()
    host_s = time.monotonic()
    party.ends[0].start([tensor])
    for _ in range(40):  # some 50 ms
        torch.mm(a, a)
    computed.record()
    (out,) = party.finish(party.ends[0])
    host_s = time.monotonic() - host_s
    was_running = not computed.query()
    kept = party.group._kept  # the gather, unless it has ended already
    while kept and not home.driver.has_happened(kept[-1].done):
        time.sleep(0.0001)
    is_before = not computed.query()
    torch.cuda.synchronize()
    assert out.view(len(parties), -1)[:, -1].tolist() == [float(k) for k in range(len(parties))]
    party.close()
    ring.close()
    return {
        "was_running": was_running,
        "is_before": is_before,
        "host_s": host_s,
        "compute_s": begin.elapsed_time(computed) / 1e3,
    }


def early_and_blocked(peers: Peers, rank: int) -> float:
    """Rank 0 starts first, and its main thread then waits for its device: what the others enqueue behind the exchange comes."""
    home, ring, parties = gpu_home(rank), Ring(peers, rank), names(len(peers) + 1)
    all_terms = [Terms("c0", CollectiveKind.ALLREDUCE, ReduceOp.SUM, 0, parties)]
    party, tensor = Party(peers, ring, rank, all_terms, home), torch.ones(1 << 20, device="cuda")
    party.do(0, [tensor])
    if rank == 0:
        party.ends[0].start([tensor])
        peers[1].get(20.0)  # rank 1 has its result, on the host
    else:
        party.ends[0].start([tensor])
    (out,) = party.finish(party.ends[0])
    total = float(out.sum())
    if rank == 1:
        peers[0].put("done")
    party.close()
    ring.close()
    held(home)
    return total


def killed(peers: Peers, rank: int, dead: int, is_waiting: bool) -> dict[str, Any] | None:
    """Rank ``dead`` kills itself while the others wait for it, or with large collectives of all parties enqueued."""
    home, ring, parties = gpu_home(rank), Ring(peers, rank), names(len(peers) + 1)
    all_terms = [Terms("c0", CollectiveKind.ALLREDUCE, ReduceOp.SUM, 0, parties)]
    source = torch.ones(32 << 20, device="cuda")
    first = Party(peers, ring, rank, all_terms, home)  # what is loaded and taken once a process is no loss
    first.do(0, [source])
    torch.cuda.synchronize()
    first.close()
    home.pool.trim()
    torch.cuda.empty_cache()
    peers_meet(peers)
    free_before = torch.cuda.mem_get_info()[0]
    peers_meet(peers)  # another party may be on this GPU
    party = Party(peers, ring, rank, all_terms, home, number=1)
    party.do(0, [source])
    torch.cuda.synchronize()
    peers_meet(peers)
    if rank == dead:
        if not is_waiting:
            for _ in range(20):
                party.do(0, [source])
        time.sleep(0.02)  # the moment itself is what is tried
        for peer in peers.values():
            peer.put(time.monotonic())
        die()
    watcher = _watch(party, peers, dead)
    said, outs = "", []
    try:
        for _ in range(200):
            outs.append(party.do(0, [source]))
    except (ChannelBroken, TimeoutError) as error:
        said = str(error)
    told_s = time.monotonic() - peers[dead].get()
    watcher.join()
    torch.cuda.synchronize()
    ones = torch.ones(1 << 20, device="cuda")
    is_usable = int((ones + ones).sum().item()) == 2 << 20
    party.close()
    outs.clear()
    del ones
    survivors = {other: peer for other, peer in peers.items() if other != dead}
    peers_meet(survivors)
    torch.cuda.empty_cache()
    home.pool.trim()
    peers_meet(survivors)
    lost_bytes = free_before - torch.cuda.mem_get_info()[0]
    peers_meet(survivors)
    ring.close()
    del source
    return {"said": said, "told_s": told_s, "usable": is_usable, "held": held(home), "lost_bytes": lost_bytes}


def _watch(party: Party, peers: Peers, dead: int) -> threading.Thread:
    """As an actor's doorbell does it: the ends hear of the death."""
    pidfd = os.pidfd_open(peers[dead].pid)

    def work() -> None:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        poller.poll()
        os.close(pidfd)
        for end in party.ends:
            end.break_off(f"the process of A{dead} is gone")
        party._doorbell.nudge()

    watcher = threading.Thread(target=work)
    watcher.start()
    return watcher


# what the tests ask for, with as many parties as there are GPUs


def check_right_values(num_parties: int, *, by_nccl: bool) -> None:
    for seed in range(3):
        args: Sequence[tuple[Any, ...]] = [(rank, seed, 5, by_nccl) for rank in range(num_parties)]
        for result in run_workers([right_values] * num_parties, args, timeout_s=120):
            assert result["wrong"] == []
            assert result["held"] == []


def check_all_sizes(num_parties: int) -> None:
    for result in run_workers([all_sizes] * num_parties, [(rank,) for rank in range(num_parties)], timeout_s=120):
        assert result["wrong"] == []
        assert result["held"] == []


def check_overlap(num_parties: int) -> None:
    for result in run_workers([overlaps] * num_parties, [(rank,) for rank in range(num_parties)]):
        assert result["was_running"]  # the host did not wait for the computation
        assert result["is_before"]  # the gather had ended when the computation had not
        assert result["host_s"] < result["compute_s"] / 2


def check_nobody_waits_for_a_busy_host(num_parties: int) -> None:
    totals = run_workers([early_and_blocked] * num_parties, [(rank,) for rank in range(num_parties)])
    assert totals == [float(num_parties << 20)] * num_parties


def check_a_killed_party(num_parties: int, dead: int, *, is_waiting: bool) -> None:
    args = [(rank, dead, is_waiting) for rank in range(num_parties)]
    results = run_workers([killed] * num_parties, args, timeout_s=90, dying={dead})
    for result in (result for rank, result in enumerate(results) if rank != dead):
        assert f"A{dead}" in result["said"]
        assert result["told_s"] < 2
        assert result["usable"]
        assert result["held"] == []
        assert result["lost_bytes"] <= 0


def suite(num_parties: int, by_nccl: Sequence[bool] = (False, True)) -> type:
    """All of that, for so many parties."""

    @pytest.mark.timeout(300)
    class Suite:
        @pytest.mark.parametrize("by_nccl", by_nccl)
        def test_random_collectives_give_what_plain_torch_gives(self, by_nccl: bool) -> None:
            check_right_values(num_parties, by_nccl=by_nccl)

        def test_all_kinds_and_sizes(self) -> None:
            check_all_sizes(num_parties)

        def test_a_long_computation_does_not_delay_a_gather_nor_the_host(self) -> None:
            check_overlap(num_parties)

        def test_pl5_nobody_waits_for_a_busy_host(self) -> None:
            check_nobody_waits_for_a_busy_host(num_parties)

        @pytest.mark.parametrize("is_waiting", [True, False])
        @pytest.mark.parametrize("dead", [0, num_parties - 1])
        def test_ch3_a_killed_party(self, dead: int, is_waiting: bool) -> None:
            check_a_killed_party(num_parties, dead, is_waiting=is_waiting)

    return Suite
