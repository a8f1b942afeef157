"""The few streams that crossfade makes on a device.

Streams are not free: they are spread over a small number of hardware queues, and two that share one run one after another. So each
device has one stream for each thing that must not wait for the others, made once.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from crossfade.device.driver import Driver

if TYPE_CHECKING:
    import torch


class Role(StrEnum):
    """What a stream is for."""

    PUSH = "push"  # copies to peers
    UP = "up"  # device to host: staged copies, and values for parties without a device
    DOWN = "down"  # host to device: staged copies, and values of parties without a device
    NCCL = "nccl"  # NCCL's transfers, one for each link


class Streams:
    """A device's streams, each made when first asked for; copies go ahead of computation where the device knows priorities."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._streams: dict[tuple[Role, str], int] = {}

    def get(self, role: Role, peer: str = "") -> int:
        """The stream for a role; with ``peer``, one of its own for what goes to or comes from that peer."""
        key = (role, peer)
        if key not in self._streams:
            self._streams[key] = self._driver.create_stream(f"{role} {peer}".rstrip(), is_urgent=True)
        return self._streams[key]

    def as_torch(self, role: Role, peer: str = "") -> torch.cuda.ExternalStream:
        import torch

        made: Any = torch.cuda.ExternalStream(self.get(role, peer), device=self._driver.device)  # type: ignore[no-untyped-call]
        return made  # type: ignore[no-any-return]

    def all(self) -> list[int]:
        return list(self._streams.values())

    def close(self) -> None:
        """Gives all of them back. Idempotent."""
        while self._streams:
            self._driver.destroy_stream(self._streams.popitem()[1])
