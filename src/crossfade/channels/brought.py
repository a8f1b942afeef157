"""CPU tensors of a message, brought to the device of who reads it."""

from __future__ import annotations

from typing import Any

import torch

from crossfade.channels.host_copies import HostCopies
from crossfade.channels.tensors import Place
from crossfade.errors import DeviceError

__all__ = ["Brought"]


class Brought:
    """The tensors of one value. Their memory is not pinned, so each is copied to memory that is, and from there by the engine.

    Args:
        copies: brings them.
    """

    def __init__(self, copies: HostCopies) -> None:
        self._copies = copies
        self._sources: list[Any] = []  # what copies read from

    def place(self, data: memoryview) -> Place:
        """For `crossfade.channels.codec.decode`: what makes a tensor of a buffer."""

        def make(dtype: torch.dtype, shape: tuple[int, ...], was_on_device: bool) -> torch.Tensor:
            tensor = self._copies.empty(dtype, shape)
            if tensor.nbytes != data.nbytes:
                raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {data.nbytes} bytes")
            if data.nbytes:
                source = self._copies.pinned(data)
                self._sources.append((source, tensor) if self._copies.home.is_host else source)
                self._copies.copy_in(tensor, source)
            return tensor

        return make

    def end(self) -> None:
        """All are enqueued: torch's current stream waits for them, and what they read from is kept until they are done."""
        if self._sources:
            self._copies.publisher.submit((self._copies.end_copies_in(),), _nothing, keep=self._sources)


def _nothing(error: DeviceError | None) -> None:
    """What the job holds is let go of."""
