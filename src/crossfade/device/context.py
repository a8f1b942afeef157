"""What the channels of one process share on one of its devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from crossfade.device.driver import HOST, TimedDriver
from crossfade.device.memory import Pool
from crossfade.device.streams import Role, Streams
from crossfade.device.tensors import current_stream

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class DeviceContext:
    """A device as the channels of this process use it."""

    driver: TimedDriver  # where it is the CPU (`HOST`), its tensors are CPU tensors
    pool: Pool
    streams: Streams  # for copies

    @property
    def device(self) -> int:
        """The device's index as torch counts in this process, or `HOST`."""
        return self.driver.device

    @property
    def is_host(self) -> bool:
        return self.driver.device == HOST

    def compute_stream(self) -> int:
        """The stream on which torch computes now, in this thread."""
        return current_stream(self.driver.device)

    def is_idle(self) -> bool:
        """Whether nothing is left to do on torch's current stream of this thread, or on any of ours: what waits for the device, as
        giving up pinned memory does, then waits for nobody's host.
        """
        return all(map(self.driver.is_idle, (self.compute_stream(), *self.streams.all())))

    @property
    def push_stream(self) -> int:
        """Copies to other devices."""
        return self.streams.get(Role.PUSH)

    @property
    def up_stream(self) -> int:
        """Copies to the host."""
        return self.streams.get(Role.UP)

    @property
    def down_stream(self) -> int:
        """Copies from the host."""
        return self.streams.get(Role.DOWN)


def source_of(homes: Sequence[DeviceContext]) -> Callable[[torch.Tensor], int | None]:
    """From which of these devices a tensor goes to others: its own, if it is one of them."""
    sources: dict[int, int] = {}
    for source, home in enumerate(homes):
        sources.setdefault(home.device, source)

    def of(tensor: torch.Tensor) -> int | None:
        device = tensor.device
        if device.type == "cpu":
            return sources.get(HOST)
        return sources.get(device.index) if device.type == "cuda" else None

    return of
