"""Through the host: what the processes of ``benchmarks.device_copies`` do for GPUs that cannot reach each other."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.device_workers import MB, Gemms, Peers, elapsed_us, external, fill, init_nccl, is_filled, start
from crossfade.device.cuda import CudaDriver
from crossfade.device.staged import StagedReceiver, StagedSender
from crossfade.device.staged_layout import StagedLayout
from crossfade.device.streams import Role
from tests.helpers.device_cases import staged_streams


def staged_from(peers: Peers, device: int, other: int, layouts: list[StagedLayout], num_rounds: int) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    stream = streams.get(Role.UP, "pinned")
    source = torch.empty(64 * MB, dtype=torch.uint8, device=f"cuda:{device}")
    fill(source, 5)
    gemms = Gemms(device)
    out: dict[str, Any] = {"layouts": {}, **_pinned(driver, stream, source, is_up=True)}
    for layout in layouts:
        own = staged_streams(streams, Role.UP)
        sender = StagedSender(driver, peer.share(layout.size_bytes), layout, own, peer.tell, "staged")
        peer.meet()

        def send(num: int, sender: StagedSender = sender) -> None:
            for _ in range(num):
                sender.send(source.data_ptr(), 64 * MB)
            while not sender.is_flushed:
                sender.on_record(peer.take())

        begins = {}
        for num, with_gemms in ((1, False), (3, False), (3, True)):
            rows, times = [], []
            for _ in range(num_rounds + 2):
                torch.cuda.synchronize()
                peer.drain(sender.on_record)
                peer.meet()
                times.append(time.monotonic())
                worked = gemms.run() if with_gemms else None
                send(num)
                torch.cuda.synchronize()
                if worked:
                    rows.append(worked[0].elapsed_time(worked[1]) * 1e3)
            begins[f"{num}{' beside' if with_gemms else ''}"] = {"begin_s": times[2:], "GEMMs, us": rows[2:]}
        peer.meet()
        peer.drain(sender.on_record)
        sender.close()
        out["layouts"][str(layout)] = begins
    alone = []
    for _ in range(num_rounds + 2):
        peer.meet()
        worked = gemms.run()
        torch.cuda.synchronize()
        alone.append(worked[0].elapsed_time(worked[1]) * 1e3)
    out["GEMMs alone, us"] = alone[2:]
    return out


def staged_to(peers: Peers, device: int, other: int, layouts: list[StagedLayout], num_rounds: int) -> dict[str, Any]:
    driver, streams = start(device)
    peer = peers[other]
    stream = streams.get(Role.DOWN, "pinned")
    target = torch.empty(64 * MB, dtype=torch.uint8, device=f"cuda:{device}")
    gemms = Gemms(device)
    out: dict[str, Any] = {"layouts": {}, "values right": True, **_pinned(driver, stream, target, is_up=False)}
    for layout in layouts:
        own = staged_streams(streams, Role.DOWN)
        receiver = StagedReceiver(driver, peer.shared(), layout, own, peer.tell, "staged")
        peer.meet()
        ends = {}
        for num, with_gemms in ((1, False), (3, False), (3, True)):
            times = []
            for _ in range(num_rounds + 2):
                target.fill_(0xEE)
                torch.cuda.synchronize()
                peer.meet()
                if with_gemms:
                    gemms.run()
                for _ in range(num):
                    while receiver.next_bytes is None:
                        receiver.on_record(peer.take())
                    receiver.receive(target.data_ptr())
                    while not receiver.is_enqueued:
                        receiver.on_record(peer.take())
                for each in streams.all():
                    driver.synchronize(each)
                times.append(time.monotonic())
                torch.cuda.synchronize()
                out["values right"] &= is_filled(target, 5)
            ends[f"{num}{' beside' if with_gemms else ''}"] = {"end_s": times[2:]}
        peer.meet()
        receiver.close()
        out["layouts"][str(layout)] = ends
    for _ in range(num_rounds + 2):
        peer.meet()
        gemms.run()
        torch.cuda.synchronize()
    return out


def _pinned(driver: CudaDriver, stream: int, tensor: torch.Tensor, *, is_up: bool) -> dict[str, list[float]]:
    """One copy of 64 MB between the device and pinned memory: the device's time, and the time on the host's clock from the call to
    the end, as values are measured here.
    """
    host = torch.empty(64 * MB, dtype=torch.uint8, pin_memory=True)
    ends = (host.data_ptr(), tensor.data_ptr()) if is_up else (tensor.data_ptr(), host.data_ptr())
    outside = external(stream, driver.device)
    device_us = [elapsed_us(outside, lambda: driver.copy(*ends, 64 * MB, stream)) for _ in range(10)]
    host_us = []
    for _ in range(10):
        begin = time.monotonic()
        driver.copy(*ends, 64 * MB, stream)
        driver.synchronize(stream)
        host_us.append((time.monotonic() - begin) * 1e6)
    return {"pinned, us": device_us[2:], "pinned on the host's clock, us": host_us[2:]}


def nccl_without_peers(peers: Peers, device: int, other: int, num_rounds: int, store: str) -> dict[str, Any]:
    """NCCL with its peer access switched off: one 64 MB value from 0 to 1, and three of them beside ten GEMMs."""
    dist = init_nccl(device, store, {"NCCL_P2P_DISABLE": "1"})
    peer = peers[other]
    tensor = torch.empty(64 * MB, dtype=torch.uint8, device=f"cuda:{device}")
    gemms = Gemms(device)
    side: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    if device == 0:
        fill(tensor, 5)
    out: dict[str, Any] = {}
    is_right = True
    for num, with_gemms in ((1, False), (3, False), (3, True)):
        times, rows = [], []
        for _ in range(num_rounds + 2):
            if device:
                tensor.fill_(0xEE)
            torch.cuda.synchronize()
            peer.meet()
            begin = time.monotonic()
            worked = gemms.run() if with_gemms else None
            with torch.cuda.stream(side):
                for _ in range(num):
                    works = dist.batch_isend_irecv(
                        [dist.P2POp(dist.isend if device == 0 else dist.irecv, tensor, other)]
                    )
                    for work in works:
                        work.wait()
            side.synchronize()
            times.append(begin if device == 0 else time.monotonic())
            torch.cuda.synchronize()
            if worked:
                rows.append(worked[0].elapsed_time(worked[1]) * 1e3)
            is_right &= is_filled(tensor, 5)
        name = f"{num}{' beside' if with_gemms else ''}"
        out[name] = {"begin_s" if device == 0 else "end_s": times[2:], "GEMMs, us": rows[2:]}
    out["values right"] = is_right
    peer.meet()
    dist.destroy_process_group()
    return out
