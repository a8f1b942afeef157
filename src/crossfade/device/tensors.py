"""torch tensors through a ring, and the kernels that pack and copy them.

Imported only where torch is used. ``cuda.bindings`` moves bytes; what needs a kernel (a tensor that is not contiguous, a copy
inside one GPU, where copy engines are slow) is torch's own copy. Loading a kernel waits for the device, and hangs while a stream
waits for a signal of a host that is busy loading: `load_kernels` does it beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import TYPE_CHECKING

from crossfade.device.borrowed import tensor_on, torch_or_raise
from crossfade.device.driver import HOST, Driver
from crossfade.device.records import Enqueued
from crossfade.device.ring_receiver import Leased, RingReceiver
from crossfade.device.ring_sender import RingSender

if TYPE_CHECKING:
    import torch


def current_stream(device: int) -> int:
    """The stream on which torch computes now; 0 for the host, where the caller is the stream."""
    return 0 if device == HOST else _raw_stream()(device)


def stream_getter(device: int) -> Callable[[], int]:
    """`current_stream` of one device, for callers that ask often."""
    return (lambda: 0) if device == HOST else partial(_raw_stream(), device)


@cache
def _raw_stream() -> Callable[[int], int]:
    """What gives the stream's handle without making a stream object, which takes ten times as long."""
    torch = torch_or_raise()
    quick: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return quick or (lambda device: int(torch.cuda.current_stream(device).cuda_stream))


def load_kernels(dtypes: Iterable[torch.dtype], device: int) -> None:
    """Runs, and thereby loads, torch's copy kernels for tensors of these types that are not contiguous, and waits for them."""
    torch = torch_or_raise()
    for dtype in dtypes:
        for shape in ((8, 8), (4, 4, 4), (2, 2, 2, 2)):
            tensor = torch.zeros(shape, dtype=dtype, device=f"cuda:{device}")
            tensor.transpose(0, -1).contiguous()
            tensor[..., ::2].contiguous()
            torch.empty_like(tensor).copy_(tensor)
    torch.cuda.synchronize(device)


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
