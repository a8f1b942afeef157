"""Edges whose tensors a user-defined communicator moves (`crossfade.graph.communicators`).

The message goes through the ring in shared memory, with dtype and shape of each tensor. The reader takes it and at once calls
``recv`` for each tensor; the writer, after it sees that the message was taken, calls ``send`` for each. So an actor that is in a
call waits only for an actor that is about to make the matching call. A value without tensors, or a `Failure`, uses the ring alone.

Closing keeps this order: the writer withdraws its last message or, if the reader has already taken it, still sends its tensors.

An error that a communicator raises breaks the channel, since it is not known what the other side has received.

Imported only where torch is installed.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from crossfade.channels.shm_reader import ShmReader
from crossfade.channels.shm_ring import ShmWriter
from crossfade.channels.values.codec import undecodable
from crossfade.channels.values.device_codec import Placed, Split, Splitter, notes_of, places_of
from crossfade.edges.arrivals import Coming
from crossfade.edges.carrier import Incoming, Outgoing
from crossfade.edges.host_copies import Joiner
from crossfade.errors import ChannelBroken, Failure
from crossfade.host.semaphore import open_semaphore


def call(communicator: Any, method: str, what: str, *args: Any) -> Any:
    """Calls a method of a user-defined communicator, for ``what`` (named in the error if it is not empty). Raises a `ChannelBroken`
    if the method raised an error.
    """
    try:
        return getattr(communicator, method)(*args)
    except Exception as error:
        traceback.print_exc()
        name = f"{type(communicator).__name__}.{method}"
        reason = f"{name} raised {type(error).__name__}: {error}"
        raise ChannelBroken(f"{what} is broken: {reason}" if what else reason) from error


class OutgoingByCommunicator(Outgoing):
    """The writer's side, for one reader. Tensors on another kind of device than ``device`` stay in the message."""

    ring: ShmWriter

    def __init__(self, ring: ShmWriter, communicator: Any, peer: int, device: str) -> None:
        self.ring = ring
        self._communicator = communicator
        self._peer = peer
        self._splitter = Splitter(lambda tensor: 0 if tensor.device.type == device else None, note=_layouts)
        self._items = open_semaphore(ring.base + ring.layout.items(0))
        self._unsent: Sequence[torch.Tensor] = ()

    def split(self, value: object) -> Split:
        return self._splitter.split(value)

    def try_send(self, parts: Split) -> bool:
        """`is_flushed` sends the tensors."""
        self.ring.stage(parts.message)
        self.ring.publish()
        self._unsent = [each.tensor.detach() for each in parts.tensors if each.size_bytes]
        return True

    def is_flushed(self) -> bool:
        """Once the reader has taken the message, this blocks until the communicator has sent the tensors."""
        while self._unsent and not self._items._is_zero():
            self.ring.raise_if_ended()
            if self.ring.is_wanting:
                return False
            self.ring.ask_to_be_rung()  # and check once more before returning
        self._send()
        return True

    def _send(self) -> None:
        tensors, self._unsent = self._unsent, ()
        for tensor in tensors:
            call(self._communicator, "send", f"channel {self.ring.name}", tensor, self._peer)

    def leave(self) -> None:
        """If the reader has taken the message, its tensors are sent first."""
        if self._unsent and not (self._items.acquire(False) or self.ring.is_other_gone):
            with suppress(ChannelBroken):
                self._send()
        self._unsent = ()
        self.ring.leave()


def _layouts(tensors: Sequence[Placed]) -> bytearray:
    """Returns the pickled dtype and shape of each tensor that has any elements."""
    return bytearray(
        pickle.dumps([(each.tensor.dtype, tuple(each.tensor.shape)) for each in tensors if each.size_bytes])
    )


class IncomingByCommunicator(Incoming):
    """The reader's side. ``device`` is where tensors are allocated."""

    def __init__(self, name: str, communicator: Any, peer: int, device: str) -> None:
        self._name = name
        self._joiner = Joiner(None)
        self.brought = self._joiner.brought
        self._communicator = communicator
        self._peer = peer
        self._device = device

    def decode(self, ring: ShmReader, message: memoryview, slot: int | None, is_private: bool) -> object:
        if notes_of(message) is None:
            return self._joiner.join(message, is_private)
        return Coming(message, is_private, {})

    def finish(self, coming: Coming) -> object:
        """Blocks until the communicator has received the tensors."""
        layouts = pickle.loads(notes_of(coming.message) or b"")
        places = [offset for _, offset, size_bytes in places_of(coming.message) if size_bytes]
        tensors: dict[int, Any] = {}
        for place, (dtype, shape) in zip(places, layouts, strict=True):
            args = shape, dtype, self._peer, self._allocate
            tensors[place] = call(self._communicator, "recv", f"channel {self._name}", *args)
        for place, (dtype, shape) in zip(places, layouts, strict=True):
            if (wrong := _misfit(tensors[place], dtype, shape)) is not None:
                error = TypeError(f"{type(self._communicator).__name__}.recv gave {wrong}, not a {dtype} {shape}")
                return Failure.capture(error, actor="", node=f"receiving the value of {self._name}")

        def make(lane: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
            return tensors[offset] if torch.Size(shape).numel() else self._allocate(shape, dtype)

        try:
            return self._joiner.join(coming.message, coming.is_private, lambda _: make)
        except Exception as error:
            return undecodable(error, self._name)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


def _misfit(tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    """Describes what was received if it differs from what was sent; None if it is right."""
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    return None if (tensor.dtype, tuple(tensor.shape)) == (dtype, shape) else f"a {tensor.dtype} {tuple(tensor.shape)}"
