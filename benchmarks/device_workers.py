"""What the processes of ``benchmarks.device_copies`` do: two GPUs, one process each, every measure beside its baseline in the
same run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import torch

from crossfade.device.borrowed import tensor_on
from crossfade.device.cuda import CudaDriver
from crossfade.device.cuda_bindings import check
from crossfade.device.memory import OpenedMemory, Pool
from crossfade.device.records import Enqueued
from crossfade.device.signals import HostBoard, Signal
from crossfade.device.streams import Role, Streams
from crossfade.device.tensors import load_kernels
from tests.helpers.device_cases import open_receiver, open_sender, wait_idle
from tests.helpers.device_pair import Peer
from tests.helpers.ring_tensors import TensorReceiver, TensorSender

MB = 1 << 20
NUM_GEMMS = 10
GEMM_SIZE = 8192

Peers = dict[int, Peer]


def start(device: int) -> tuple[CudaDriver, Streams]:
    torch.cuda.set_device(device)
    torch.ones(8, device="cuda").add_(1)
    driver = CudaDriver(device)
    load_kernels((torch.uint8, torch.int64), device)
    return driver, Streams(driver)


def external(stream: int, device: int) -> Any:
    return torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]


def event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def fill(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Bytes that follow from the seed, and differ from place to place."""
    words = tensor.view(torch.int64)
    torch.arange(words.numel(), out=words)
    return words.mul_(2 * seed + 1).add_(seed)


def is_filled(tensor: torch.Tensor, seed: int) -> bool:
    words = tensor.view(torch.int64)
    return bool((words == torch.arange(words.numel(), device=words.device) * (2 * seed + 1) + seed).all().item())


def elapsed_us(stream: Any, act: Callable[[], None], gate: Signal | None = None) -> float:
    """Device time of what ``act`` enqueues on the stream; with a gate everything is enqueued before the device begins."""
    first, last = event(), event()
    if gate is not None:
        gate.wait(stream.cuda_stream)
    first.record(stream)
    act()
    last.record(stream)
    if gate is not None:
        gate.release()
    last.synchronize()
    return float(first.elapsed_time(last) * 1e3)


class Gemms:
    """Ten large matrix products on random values."""

    def __init__(self, device: int) -> None:
        self._a, self._b = (
            torch.randn(GEMM_SIZE, GEMM_SIZE, device=f"cuda:{device}", dtype=torch.bfloat16) for _ in range(2)
        )
        self._c = torch.empty_like(self._a)
        self.stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        self.run()
        torch.cuda.synchronize()

    def run(self) -> tuple[Any, Any]:
        first, last = event(), event()
        with torch.cuda.stream(self.stream):
            first.record()
            for _ in range(NUM_GEMMS):
                torch.mm(self._a, self._b, out=self._c)
            last.record()
        return first, last


# 1: copies into opened memory beside bare ones


def copies_from(peers: Peers, device: int, other: int, sizes_mb: list[int], num_rounds: int) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    push = streams.get(Role.PUSH)
    stream = external(push, device)
    there = OpenedMemory(driver, peer.get(), 256 * MB, "target")
    source = torch.empty(256 * MB, dtype=torch.uint8, device=f"cuda:{device}")
    bare = torch.empty(256 * MB, dtype=torch.uint8, device=f"cuda:{other}")
    _enable_peer(driver, other)
    fill(source, 3)
    torch.cuda.synchronize()
    board = HostBoard(driver, peer.share(65536), 256, "bench")
    gate = board.signal(255, "gate")
    out: dict[str, Any] = {}
    for size_mb in sizes_mb:
        size, num = (size_mb * MB, 4) if size_mb > 0 else (4096, 64 if size_mb == 0 else 1)
        rows: dict[str, list[float]] = {"bare": [], "opened": [], "opened, set": [], "opened, wait and set": []}

        def signalled(size: int = size, num: int = num) -> None:
            for k in range(num):
                board.signal(k, "free").wait(push)
                driver.copy(there.address, source.data_ptr(), size, push)
                board.signal(64 + k, "full").set(push)

        def counted(size: int = size, num: int = num) -> None:
            for k in range(num):
                driver.copy(there.address, source.data_ptr(), size, push)
                board.counter(64 + k, "full").set(push, k)

        for _ in range(num_rounds):
            for name, target in (("bare", bare.data_ptr()), ("opened", there.address)):
                rows[name].append(
                    elapsed_us(stream, _Copies(driver, target, source.data_ptr(), size, push, num), gate) / num
                )
            for k in range(num):
                board.poke(k, 1)
            rows["opened, set"].append(elapsed_us(stream, counted, gate) / num)
            rows["opened, wait and set"].append(elapsed_us(stream, signalled, gate) / num)
        out[f"{size} bytes{', one alone' if num == 1 else ''}"] = rows
    torch.cuda.synchronize()
    peer.put("check")
    out["values right"] = peer.get()
    there.close()
    board.close()
    streams.close()
    return out


