"""The streams and events of one group on its device. On the CPU there is no stream: each call is done when it returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from crossfade.device.borrowed import device_of
from crossfade.device.context import DeviceContext


class GroupStreams:
    """The stream on which a group's tensors are moved, and one more for results that are only forwarded."""

    def __init__(self, context: DeviceContext, label: str) -> None:
        self.context = context
        self.device = device_of(context.device)
        self.driver = context.driver
        self._label = label
        self.exchange = self.driver.create_stream(f"collectives of {label}", is_urgent=True)
        self._torch: Any = None if context.is_host else _as_torch(self.exchange, context.device)
        self._forwarding: int | None = None
        self._spare_events: list[int] = []

    def current(self) -> AbstractContextManager[Any]:
        """Makes the group's stream torch's current one."""
        return nullcontext() if self._torch is None else torch.cuda.stream(self._torch)

    def enter_thread(self) -> None:
        """Called first in a thread that is to use the device."""
        torch.cuda.set_device(self.context.device)  # does nothing for the CPU
        self.driver.enter_thread()

    def forwarding(self) -> tuple[int, Callable[[], AbstractContextManager[None]]] | None:
        """The stream of forwarded results, and what makes it torch's current one; None where there are no streams."""
        if self._torch is None:
            return None
        if self._forwarding is None:
            self._forwarding = self.driver.create_stream(f"what leaves collectives of {self._label}")
        stream = _as_torch(self._forwarding, self.context.device)
        return self._forwarding, lambda: torch.cuda.stream(stream)

    def mark(self, stream: int) -> int:
        """An event behind all that was enqueued on a stream."""
        try:
            event = self._spare_events.pop()
        except IndexError:
            event = self.driver.create_event()
        self.driver.record_event(event, stream)
        return event

    def give_back(self, *events: int) -> None:
        """These events are not used any more; 0 stands for none."""
        self._spare_events += filter(None, events)

    def uses(self, tensor: torch.Tensor, stream: int) -> None:
        """Tells torch that a tensor of the group's stream is used on another one."""
        if self._torch is not None:
            tensor.record_stream(_as_torch(stream, self.context.device))

    def close(self) -> None:
        """Destroys all of them; every event was given back."""
        while self._spare_events:
            self.driver.destroy_event(self._spare_events.pop())
        for stream in (self.exchange, self._forwarding):
            if stream is not None:
                self.driver.destroy_stream(stream)


def _as_torch(stream: int, device: int) -> Any:
    return torch.cuda.ExternalStream(stream, device=device)  # type: ignore[no-untyped-call]
