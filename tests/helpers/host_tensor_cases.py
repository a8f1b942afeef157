"""Workers that send CPU tensors through rings of `HostDriver`, as GPU tensors go through those of a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from crossfade.device.records import Enqueued
from tests.helpers.device_pair import Peer
from tests.helpers.host_cases import end_receiving, end_sending, open_receiver, open_sender, until_sent
from tests.helpers.ring_tensors import TensorReceiver, TensorSender

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
    for tensor in tensors(num):
        until_sent(peer, ring, partial(sender.try_send, tensor))
    peer.drain(ring.on_record)
    end_sending(peer, end, sender)
    return {"held": end.held()}


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
    end_receiving(peer, end, ring)
    return {
        "num_wrong": int(num_wrong),
        "num_held": num_held,
        "num_leased": num_leased,
        "num_copied_out": receiver.num_copied_out,
        "held": end.held(),
    }
