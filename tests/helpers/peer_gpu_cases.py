"""What the processes of GPU tests of `crossfade.peers` do: one GPU each, or shared ones."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from crossfade.errors import ChannelBroken
from crossfade.ops import matmul_reduce_scatter
from crossfade.peers import collectives
from crossfade.peers.group import PeerGroup
from crossfade.peers.opening import open_group
from tests.helpers.device_pair import Peer, die, run_workers
from tests.helpers.ranks import join_gpus

Peers = dict[int, Peer]


def stop(group: PeerGroup) -> list[str]:
    """Closes, and says what the driver's ledger still has."""
    torch.cuda.synchronize()
    group.close()
    dist.destroy_process_group()
    return group.memory.driver.ledger.held()


def gathered(source: torch.Tensor) -> torch.Tensor:
    """All ranks' tensors, by NCCL; one row each."""
    rows = [torch.empty_like(source) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, source)
    return torch.stack(rows)


def expected(op: str, source: torch.Tensor) -> torch.Tensor:
    """What has to come out: a sum is taken in the order of the ranks, of two-byte types in float32."""
    rows, rank = gathered(source), dist.get_rank()
    if op == "all_gather":
        return rows.flatten(0, 1)
    part = source.shape[0] // len(rows)
    own = slice(rank * part, (rank + 1) * part)
    if op == "all_to_all":
        return rows[:, own].flatten(0, 1)
    wide = torch.float32 if source.itemsize == 2 else source.dtype
    total = rows[0].to(wide)
    for row in rows[1:]:
        total += row.to(wide)
    total = total.to(source.dtype)
    return total[own] if op == "reduce_scatter" else total