class _Copies:
    """Enqueues the same copy several times."""

    def __init__(self, driver: CudaDriver, target: int, source: int, size: int, stream: int, num: int) -> None:
        self._copy = (target, source, size, stream)
        self._driver = driver
        self._num = num

    def __call__(self) -> None:
        for _ in range(self._num):
            self._driver.copy(*self._copy)


def copies_to(peers: Peers, device: int, other: int) -> None:
    driver, streams = start(device)
    peer = peers[other]
    pool = Pool(driver)
    block = pool.take(256 * MB, "target", "bench")
    target = tensor_on(block.address, (256 * MB,), torch.uint8, device)
    target.fill_(0xEE)
    torch.cuda.synchronize()
    peer.put(block.handle)
    peer.shared().close()
    peer.get(120)
    peer.put(is_filled(target, 3))
    streams.close()


def _enable_peer(driver: CudaDriver, other: int) -> None:
    """Peer access from this context to another device's, for the bare copy."""
    cu = driver._cu
    there = check(cu.cuDevicePrimaryCtxRetain(check(cu.cuDeviceGet(other), "cuDeviceGet")), "the other context")
    with driver.current():
        (code,) = cu.cuCtxEnablePeerAccess(there, 0)
        if int(code) not in (0, 704):  # 704: it is enabled already
            check((code,), "cuCtxEnablePeerAccess")


# signals


def ping_pong(peers: Peers, device: int, other: int, num: int, num_rounds: int) -> dict[str, list[float]]:
    """Round trips by stream memory operations alone, and with 4 KB each way; signals in host memory."""
    driver, streams = start(device)
    peer = peers[other]
    is_first = device < other
    push = streams.get(Role.PUSH)
    stream = external(push, device)
    pool = Pool(driver)
    block = pool.take(4 * MB, "signals", "bench")
    tensor_on(block.address, (4 * MB,), torch.uint8, device).zero_()
    torch.cuda.synchronize()
    peer.put(block.handle)
    there = OpenedMemory(driver, peer.get(), 4 * MB, "signals")
    host = HostBoard(driver, peer.share(65536) if is_first else peer.shared(), 256, "bench")
    gate = host.signal(200 + device, "gate")
    source = torch.zeros(4096, dtype=torch.uint8, device=f"cuda:{device}")
    out: dict[str, list[float]] = {}
    for size in (0, 4096):
        arrived, tell = host.signal(device % 2, "here"), host.signal(other % 2, "there")

        def act(arrived: Signal = arrived, tell: Signal = tell, size: int = size) -> None:
            for _ in range(num):
                if not is_first:
                    arrived.wait(push)
                if size:
                    driver.copy(there.address + 65536, source.data_ptr(), size, push)
                tell.set(push)
                if is_first:
                    arrived.wait(push)

        rows = []
        for _ in range(num_rounds):
            peer.meet()
            rows.append(elapsed_us(stream, act, gate) / num)
        out[f"host signals, {size} bytes"] = rows
    peer.meet()
    there.close()
    host.close()
    return out


# the ring as it is used


def ring_from(peers: Peers, device: int, other: int, size_mb: int, num: int) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    ring, board, push = open_sender(driver, streams, peer, 2)
    sender = TensorSender(driver, ring)
    size = size_mb * MB or 4096
    tensors = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}") for _ in range(4)]
    for i, tensor in enumerate(tensors):
        fill(tensor, i)
    torch.cuda.synchronize()
    rounds = []
    for _ in range(5):
        peer.meet()
        begin = time.perf_counter()
        for i in range(num):
            while not sender.try_send(tensors[i % 4]):
                ring.on_record(peer.take())
        wait_idle(driver, push)
        rounds.append((time.perf_counter() - begin) * 1e6 / num)
    peer.meet()
    peer.drain(ring.on_record)
    sender.close()
    board.close()
    return {f"{size} bytes, us a value": rounds}


