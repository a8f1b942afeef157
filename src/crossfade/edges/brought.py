"""CPU tensors of a message, brought to the device of who reads it."""

from __future__ import annotations

import torch

from crossfade.channels.values.tensors import Place
from crossfade.device.recorded import Begin
from crossfade.edges.host_copies import CopiesIn, HostCopies
from crossfade.errors import DeviceError

__all__ = ["Brought"]


class Brought:
    """The tensors of one value. Their memory is not pinned, so each is copied to memory that is, and from there by the engine.

    Args:
        copies: brings them.
        begin: who records that.
    """

    def __init__(self, copies: HostCopies, begin: Begin | None = None) -> None:
        self._copies = copies
        self._copies_in = CopiesIn(copies, begin)

    def place(self, data: memoryview) -> Place:
        """For `crossfade.channels.values.codec.decode`: what makes a tensor of a buffer."""

        def make(dtype: torch.dtype, shape: tuple[int, ...], was_on_device: bool) -> torch.Tensor:
            tensor = self._copies.empty(dtype, shape)
            if tensor.nbytes != data.nbytes:
                raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {data.nbytes} bytes")
            if data.nbytes:
                self._copies_in.add(tensor, self._copies.pinned(data))
            return tensor

        return make

    def end(self) -> None:
        """All are enqueued: torch's current stream waits for them, and what they read from is kept until they are done."""
        if self._copies_in.sources:
            self._copies.publisher.submit((self._copies_in.end(),), _nothing, keep=self._copies_in.sources)


def _nothing(error: DeviceError | None) -> None:
    """What the job holds is let go of."""
