"""Workers that exchange values through a shared-memory ring, with a device on either side: a GPU, or the CPU in its place."""

from __future__ import annotations

import os
import random
import select
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from crossfade.channels.protocol import EMPTY, Reader, Writer
from crossfade.channels.ring_layout import RingBlock, RingLayout, format_ring
from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.device.borrowed import device_of
from crossfade.device.context import DeviceContext
from crossfade.device.driver import HOST, Driver
from crossfade.device.host_driver import HostDriver
from crossfade.edges.by_host import open_from_host, open_to_host
from crossfade.edges.host_copies import HostCopies
from crossfade.errors import ChannelBroken
from crossfade.host.memory import Heap
from crossfade.host.processes import open_pidfd
from tests.helpers.bells import new_bell
from tests.helpers.device_pair import LIMIT_S, Peer, die_after, run_workers
from tests.helpers.footprint import counts_more, footprint
from tests.helpers.host_rings import home_on
from tests.helpers.waiting import take, until

NO_DEVICE = -2
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64)
SHAPES = ((3,), (), (0, 4), (50, 70), (2, 2), (300_000,))

ALL_DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def driver_of(device: int) -> Driver:
    if device == HOST:
        return HostDriver(LIMIT_S)
    from crossfade.device.cuda import CudaDriver

    torch.cuda.set_device(device)
    torch.zeros(1, device=f"cuda:{device}")
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    torch.cuda.set_stream(stream)  # as an actor computes on a stream that is not the default one
    return CudaDriver(device)


def reference(index: int) -> dict[str, Any]:
    """What the index-th value must be, on the CPU."""
    draw = random.Random(index)
    found = []
    for _ in range(draw.randrange(1, 4)):
        shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
        found.append((torch.arange(torch.Size(shape).numel()) + index).remainder(100).view(shape).to(dtype))
    return {"index": index, "tensors": tuple(found), "array": np.full(draw.choice((3, 3000)), index)}


def value(index: int, device: int) -> Any:
    """The same where it is made; every fifth is a plain number."""
    if index % 5 == 4:
        return index
    made = reference(index)
    cpu = torch.arange(index)
    if device >= 0:
        made["tensors"] = tuple(tensor.to(device_of(device)) for tensor in made["tensors"])
    return {**made, "cpu": cpu}


def is_right(got: Any, index: int, on: str) -> bool:
    """Whether a value came whole, and its tensors to where they were wanted."""
    if index % 5 == 4:
        return bool(got == index)
    expected = reference(index)
    pairs = zip(got["tensors"], expected["tensors"], strict=True)
    return (
        got["index"] == index
        and np.array_equal(got["array"], expected["array"])
        and torch.equal(got["cpu"].cpu(), torch.arange(index))
        and all(tensor.device.type == on and _same(tensor.cpu(), other) for tensor, other in pairs)
    )


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.dtype is not other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


@contextmanager
def device_side(device: int) -> Iterator[tuple[DeviceContext, HostCopies] | None]:
    """What an actor with a device has; closed at the end, with nothing left."""
    if device == NO_DEVICE:
        yield None
        return
    driver: Any = driver_of(device)
    home, bell = home_on(driver), new_bell()
    copies = HostCopies([home], bell)
    yield home, copies
    until(copies.close, "the end of all copies")
    until(lambda: all(map(driver.is_idle, home.streams.all())), "the end of all streams")
    home.streams.close()
    home.pool.close()
    bell.close()


def held(side: tuple[DeviceContext, HostCopies] | None) -> list[str]:
    return [] if side is None else side[0].driver.ledger.held()


def open_writer(peer: Peer, depth: int, side: tuple[DeviceContext, HostCopies] | None) -> Writer:
    layout = RingLayout(depth, 1)
    board_memory, heap = peer.share(layout.size_bytes), peer.share(0)
    block = RingBlock(board_memory.map(layout.size_bytes), 0, layout)
    format_ring(*block)
    peer.meet()
    args = "c", block, Heap(heap), [new_bell()]
    return ShmWriter(*args) if side is None else open_to_host(*args, side[1], actor="A", node="A.f")


