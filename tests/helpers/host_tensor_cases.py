"""Workers that send CPU tensors through rings of `HostDriver`, as GPU tensors go through those of a GPU."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import torch

from crossfade.channels.values.device_codec import Make, OpenLanes, Splitter, join
from crossfade.device.borrowed import tensor_on
from crossfade.device.driver import HOST
from crossfade.device.records import Enqueued
from crossfade.device.ring_receiver import Leased, RingReceiver
from crossfade.device.tensors import TensorReceiver, TensorSender, current_stream
from tests.helpers.device_pair import Peer
from tests.helpers.host_cases import PAUSE_S, end_receiving, end_sending, open_receiver, open_sender, until, until_sent

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


def random_value(index: int) -> Any:
    """A value of some tensors in containers, the same in both processes; every seventh has none."""
    draw = random.Random(index)
    if index % 7 == 6:
        return {"index": index, "error": ValueError(f"value {index}")}
    found = [tensor * (index + 1) for tensor in tensors(draw.randrange(1, 5)) if tensor.dtype is not torch.bool]
    return {"index": index, "first": found[0], "all": tuple(found), "mask": torch.ones(index + 1, dtype=torch.bool)}


def lane_of(tensor: torch.Tensor) -> int | None:
    """Masks stay in the message."""
    return None if tensor.dtype is torch.bool else 0


def is_equal(one: Any, other: Any) -> bool:
    if isinstance(other, torch.Tensor):
        return torch.equal(one, other) and one.dtype is other.dtype
    if isinstance(other, dict):
        return one.keys() == other.keys() and all(is_equal(one[key], other[key]) for key in other)
    if isinstance(other, tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return str(one) == str(other)


def sends_values(peers: dict[int, Peer], other: int, num: int, num_slots: int) -> dict[str, Any]:
    """A value is its message and, if it has any, the tensors beside it in one slot."""
    peer = peers[other]
    end, ring = open_sender(peer, num_slots)
    for index in range(num):
        parts = Splitter(lane_of).split(random_value(index))
        places = [(each.offset, each.tensor.data_ptr(), each.size_bytes) for each in parts.tensors]
        if places:
            until_sent(peer, ring, partial(ring.try_send_parts, places, keep=parts))
        peer.put((bool(places), parts.message.to_bytes()))
    peer.drain(ring.on_record)
    end_sending(peer, end, ring)
    return {"held": end.held()}


def receives_values(peers: dict[int, Peer], other: int, num: int, num_slots: int, num_kept: int) -> dict[str, Any]:
    """Keeps the last values, each on its slot until its last tensor dies, or copied out where leases run short."""
    peer = peers[other]
    end, ring = open_receiver(peer, num_slots, slot_bytes=0)
    kept: list[Any] = []
    num_wrong = num_held = num_copied_out = 0
    for index in range(num):
        is_beside, message = _message(peer, ring)
        short: list[bool] = []
        value = join(memoryview(bytearray(message)), _opener(peer, ring, short))
        if is_beside and short == [True]:
            num_copied_out += 1
            value = copy.deepcopy(value)
        num_wrong += not is_equal(value, random_value(index))
        kept.append((index, value))
        del value
        num_held = max(num_held, ring.statistics().num_leased)
        while len(kept) > num_kept:
            before, value = kept.pop(0)
            num_wrong += not is_equal(value, random_value(before))
            del value
        ring.collect()
    kept.clear()
    num_leased = ring.statistics().num_leased
    end_receiving(peer, end, ring)
    return {
        "num_wrong": num_wrong,
        "num_held": num_held,
        "num_leased": num_leased,
        "num_copied_out": num_copied_out,
        "held": end.held(),
    }


def _message(peer: Peer, ring: RingReceiver) -> Any:
    """The next message. What the sender says meanwhile that is no value (it wants longer slots) is seen to."""
    found: list[Any] = []

    def listen() -> None:
        _see_to(peer, ring)
        ring.collect()
        if peer.has_object(PAUSE_S):
            found.append(peer.get())

    until(lambda: bool(found), "a message", listen)
    return found[0]


_early: list[Enqueued] = []
"""Records of values whose messages are still to come."""


def _see_to(peer: Peer, ring: RingReceiver) -> None:
    while peer.has_record():
        record = peer.take()
        if isinstance(record, Enqueued):
            _early.append(record)
        else:
            ring.on_record(record)


def _opener(peer: Peer, ring: RingReceiver, short: list[bool]) -> OpenLanes:
    """What makes the tensors of the next value; all of them hold its lease, of which ``short`` notes whether it is short."""

    def opened(notes: memoryview) -> Make:
        until(lambda: bool(_early), "the record of a value", lambda: _see_to(peer, ring))
        record = _early.pop(0)
        lease = ring.accept_at(record.generation, record.slot, record.size_bytes, current_stream(HOST), Leased)
        short.append(lease.is_short)
        return lambda lane, offset, dtype, shape: tensor_on(lease.address + offset, shape, dtype, HOST, keep=lease)

    return opened
