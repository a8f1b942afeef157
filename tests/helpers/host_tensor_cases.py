"""Workers that send CPU tensors through rings of `HostDriver`, as GPU tensors go through those of a GPU."""

from __future__ import annotations

from typing import Any

import torch

from crossfade.device.records import Enqueued
from crossfade.device.tensors import TensorReceiver, TensorSender
from tests.helpers.device_pair import Peer
from tests.helpers.host_cases import PAUSE_S, close_down, open_receiver, open_sender, until

SHAPES = ((3,), (), (0, 4), (50, 70), (1000, 300), (2, 2), (400_000,))
DTYPES = (torch.float32, torch.int64, torch.bfloat16, torch.bool)


def tensors(num: int) -> list[torch.Tensor]:
    """Of several types and shapes; every third one is not contiguous."""
    made = []
    for index in range(num):
        shape, dtype = SHAPES[index % len(SHAPES)], DTYPES[index % len(DTYPES)]
        tensor = torch.arange(index, index + torch.Size(shape).numel()).view(shape).to(dtype)
        made.append(torch.stack((tensor, tensor), -1)[..., 0] if index % 3 == 2 else tensor)
    return made


def sends(peers: dict[int, Peer], other: int, num: int, num_slots: int) -> dict[str, Any]:
    peer = peers[other]
    end, ring = open_sender(peer, num_slots)
    sender = TensorSender(end.driver, ring)

    def listen() -> None:
        if peer.has_record(PAUSE_S):
            ring.on_record(peer.take())

    for tensor in tensors(num):
        until(lambda tensor=tensor: sender.try_send(tensor), "a credit", listen)  # type: ignore[misc]
    peer.drain(ring.on_record)
    sender.close()
    end.board.close()
    peer.meet()
    return {"held": end.driver.ledger.held()}


def receives(peers: dict[int, Peer], other: int, num: int, num_slots: int, num_kept: int) -> dict[str, Any]:
    peer = peers[other]
    end, ring = open_receiver(peer, num_slots)
    receiver = TensorReceiver(ring)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    num_wrong = num_held = 0
    for expected in tensors(num):
        while not isinstance(record := peer.take(), Enqueued):
            ring.on_record(record)
        got = receiver.accept(record, tuple(expected.shape), expected.dtype)
        num_wrong += not torch.equal(got, expected)
        kept.append((got.view(-1)[:1] if got.numel() else got, expected))  # any view keeps the slot
        del got
        num_held = max(num_held, ring.statistics().num_leased)
        while len(kept) > num_kept:
            first, expected = kept.pop(0)
            num_wrong += first.numel() > 0 and not torch.equal(first[0], expected.reshape(-1)[0])
            del first
        ring.collect()
    kept.clear()
    num_leased = ring.statistics().num_leased
    ring.close()
    until(lambda: ring.is_empty, "the return of the slots", lambda: close_down(peer, ring))
    end.board.close()
    end.pool.close()
    peer.meet()
    return {
        "num_wrong": int(num_wrong),
        "num_held": num_held,
        "num_leased": num_leased,
        "num_copied_out": receiver.num_copied_out,
        "held": end.driver.ledger.held(),
    }