def ring_to(peers: Peers, device: int, other: int, size_mb: int, num: int) -> dict[str, Any]:
    driver, _ = start(device)
    peer = peers[other]
    size = size_mb * MB or 4096
    ring, _, _ = open_receiver(driver, peer, 2, size)
    receiver = TensorReceiver(ring)
    wrong = torch.zeros((), dtype=torch.int64, device=f"cuda:{device}")
    due = [torch.empty(size, dtype=torch.uint8, device=f"cuda:{device}") for _ in range(4)]
    for i, tensor in enumerate(due):
        fill(tensor, i)
    probe = torch.randint(0, size, (1024,), device=f"cuda:{device}")
    wrong += (due[0][probe] != due[0][probe]).sum()
    torch.cuda.synchronize()
    for _ in range(5):
        peer.meet()
        for i in range(num):
            record = peer.take()
            while not isinstance(record, Enqueued):
                ring.on_record(record)
                record = peer.take()
            tensor = receiver.accept(record, (size,), torch.uint8)
            wrong += (tensor[probe] != due[i % 4][probe]).sum()
            del tensor
        torch.cuda.synchronize()
    num_wrong = int(wrong)
    peer.meet()
    return {"wrong bytes": num_wrong, "copied out": receiver.num_copied_out}


# 2: beside matrix products


def beside_copies(peers: Peers, device: int, other: int, num_copies: int, num_rounds: int) -> dict[str, Any]:
    """Both GPUs send 256 MB copies to each other, alone and beside ten GEMMs on both."""
    driver, streams = start(device)
    peer = peers[other]
    push = streams.get(Role.PUSH)
    stream = external(push, device)
    pool = Pool(driver)
    block = pool.take(256 * MB, "target", "bench")
    target = tensor_on(block.address, (256 * MB,), torch.uint8, device)
    source = torch.empty(256 * MB, dtype=torch.uint8, device=f"cuda:{device}")
    fill(source, device + 1)
    torch.cuda.synchronize()
    peer.put(block.handle)
    there = OpenedMemory(driver, peer.get(), 256 * MB, "target")
    gemms = Gemms(device)

    def transfer() -> tuple[Any, Any]:
        first, last = event(), event()
        first.record(stream)
        for _ in range(num_copies):
            driver.copy(there.address, source.data_ptr(), 256 * MB, push)
        last.record(stream)
        return first, last

    out = _alone_and_beside(peer, gemms, transfer, num_rounds)
    peer.meet()
    out["values right"] = is_filled(target, other + 1)
    peer.meet()
    there.close()
    return out


def _alone_and_beside(
    peer: Peer,
    gemms: Gemms,
    transfer: Callable[[], tuple[Any, Any]],
    num_rounds: int,
    prepare: Callable[[], None] | None = None,
) -> dict[str, Any]:
    rows: dict[str, list[float]] = {
        name: [] for name in ("transfer alone", "GEMMs alone", "transfer beside", "GEMMs beside", "both")
    }
    for _ in range(num_rounds + 2):
        for kind in ("transfer", "gemms", "both"):
            if prepare is not None:
                prepare()
            torch.cuda.synchronize()
            peer.meet()
            moved = transfer() if kind != "gemms" else None
            worked = gemms.run() if kind != "transfer" else None
            torch.cuda.synchronize()
            where = "alone" if kind != "both" else "beside"
            if moved:
                rows[f"transfer {where}"].append(moved[0].elapsed_time(moved[1]))
            if worked:
                rows[f"GEMMs {where}"].append(worked[0].elapsed_time(worked[1]))
            if moved and worked:
                rows["both"].append(max(moved[0].elapsed_time(moved[1]), moved[0].elapsed_time(worked[1])))
    return {name: samples[2:] for name, samples in rows.items()}


def init_nccl(device: int, store: str, env: dict[str, str], num_ranks: int = 2) -> Any:
    os.environ.update(env)
    import torch.distributed as dist

    torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=device, world_size=num_ranks, device_id=torch.device("cuda", device)
    )
    return dist


def beside_nccl(peers: Peers, device: int, other: int, num_copies: int, num_rounds: int, store: str) -> dict[str, Any]:
    """The same by NCCL's send and receive, both directions at once."""
    dist = init_nccl(device, store, {})
    peer = peers[other]
    source = torch.empty(256 * MB, dtype=torch.uint8, device=f"cuda:{device}")
    target = torch.zeros_like(source)
    fill(source, device + 1)
    gemms = Gemms(device)
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()

    def transfer() -> tuple[Any, Any]:
        first, last = event(), event()
        with torch.cuda.stream(side):
            first.record()
            for _ in range(num_copies):
                ops = [dist.P2POp(dist.isend, source, other), dist.P2POp(dist.irecv, target, other)]
                for work in dist.batch_isend_irecv(ops):
                    work.wait()
            last.record()
        return first, last

    out = _alone_and_beside(peer, gemms, transfer, num_rounds)
    out["values right"] = is_filled(target, other + 1)
    peer.meet()
    dist.destroy_process_group()
    return out