def open_reader(peer: Peer, depth: int, side: tuple[DeviceContext, HostCopies] | None, onto: str) -> Reader:
    layout = RingLayout(depth, 1)
    board_memory, heap = peer.shared(), peer.shared()
    block = RingBlock(board_memory.map(layout.size_bytes), 0, layout)
    peer.meet()
    args = "c", block, 0, heap, new_bell()
    return ShmReader(*args) if side is None else open_from_host(*args, side[1], onto)


def writes(peers: dict[int, Peer], other: int, device: int, num: int, depth: int, polls: bool) -> dict[str, Any]:
    """Writes ``num`` values; with ``polls`` it looks itself for what is pending, else its thread does."""
    peer = peers[other]
    with device_side(device) as side:
        writer = open_writer(peer, depth, side)
        for index in range(num):
            made = value(index, device)
            until(lambda made=made: writer.try_write(made), "room")  # type: ignore[misc]
            if polls and side is not None:
                side[1].poll()
        until(writer.try_flush, "the last value")
        peer.meet()
        writer.close()
    return {"held": held(side)}


def reads(
    peers: dict[int, Peer], other: int, device: int, num: int, depth: int, onto: str, on: str, num_kept: int
) -> dict[str, Any]:
    """Looks at each value when it comes and when it is let go of."""
    peer = peers[other]
    kept: list[tuple[int, Any]] = []
    num_wrong = 0
    with device_side(device) as side:
        reader = open_reader(peer, depth, side, onto)
        for index in range(num):
            kept.append((index, take(reader)))
            num_wrong += not is_right(kept[-1][1], index, on)
            while len(kept) > num_kept:
                first, got = kept.pop(0)
                num_wrong += not is_right(got, first, on)
                del got
        kept.clear()
        peer.meet()
        statistics = reader.statistics()
        reader.close()
    return {"num_wrong": num_wrong, "num_values": statistics.num_values, "held": held(side)}


def check(num: int, depth: int, source: tuple[int, bool], target: tuple[int, str, str, int]) -> None:
    """Values between two processes. ``source``: device and ``polls``; ``target``: device, ``onto``, ``on`` and ``num_kept``."""
    (device, polls), (other, *wanted) = source, target
    sent, got = run_workers([writes, reads], [(1, device, num, depth, polls), (0, other, num, depth, *wanted)])
    assert got == {"num_wrong": 0, "num_values": num, "held": []}
    assert sent == {"held": []}


def dies_writing(peers: dict[int, Peer], other: int, device: int, seed: int) -> None:
    peer = peers[other]
    with device_side(device) as side:
        writer = open_writer(peer, 2, side)
        until(lambda: writer.try_write(value(0, device)), "room")
        die_after(seed)
        index = 1
        while True:
            if writer.try_write(value(index, device)):
                index += 1


def dies_reading(peers: dict[int, Peer], other: int, device: int, seed: int) -> None:
    peer = peers[other]
    with device_side(device) as side:
        reader = open_reader(peer, 2, side, "cuda")
        take(reader)
        die_after(seed)
        while True:
            take(reader)


def survives(peers: dict[int, Peer], other: int, device: int, is_writer: bool) -> dict[str, Any]:
    """Goes on until the other side is found dead, then closes with whatever is pending."""
    peer = peers[other]
    pidfd = open_pidfd(peer.pid)
    death = select.poll()
    death.register(pidfd, select.POLLIN)
    num_wrong = index = 0
    before, text = None, ""
    with device_side(device) as side:
        end: Any = open_writer(peer, 2, side) if is_writer else open_reader(peer, 2, side, "default")
        try:
            while True:
                if index == 1 and before is None:
                    before = footprint(os.getpid())
                if death.poll(0):
                    end.break_off(f"{peer.name} died")
                if is_writer:
                    index += bool(end.try_write(value(index, device)))
                    continue
                got = end.try_read()
                if got is not EMPTY:
                    num_wrong += not is_right(got, index, "cpu" if device < 0 else "cuda")
                    index += 1
                    del got
        except ChannelBroken as error:
            text = str(error)
        end.close()
    os.close(pidfd)
    grown = counts_more(before) if before is not None else {}
    grown.pop("num_ring_mappings", None)  # slots that were made after the first value
    return {"error": text, "num_wrong": num_wrong, "held": held(side), "grown": grown}