def right_values(
    peers: Peers, rank: int, num_ranks: int, store: str, num_calls: int, is_staged: bool
) -> dict[str, Any]:
    """Random calls, eager, of all types and ways, some with strides, in pieces, in place, on two lanes."""
    join_gpus(rank, num_ranks, store)
    group = open_group(buffer_bytes=1 << 20, num_lanes=2, heap_bytes=0 if is_staged else 64 << 20, is_staged=is_staged)
    heap = torch.empty(0, device="cuda") if is_staged else group.empty(8 << 20, dtype=torch.uint8)
    rng = random.Random(7)
    torch.manual_seed(rank)
    wrong = []
    for number in range(num_calls):
        op = rng.choice(("all_gather", "all_to_all", "reduce_scatter", "all_reduce"))
        dtype = getattr(torch, rng.choice(collectives.SUMMABLE))
        rows = num_ranks * rng.choice((0, 1, 3, 128, 1000, rng.randrange(20_000)))
        columns = rng.choice((1, 2, 8, 17))
        way = rng.choice(("plain", "strided", "out", "plain" if is_staged else "heap", "in place", "coalesced"))
        source = (torch.randn(rows, columns, device="cuda") * 50).to(dtype)
        if way == "strided":
            source = source.t().contiguous().t()
        want = expected(op, source.contiguous())
        out: torch.Tensor | None = None
        if way == "out":
            out = torch.full_like(want, 9)
        elif way == "heap" and want.nbytes <= heap.nbytes:
            out = heap[: want.nbytes].view(dtype).view(want.shape)
        elif way == "in place" and op == "all_reduce":
            out = source
        torch.cuda.synchronize()
        if way == "coalesced" and op in ("all_reduce", "reduce_scatter"):
            rows_of = [source, source.clone(), source[: num_ranks * (rows // num_ranks // 2)]]
            got, again, _ = getattr(collectives, f"{op}_coalesced")(rows_of, group)
            assert torch.equal(got, again)
        else:
            got = getattr(collectives, op)(source, group, out, lane=number % 2)
        if not torch.equal(got, want):
            wrong.append(f"{number}: {op} of {dtype} {list(source.shape)}, {way}")
    return {"wrong": wrong, "held": stop(group)}


def replays(peers: Peers, rank: int, num_ranks: int, store: str, num_replays: int, is_staged: bool) -> dict[str, Any]:
    """Captured collectives on two lanes beside products; inputs change and outputs are poisoned before each replay."""
    join_gpus(rank, num_ranks, store)
    options: dict[str, Any] = {"is_staged": True} if is_staged else {"heap_bytes": 16 << 20}
    group = open_group(buffer_bytes=1 << 20, num_lanes=2, is_replayable=True, **options)
    numel = num_ranks * 30_000
    source = torch.arange(numel, device="cuda", dtype=torch.int64) + rank
    summed = torch.empty_like(source)
    parts = source.new_empty(num_ranks * numel) if is_staged else group.empty(num_ranks * numel, dtype=torch.int64)
    mixed = torch.empty_like(source)
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    a = torch.randn(2048, 2048, device="cuda")
    wrong = torch.zeros(1, device="cuda", dtype=torch.int64)
    ramp = torch.arange(numel, device="cuda", dtype=torch.int64)
    shift = torch.zeros(1, device="cuda", dtype=torch.int64)
    ranks = torch.arange(num_ranks, device="cuda", dtype=torch.int64)

    def body() -> None:
        shift.add_(1)
        source.add_(1)
        for out in (summed, parts, mixed):
            out.fill_(-1)
        side.wait_stream(torch.cuda.current_stream())
        collectives.all_reduce(source, group, summed)
        with torch.cuda.stream(side):
            collectives.all_gather(source, group, parts, lane=1)
        torch.mm(a, a)
        collectives.all_to_all(source, group, mixed)
        torch.cuda.current_stream().wait_stream(side)
        wrong.add_((summed != num_ranks * (ramp + shift) + ranks.sum()).sum())
        wrong.add_((parts.view(num_ranks, -1) != ramp + shift + ranks[:, None]).sum())
        part = numel // num_ranks
        own = ramp[rank * part : (rank + 1) * part]
        wrong.add_((mixed.view(num_ranks, -1) != own + shift + ranks[:, None]).sum())

    body()
    torch.cuda.synchronize()
    graph: Any = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        body()
    launches_us = []
    for _ in range(num_replays):
        begin = time.perf_counter()
        graph.replay()
        launches_us.append((time.perf_counter() - begin) * 1e6)
    torch.cuda.synchronize()
    num_wrong = int(wrong.item())
    is_all = int(shift.item()) == num_replays + 1
    peers_meet(peers)
    del graph
    return {"num_wrong": num_wrong, "is_all": is_all, "launches_us": launches_us[10::50], "held": stop(group)}


def peers_meet(peers: Mapping[int, Peer]) -> None:
    for peer in peers.values():
        peer.meet()


def killed(
    peers: Peers,
    rank: int,
    num_ranks: int,
    store: str,
    dead: int,
    is_waiting: bool,
    delay_s: float,
    candidate: str | None,
    is_staged: bool,
) -> dict[str, Any] | None:
    """Rank ``dead`` kills itself, at once while the others wait, or with large collectives of all ranks under way, or, with a
    candidate, reduce-scatters of products.
    """
    join_gpus(rank, num_ranks, store)
    _use_once(num_ranks, candidate, is_staged=is_staged)
    free_before = torch.cuda.mem_get_info()[0]
    group = open_group(buffer_bytes=256 << 20, is_staged=is_staged)
    enqueue = _large(group, candidate)
    enqueue()
    torch.cuda.synchronize()
    peers_meet(peers)
    if rank == dead and is_waiting:
        time.sleep(delay_s)  # the moment itself is what is tried
        die()
    marks: list[Any] = []
    try:
        # The others enqueue more: where a host is slower than its GPU, all would have ended before the death is known.
        for _ in range(200 if rank == dead else 1000):
            enqueue()
            marks.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            marks[-1].record()
    except ChannelBroken:
        pass  # it died while these were enqueued
    if rank == dead:
        time.sleep(delay_s)
        die()
    del enqueue
    others = {other: peer for other, peer in peers.items() if other != dead}
    return _survive(peers[dead], others, group, marks, free_before)


def _large(group: PeerGroup, candidate: str | None) -> Callable[[], object]:
    """What enqueues something large that all ranks do."""
    if candidate is None:
        source = torch.randn(32 << 20, device="cuda")
        return partial(collectives.all_reduce, source, group, torch.empty_like(source))
    a, b = (torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty(4096 // group.num_ranks, 4096, device="cuda", dtype=torch.bfloat16)
    return partial(matmul_reduce_scatter, a, b, group, out=out, candidate=candidate)


def _use_once(num_ranks: int, candidate: str | None, *, is_staged: bool) -> None:
    """What is loaded and taken once a process is no loss."""
    group = open_group(buffer_bytes=1 << 20 if candidate is None and not is_staged else 256 << 20, is_staged=is_staged)
    if candidate:
        _large(group, candidate)()
    out = collectives.all_reduce(torch.ones(1 << 20, device="cuda"), group)
    assert float((out + out).sum()) == num_ranks * 2 << 20
    gathered(out[:8])
    torch.cuda.synchronize()
    group.close()
    del out
    torch.cuda.empty_cache()


def _survive(dead: Peer, others: Peers, group: PeerGroup, marks: list[Any], free_before: int) -> dict[str, Any]:
    end, lane = time.monotonic() + 20, group.lane()
    was_running = bool(lane.broken)  # then it died while this rank enqueued
    while not lane.broken and time.monotonic() < end:
        was_running = not marks[-1].query()
    while not group.reports and time.monotonic() < end:
        time.sleep(0.001)
    begin = time.monotonic()
    torch.cuda.synchronize()
    drained_s = time.monotonic() - begin
    error = ""
    try:
        group.check()
    except ChannelBroken as broken:
        error = str(broken)
    report = group.reports[0] if group.reports else None
    ones = torch.ones(1 << 20, device="cuda")
    is_usable = bool((ones + ones).sum().item() == 2 << 20)
    group.close()
    marks.clear()
    del ones
    torch.cuda.empty_cache()
    peers_meet(others)  # memory that others have opened is given back when they close it
    return {
        "error": error,
        "pid": dead.pid,
        "release_s": report.release_s if report else None,
        "drained_s": drained_s,
        "was_running": was_running,
        "usable": is_usable,
        "held": group.memory.driver.ledger.held(),
        "lost_bytes": free_before - torch.cuda.mem_get_info()[0],
    }


# what the tests ask for, with as many ranks as there are GPUs


def check_right_values(num_ranks: int, store: str, *, is_staged: bool = False) -> None:
    args = [(rank, num_ranks, store, 150, is_staged) for rank in range(num_ranks)]
    for result in run_workers([right_values] * num_ranks, args, timeout_s=90):
        assert result["wrong"] == []
        assert result["held"] == []


def check_replays(num_ranks: int, store: str, *, is_staged: bool = False) -> None:
    args = [(rank, num_ranks, store, 1_000 if is_staged else 10_000, is_staged) for rank in range(num_ranks)]
    for result in run_workers([replays] * num_ranks, args, timeout_s=90):
        assert result["is_all"]
        assert result["num_wrong"] == 0
        assert result["held"] == []


def check_a_killed_rank(
    num_ranks: int,
    store: str,
    dead: int,
    *,
    is_waiting: bool,
    candidate: str | None = None,
    is_staged: bool = False,
) -> None:
    args = [(rank, num_ranks, store, dead, is_waiting, 0.02, candidate, is_staged) for rank in range(num_ranks)]
    results = run_workers([killed] * num_ranks, args, timeout_s=90, dying={dead})
    for result in (result for rank, result in enumerate(results) if rank != dead):
        assert f"rank {dead} (process {result['pid']}) died" in result["error"]
        assert result["was_running"]
        assert result["release_s"] + result["drained_s"] < 2
        assert result["usable"]
        assert result["held"] == []
        assert result["lost_bytes"] <= 0
