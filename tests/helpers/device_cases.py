"""Workers of the GPU tests: what a sender and a receiver do, each in a process of its own."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from crossfade.device.capture import capture
from crossfade.device.cuda import CudaDriver
from crossfade.device.memory import OpenedMemory, Pool
from crossfade.device.records import Enqueued, FreeEnqueued
from crossfade.device.ring import num_signals
from crossfade.device.ring_receiver import RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.signals import WORD_BYTES, HostBoard
from crossfade.device.staged import StagedLayout, StagedReceiver, StagedSender, StagedStreams
from crossfade.device.streams import Role, Streams
from crossfade.device.tensors import load_kernels
from tests.helpers.device_pair import Peer
from tests.helpers.ring_tensors import TensorReceiver, TensorSender
from tests.helpers.waiting import until


def start(device: int) -> tuple[CudaDriver, Streams]:
    torch.cuda.set_device(device)
    torch.zeros(1, device=f"cuda:{device}")
    driver = CudaDriver(device)
    load_kernels((torch.uint8, torch.float32, torch.int64), device)
    return driver, Streams(driver)


def value(index: int, num: int, device: int) -> torch.Tensor:
    """What the index-th value must be, made without loading kernels late."""
    return torch.arange(num, device=f"cuda:{device}", dtype=torch.int64) * (2 * index + 1) + index


def lengths(num_values: int, seed: int) -> list[int]:
    """Of each value, in words of 8 bytes; they grow now and then."""
    rng = random.Random(seed)
    return [rng.choice((1, 7, 100, 5_000, rng.randrange(1, 300_000))) for _ in range(num_values)]


def staged_streams(streams: Streams, role: Role) -> StagedStreams:
    return StagedStreams(*(streams.get(role, part) for part in StagedStreams._fields))


def ring_signal_bytes(num_slots: int) -> int:
    return num_signals(num_slots) * WORD_BYTES


def wait_idle(driver: CudaDriver, stream: int, limit_s: float = 20.0) -> None:
    until(lambda: driver.is_idle(stream), "the end of a stream", limit_s, pause_s=0.0002)


def open_sender(driver: CudaDriver, streams: Streams, peer: Peer, num_slots: int) -> tuple[RingSender, HostBoard, int]:
    board = HostBoard(driver, peer.share(ring_signal_bytes(num_slots)), num_signals(num_slots), "ring")
    stream = streams.get(Role.PUSH)
    ring = RingSender(driver, board, stream, peer.tell, f"ring to {peer.name}")
    ring.on_record(peer.take())
    return ring, board, stream


def open_receiver(
    driver: CudaDriver, peer: Peer, num_slots: int, slot_bytes: int
) -> tuple[RingReceiver, HostBoard, Pool]:
    pool = Pool(driver)
    board = HostBoard(driver, peer.shared(), num_signals(num_slots), "ring")
    ring = RingReceiver(
        driver, pool, board, peer.tell, f"ring of {peer.name}", num_slots=num_slots, slot_bytes=slot_bytes
    )
    return ring, board, pool


def ring_sends(peers: dict[int, Peer], device: int, other: int, num_values: int, num_slots: int) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    ring, board, stream = open_sender(driver, streams, peer, num_slots)
    sender = TensorSender(driver, ring)
    for index, num in enumerate(lengths(num_values, 1)):
        tensor = value(index, num, device)
        if index % 5 == 4:  # every other word of a longer tensor
            tensor = torch.stack((tensor, -tensor), dim=1)[:, 0]
        while not sender.try_send(tensor):
            ring.on_record(peer.take())
        peer.drain(ring.on_record)
    wait_idle(driver, stream)
    statistics = ring.statistics()
    peer.drain(ring.on_record)
    sender.close()
    board.close()
    streams.close()
    peer.meet()
    return {"statistics": statistics, "held": driver.ledger.held()}


def ring_receives(peers: dict[int, Peer], device: int, other: int, num_values: int, num_slots: int) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    ring, board, pool = open_receiver(driver, peer, num_slots, 4096)
    receiver = TensorReceiver(ring)
    wrong = torch.zeros((), dtype=torch.int64, device=f"cuda:{device}")
    kept: list[tuple[int, torch.Tensor]] = []
    rng = random.Random(2)
    for index, num in enumerate(lengths(num_values, 1)):
        while not isinstance(record := peer.take(), Enqueued):
            ring.on_record(record)
        tensor = receiver.accept(record, (num,), torch.int64)
        wrong += (tensor != value(index, num, device)).sum()
        if rng.random() < 0.3:
            kept.append((index, tensor))
        del tensor
        while len(kept) > 3:
            before, tensor = kept.pop(0)
            wrong += (tensor != value(before, tensor.numel(), device)).sum()
            del tensor
    for before, tensor in kept:
        wrong += (tensor != value(before, tensor.numel(), device)).sum()
        del tensor
    kept.clear()
    ring.close()

    def listen() -> None:
        if peer.has_record(0.01):
            ring.on_record(peer.take())
        ring.collect()

    until(lambda: ring.is_empty, "the return of the slots", then=listen)
    num_wrong = int(wrong)
    statistics = ring.statistics()
    board.close()
    pool.close()
    streams.close()
    peer.meet()
    return {
        "num_wrong": num_wrong,
        "num_copied_out": receiver.num_copied_out,
        "statistics": statistics,
        "held": driver.ledger.held(),
    }


def staged_sends(
    peers: dict[int, Peer], device: int, other: int, num_values: int, layout: StagedLayout
) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    own = staged_streams(streams, Role.UP)
    sender = StagedSender(driver, peer.share(layout.size_bytes), layout, own, peer.tell, "staged")
    peer.meet()
    ready = driver.create_event()
    for index, num in enumerate(lengths(num_values, 3)):
        tensor = value(index, num, device)
        driver.record_event(ready, torch.cuda.current_stream().cuda_stream)
        sender.send(tensor.data_ptr(), tensor.numel() * 8, ready=ready, keep=tensor)
        peer.drain(sender.on_record)
    while not sender.is_flushed:
        sender.on_record(peer.take())
    for stream in streams.all():
        wait_idle(driver, stream)
    sender.collect()
    peer.meet()
    sender.close()
    driver.destroy_event(ready)
    streams.close()
    return {"held": driver.ledger.held()}


def staged_receives(
    peers: dict[int, Peer], device: int, other: int, num_values: int, layout: StagedLayout
) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    own = staged_streams(streams, Role.DOWN)
    memory = peer.shared()
    receiver = StagedReceiver(driver, memory, layout, own, peer.tell, "staged")
    peer.meet()
    wrong = torch.zeros((), dtype=torch.int64, device=f"cuda:{device}")
    ready = driver.create_event()
    compute = torch.cuda.current_stream().cuda_stream
    for index, num in enumerate(lengths(num_values, 3)):
        while receiver.next_bytes is None:
            receiver.on_record(peer.take())
        tensor = torch.full((num,), -1, dtype=torch.int64, device=f"cuda:{device}")
        driver.record_event(ready, compute)
        receiver.receive(tensor.data_ptr(), ready=ready)
        while not receiver.is_enqueued:
            receiver.on_record(peer.take())
        receiver.join(compute)
        wrong += (tensor != value(index, num, device)).sum()
    num_wrong = int(wrong)
    for stream in streams.all():
        wait_idle(driver, stream)
    peer.meet()
    receiver.close()
    driver.destroy_event(ready)
    streams.close()
    return {"num_wrong": num_wrong, "held": driver.ledger.held()}


def captured_sends(peers: dict[int, Peer], device: int, other: int, num_replays: int, num: int) -> dict[str, Any]:
    """Replays: make the next value, wait ``free``, copy, set ``full``."""
    driver, streams = start(device)
    peer = peers[other]
    board = HostBoard(driver, peer.share(4096), 2, "captured")
    full, free = board.signal(0, "full"), board.signal(1, "free")
    board.poke(1, 1)
    push = streams.get(Role.PUSH)
    main: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    source = torch.zeros(num, dtype=torch.int64, device=f"cuda:{device}")
    source.add_(1)
    source.zero_()
    there = OpenedMemory(driver, peer.get(), num * 8, "slot")
    peer.meet()
    torch.cuda.synchronize()

    def body() -> None:
        with torch.cuda.stream(main):
            source.add_(1)
        free.wait(main.cuda_stream)
        driver.copy(there.address, source.data_ptr(), num * 8, main.cuda_stream)
        full.set(main.cuda_stream)

    replay = capture(driver, main.cuda_stream, body, [])
    launches_us = []
    for _ in range(num_replays):
        begin = time.perf_counter_ns()
        replay.launch(main.cuda_stream)
        launches_us.append((time.perf_counter_ns() - begin) / 1e3)
        peer.tell(Enqueued(0, 0, num * 8))
        record = peer.take()
        assert isinstance(record, FreeEnqueued)
    wait_idle(driver, main.cuda_stream, 60)
    peer.meet()
    replay.close()
    there.close()
    board.close()
    streams.close()
    del push
    return {"held": driver.ledger.held(), "launches_us": launches_us}


def captured_receives(peers: dict[int, Peer], device: int, other: int, num_replays: int, num: int) -> dict[str, Any]:
    """Replays: wait ``full``, compare with what is due, poison the slot, set ``free``."""
    driver, streams = start(device)
    peer = peers[other]
    pool = Pool(driver)
    block = pool.take(num * 8, "slot", "test")
    board = HostBoard(driver, peer.shared(), 2, "captured")
    full, free = board.signal(0, "full"), board.signal(1, "free")
    peer.put(block.handle)
    main: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    from crossfade.device.borrowed import tensor_on

    slot = tensor_on(block.address, (num,), torch.int64, device)
    slot.fill_(-7)
    due = torch.zeros((), dtype=torch.int64, device=f"cuda:{device}")
    wrong = torch.zeros((), dtype=torch.int64, device=f"cuda:{device}")

    def compute() -> None:
        due.add_(1)
        wrong.add_((slot != due).sum())
        slot.fill_(-7)

    with torch.cuda.stream(main):
        compute()
    torch.cuda.synchronize()
    due.zero_()
    wrong.zero_()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    peer.meet()
    with torch.cuda.graph(graph, stream=main, capture_error_mode="thread_local"):
        full.wait(main.cuda_stream)
        compute()
        free.set(main.cuda_stream)
    launches_us = []
    for _ in range(num_replays):
        record = peer.take()
        assert isinstance(record, Enqueued)
        with torch.cuda.stream(main):
            begin = time.perf_counter_ns()
            graph.replay()
            launches_us.append((time.perf_counter_ns() - begin) / 1e3)
        peer.tell(FreeEnqueued(0, 0))
    wait_idle(driver, main.cuda_stream, 60)
    num_wrong, num_due = int(wrong), int(due)
    peer.meet()
    graph.reset()
    board.close()
    block.release()
    pool.close()
    streams.close()
    return {"num_wrong": num_wrong, "num_due": num_due, "held": driver.ledger.held(), "launches_us": launches_us}
