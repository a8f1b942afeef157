"""torch tensors through a ring by itself, without the messages of an edge."""

from __future__ import annotations

import torch

from crossfade.device.borrowed import tensor_on
from crossfade.device.driver import Driver
from crossfade.device.records import Enqueued
from crossfade.device.ring_receiver import Leased, RingReceiver
from crossfade.device.ring_sender import RingSender
from crossfade.device.tensors import current_stream


class TensorSender:
    """Sends tensors through a ring: packs them where that is needed, on torch's current stream."""

    def __init__(self, driver: Driver, ring: RingSender) -> None:
        self._driver = driver
        self.ring = ring
        self._ready = driver.create_event()

    def try_send(self, tensor: torch.Tensor) -> bool:
        """Enqueues a tensor that torch's current stream computes; False if no slot may be filled yet."""
        if not self.ring.can_send(tensor.numel() * tensor.itemsize):
            return False
        packed = tensor.contiguous()
        self._driver.record_event(self._ready, current_stream(self._driver.device))
        return self.ring.try_send(packed.data_ptr(), packed.numel() * packed.itemsize, ready=self._ready, keep=packed)

    def close(self) -> None:
        """Closes the ring's end, whose stream must have finished."""
        self.ring.close()
        self._driver.destroy_event(self._ready)


class TensorReceiver:
    """Receives tensors through a ring: as views on their slots, or copied out when leases run short."""

    def __init__(self, ring: RingReceiver) -> None:
        self.ring = ring
        self.num_copied_out = 0

    def accept(self, record: Enqueued, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor, ready for use on torch's current stream. Its slot is free when the last view of it dies."""
        device = self.ring.driver.device
        stream = current_stream(device)
        lease = self.ring.accept_at(record.generation, record.slot, record.size_bytes, stream, Leased)
        view = tensor_on(lease.address, shape, dtype, device, keep=lease)
        if not view.numel():
            lease.release()
        if not lease.is_short:
            return view
        self.num_copied_out += 1
        return view.clone()
