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
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch

from crossfade.channels.shm_ring import ShmReader, ShmWriter
from crossfade.channels.values.codec import is_plain, undecodable
from crossfade.channels.values.device_codec import Placed, Splitter, join, notes_of, places_of
from crossfade.errors import ChannelBroken, CrossfadeError, Failure
from crossfade.host.semaphore import open_semaphore

__all__ = ["CommunicatorReader", "CommunicatorWriter", "call"]


def call(communicator: Any, method: str, what: str, *args: Any) -> Any:
    """Calls a method of a user-defined communicator, for ``what`` (named in the error if it is not empty).

    Raises:
        ChannelBroken: the method raised an error.
    """
    try:
        return getattr(communicator, method)(*args)
    except Exception as error:
        traceback.print_exc()
        name = f"{type(communicator).__name__}.{method}"
        reason = f"{name} raised {type(error).__name__}: {error}"
        raise ChannelBroken(f"{what} is broken: {reason}" if what else reason) from error


class CommunicatorWriter(ShmWriter):
    """The writing end of a channel with one reader.

    Args:
        *args: see `ShmWriter`.
        communicator: moves the tensors.
        peer: the reader's rank.
        device: the kind of device whose tensors it moves; tensors on other devices stay in the message.
        distrust: returns an error if values may be wrong, else None; must not wait. None if values can always be trusted.
    """

    def __init__(
        self,
        *args: Any,
        communicator: Any,
        peer: int,
        device: str,
        distrust: Callable[[], CrossfadeError | None] | None,
    ) -> None:
        super().__init__(*args)
        self._communicator = communicator
        self._peer = peer
        self._distrust = distrust
        self._splitter = Splitter(lambda tensor: 0 if tensor.device.type == device else None, note=_layouts)
        self._items = open_semaphore(self._base + self.layout.items(0))
        self._unsent: Sequence[torch.Tensor] = ()

    def try_write(self, value: object) -> bool:
        """See the protocol. `try_flush` sends the tensors."""
        if self._distrust is not None and (error := self._distrust()) is not None:
            self.break_off(str(error))
        if type(value) is Failure or is_plain(value):
            return super().try_write(value)
        if not self.has_room():
            return False
        parts = self._splitter.split(value)
        self.stage(parts.message)
        self.publish()
        self._unsent = [each.tensor.detach() for each in parts.tensors if each.size_bytes]
        return True

    def try_flush(self) -> bool:
        """See the protocol. Once the reader has taken the message, this blocks until the communicator has sent the tensors."""
        while self._unsent and not self._items._is_zero():
            self._raise_if_ended()
            if self._is_wanting:
                return False
            self.ask_to_be_rung()  # and check once more before returning
        self._send()
        return True

    def _send(self) -> None:
        tensors, self._unsent = self._unsent, ()
        for tensor in tensors:
            call(self._communicator, "send", f"channel {self.name}", tensor, self._peer)

    def close(self) -> None:
        """See the protocol. If the reader has taken the message, its tensors are sent first."""
        if self._unsent and not (self._items.acquire(False) or self._state[self._gone]):
            with suppress(ChannelBroken):
                self._send()
        self._unsent = ()
        super().close()


def _layouts(tensors: Sequence[Placed]) -> bytearray:
    """Returns the pickled dtype and shape of each tensor that has any elements."""
    return bytearray(
        pickle.dumps([(each.tensor.dtype, tuple(each.tensor.shape)) for each in tensors if each.size_bytes])
    )


class _Coming:
    """A message that was read, and whose tensors are still to be received."""

    __slots__ = ("message", "private")

    def __init__(self, message: memoryview, private: Callable[[memoryview], object]) -> None:
        self.message = message
        self.private = private


class CommunicatorReader(ShmReader):
    """The reading end of a channel.

    Args:
        *args: see `ShmReader`.
        communicator: moves the tensors.
        peer: the writer's rank.
        device: where tensors are allocated.
    """

    def __init__(self, *args: Any, communicator: Any, peer: int, device: str) -> None:
        super().__init__(*args)
        self._communicator = communicator
        self._peer = peer
        self._device = device

    def try_read(self) -> object:
        """See the protocol. Once it has taken a message with tensors, this blocks until the communicator has received them."""
        value = super().try_read()
        return self._received(value) if type(value) is _Coming else value

    def _decode(self, message: memoryview, private: Callable[[memoryview], object]) -> object:
        return super()._decode(message, private) if notes_of(message) is None else _Coming(message, private)

    def _received(self, coming: _Coming) -> object:
        layouts = pickle.loads(notes_of(coming.message) or b"")
        places = [offset for _, offset, size_bytes in places_of(coming.message) if size_bytes]
        tensors: dict[int, Any] = {}
        for place, (dtype, shape) in zip(places, layouts, strict=True):
            args = shape, dtype, self._peer, self._allocate
            tensors[place] = call(self._communicator, "recv", f"channel {self.name}", *args)
        for place, (dtype, shape) in zip(places, layouts, strict=True):
            if (wrong := _misfit(tensors[place], dtype, shape)) is not None:
                error = TypeError(f"{type(self._communicator).__name__}.recv gave {wrong}, not a {dtype} {shape}")
                return Failure.capture(error, actor="", node=f"receiving the value of {self.name}")

        def make(lane: int, offset: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
            return tensors[offset] if torch.Size(shape).numel() else self._allocate(shape, dtype)

        try:
            return join(coming.message, lambda _: make, private=coming.private, shared=memoryview.toreadonly)
        except Exception as error:
            return undecodable(error, self.name)

    def _allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)


def _misfit(tensor: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> str | None:
    """Describes what was received if it differs from what was sent; None if it is right."""
    if not isinstance(tensor, torch.Tensor):
        return repr(tensor)
    return None if (tensor.dtype, tuple(tensor.shape)) == (dtype, shape) else f"a {tensor.dtype} {tuple(tensor.shape)}"
