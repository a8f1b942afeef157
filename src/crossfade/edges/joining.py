"""Puts values together of a message and the tensors that came apart from it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from crossfade.channels.values.device_codec import OpenLanes, join
from crossfade.channels.values.tensors import Place
from crossfade.device.recorded import Site
from crossfade.edges.host_copies import CopiesIn, HostCopies
from crossfade.errors import DeviceError

__all__ = ["Joiner", "no_lanes"]


class Joiner:
    """Puts the values of one reader together. ``copies`` brings CPU tensors, which lie in the message, to the reader's device; None
    where they are wanted on the CPU.
    """

    def __init__(self, copies: HostCopies | None) -> None:
        self.copies = copies
        self.brought = Site()  # what ``copies`` enqueued, for its recorder

    def join(self, message: memoryview, open_lanes: OpenLanes, is_private: bool) -> object:
        """The value of a message; the tensors apart are made by what ``open_lanes`` gives. Raises what unpickling raised, or a
        ValueError when the message is damaged.
        """
        if self.copies is None:
            return join(message, open_lanes, private=_itself if is_private else bytearray, shared=memoryview.toreadonly)
        # Their memory is not pinned, so each is copied to memory that is, and from there by the engine.
        copies, copies_in = self.copies, CopiesIn(self.copies, self.brought.around)
        try:
            return join(message, open_lanes, private=_bring(copies, copies_in), shared=memoryview.toreadonly)
        finally:
            if copies_in.sources:  # torch's current stream waits, and what they read from is kept until they are done
                copies.publisher.submit((copies_in.end(),), _nothing, keep=copies_in.sources)


def no_lanes(notes: memoryview) -> Callable[..., torch.Tensor]:
    """For `Joiner.join` of a value that has no tensors apart."""
    raise ValueError("a value has no lanes")


def _bring(copies: HostCopies, copies_in: CopiesIn) -> Callable[[memoryview], Place]:
    def place(data: memoryview) -> Place:
        def make(dtype: torch.dtype, shape: tuple[int, ...], was_on_device: bool) -> torch.Tensor:
            tensor = copies.empty(dtype, shape)
            if tensor.nbytes != data.nbytes:
                raise ValueError(f"a tensor of shape {shape} and {dtype} does not have {data.nbytes} bytes")
            if data.nbytes:
                copies_in.add(tensor, copies.pinned(data))
            return tensor

        return make

    return place


def _itself(view: memoryview) -> memoryview:
    return view


def _nothing(error: DeviceError | None) -> None:
    """What the job keeps is released."""
