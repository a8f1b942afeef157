"""The GPUs of a host and what lies between them: plain data, in and out of JSON.

Devices are known by UUID, which stays the same whatever CUDA_VISIBLE_DEVICES says. Rates are in GB/s (10^9 bytes a second), times
in microseconds. What was not measured is empty.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

__all__ = ["Device", "Link", "LinkKind", "Rate", "Slowdown", "Topology"]

_VERSION = 1


class LinkKind(StrEnum):
    """How two devices reach each other."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    HOST = "host"
    """Only through the host's memory."""


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU.

    Attributes:
        uuid: as nvidia-smi shows it.
        name: its model.
        num_sms: multiprocessors.
        memory_bytes: all of its memory.
    """

    uuid: str
    name: str
    num_sms: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Rate:
    """How long one transfer of one size took by one means.

    Attributes:
        transport: ``copy``, ``staged`` or ``nccl``.
        size_bytes: how much was moved.
        duration_us: how long it took.
    """

    transport: str
    size_bytes: int
    duration_us: float

    @property
    def rate_gbs(self) -> float:
        """Bytes over time."""
        return self.size_bytes / self.duration_us / 1e3


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one device to another.

    Attributes:
        source, target: UUIDs.
        kind: what it is made of.
        rates: what was measured, alone; those of one transport from the smallest size on.
    """

    source: str
    target: str
    kind: LinkKind
    rates: tuple[Rate, ...] = ()

    def duration_us(self, transport: str, size_bytes: int) -> float | None:
        """How long a transfer takes: between two measured sizes in proportion, beyond them at the outermost rate. None if
        unmeasured.
        """
        rates = [rate for rate in self.rates if rate.transport == transport]
        if not rates:
            return None
        place = bisect_left([rate.size_bytes for rate in rates], size_bytes)
        if place == 0:
            return rates[0].duration_us
        below = rates[place - 1]
        if place == len(rates):
            return below.duration_us * size_bytes / below.size_bytes
        above = rates[place]
        share = (size_bytes - below.size_bytes) / (above.size_bytes - below.size_bytes)
        return below.duration_us + share * (above.duration_us - below.duration_us)


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer two things take side by side than alone.

    Attributes:
        transport: what communicates.
        work: what computes beside it: ``gemm`` or ``memory``.
        communication: factor on the transfer, at least about 1.
        computation: factor on the work.
    """

    transport: str
    work: str
    communication: float
    computation: float


@dataclass(frozen=True, slots=True)
class Topology:
    """A host's devices and links.

    Attributes:
        devices: in the order in which they were seen.
        links: one for each ordered pair.
        slowdowns: what was measured.
    """

    devices: tuple[Device, ...] = ()
    links: tuple[Link, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()

    def link(self, source: str, target: str) -> Link:
        """The way from one device to another.

        Raises:
            KeyError: there is none.
        """
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise KeyError(
            f"no link from {source} to {target}; known devices: {', '.join(device.uuid for device in self.devices)}"
        )

    def with_link(self, link: Link) -> Topology:
        """The same with one link replaced."""
        others = tuple(each for each in self.links if (each.source, each.target) != (link.source, link.target))
        return replace(self, links=(*others, link))

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: it is something else.
        """
        try:
            data = json.loads(text)
            if data["version"] != _VERSION:
                raise ValueError(f"version {data['version']}, and this crossfade reads {_VERSION}")
            return cls(
                tuple(Device(**each) for each in data["devices"]),
                tuple(_link(each) for each in data["links"]),
                tuple(Slowdown(**each) for each in data["slowdowns"]),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"this is no topology: {error!r}\nhint: write a new one with `crossfade topology`"
            ) from None


def _link(data: Mapping[str, Any]) -> Link:
    rates = tuple(sorted((Rate(**each) for each in data["rates"]), key=lambda rate: (rate.transport, rate.size_bytes)))
    return Link(data["source"], data["target"], LinkKind(data["kind"]), rates)
