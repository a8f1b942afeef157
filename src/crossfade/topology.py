"""The GPUs of a host and what lies between them: plain data, in and out of JSON, and the file in which it is kept.

A topology may describe a cluster too (`crossfade.cluster`): then what was measured stands for each of its hosts.

Devices are known by UUID, which stays the same whatever CUDA_VISIBLE_DEVICES says. Rates are in GB/s (10^9 bytes a second), times
in microseconds. What was not measured is empty.
"""

from __future__ import annotations

import platform
import warnings
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from crossfade.cluster import Cluster, HostGroup, LinkKind, Placement, groups_from_data, placement_from_data
from crossfade.figures import check_figure, parsed, written
from crossfade.files import cache_folder, replace_file
from crossfade.hints import nearest

__all__ = [
    "Crowd",
    "Device",
    "Launch",
    "Link",
    "LinkKind",
    "Rate",
    "Slowdown",
    "Topology",
    "load_topology",
    "save_topology",
    "topology_path",
]

_VERSION = 1
_OF_CLUSTERS = ("hosts", "placement")
_ENDLESS_BYTES = 1 << 50
"""More than any value has: figures of a cluster are lines up to there."""

_Part = TypeVar("_Part")


_NEW_ONE = "write a new one with `crossfade topology`"


def _no_topology(reason: str) -> ValueError:
    return ValueError(f"this is no topology: {reason}\nhint: {_NEW_ONE}")


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU."""

    uuid: str  # as nvidia-smi shows it
    name: str
    num_sms: int
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Rate:
    """How long one transfer of one size took by one means."""

    transport: str  # ``copy``, ``staged`` or ``nccl``
    size_bytes: int
    duration_us: float

    def __post_init__(self) -> None:
        check_figure("Rate.size_bytes", self.size_bytes, 1)
        check_figure("Rate.duration_us", self.duration_us, 1e-9)

    @property
    def rate_gbs(self) -> float:
        """Bytes over time."""
        return self.size_bytes / self.duration_us / 1e3


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one device to another."""

    # source, target: UUIDs.
    source: str
    target: str
    kind: LinkKind  # what it is made of
    rates: tuple[Rate, ...] = ()  # what was measured, alone; those of one transport from the smallest size on
    # from the write of a signal on a stream of the source until a stream of the target that waited continues.
    signal_us: float | None = None

    def __post_init__(self) -> None:
        if self.signal_us is not None:
            check_figure("Link.signal_us", self.signal_us)

    @property
    def transports(self) -> tuple[str, ...]:
        """Those that were measured."""
        return tuple(dict.fromkeys(rate.transport for rate in self.rates))

    def with_rates(self, rates: Iterable[Rate]) -> Link:
        """The same with these rates, in the place of older ones of the same transport and size."""
        merged = {(rate.transport, rate.size_bytes): rate for rate in (*self.rates, *rates)}
        return replace(self, rates=tuple(merged[key] for key in sorted(merged)))

    def duration_us(self, transport: str, size_bytes: int) -> float | None:
        """How long a transfer takes: in proportion between two measured sizes, else at the outermost rate. None if unmeasured."""
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
    """How much longer two things take side by side than alone."""

    transport: str  # what communicates
    work: str  # what computes beside it: ``gemm`` or ``memory``
    communication: float  # factor on the transfer, at least about 1
    computation: float  # factor on the work

    def __post_init__(self) -> None:
        check_figure("Slowdown.communication", self.communication)
        check_figure("Slowdown.computation", self.computation)


@dataclass(frozen=True, slots=True)
class Crowd:
    """Several transfers of one size that begin at the same time."""

    transport: str  # what moves them
    transfers: tuple[tuple[str, str], ...]  # (source, target) of each, as UUIDs
    size_bytes: int  # of each
    duration_us: float  # until the last one is done

    def __post_init__(self) -> None:
        check_figure("Crowd.size_bytes", self.size_bytes)
        check_figure("Crowd.duration_us", self.duration_us, 1e-9)

    @property
    def rate_gbs(self) -> float:
        """Bytes of one transfer over the time of all."""
        return self.size_bytes / self.duration_us / 1e3

    @property
    def most_out(self) -> int:
        """Transfers that leave the device which most leave."""
        return max(Counter(source for source, _ in self.transfers).values(), default=0)

    @property
    def most_in(self) -> int:
        """Transfers that reach the device which most reach."""
        return max(Counter(target for _, target in self.transfers).values(), default=0)


@dataclass(frozen=True, slots=True)
class Launch:
    """What it costs a host to enqueue one operation."""

    device: str  # UUID of the device whose process it is
    operation: str  # ``copy``, ``write``, ``wait``, ``record``, ``wait event``, ``kernel`` or ``graph``
    duration_us: float  # of the host's time

    def __post_init__(self) -> None:
        check_figure("Launch.duration_us", self.duration_us)


@dataclass(frozen=True)
class Topology:
    """A host's devices and links, or hosts of a cluster. In a cluster, GPUs have the names that `Cluster.gpu_names` says."""

    devices: tuple[Device, ...] = ()  # in the order in which they were seen
    links: tuple[Link, ...] = ()  # one for each ordered pair
    slowdowns: tuple[Slowdown, ...] = ()  # communication and computation side by side
    crowds: tuple[Crowd, ...] = ()  # several transfers at once
    launches: tuple[Launch, ...] = ()  # what enqueuing costs
    hosts: tuple[HostGroup, ...] = ()  # of a cluster, of each of which the above holds; empty for this host alone
    placement: Placement = field(default_factory=Placement)  # which actor is on which of them

    @cached_property
    def cluster(self) -> Cluster:
        """The hosts, one by one."""
        return Cluster(self.hosts)

    @cached_property
    def _between(self) -> dict[tuple[str, str], Link]:
        return {(link.source, link.target): link for link in self.links}

    def index(self, uuid: str) -> int:
        """A device's place in ``devices``."""
        for index, device in enumerate(self.devices):
            if device.uuid == uuid:
                return index
        raise KeyError(f"no device {uuid}; known devices: {', '.join(device.uuid for device in self.devices)}")

    def link(self, source: str, target: str) -> Link:
        """The way from one device to another."""
        link = self._between.get((source, target))
        if link is None and self.hosts:
            link = self._between[source, target] = self._link_in_cluster(source, target)
        if link is None:
            known = ", ".join(device.uuid for device in self.devices)
            raise KeyError(f"no link from {source} to {target}; known devices: {known}")
        return link

    def _link_in_cluster(self, source: str, target: str) -> Link:
        """Between two hosts as described; within one as described, else as measured between the GPUs of the same positions."""
        ends = [self.cluster.gpu_index[name] for name in (source, target)]
        hosts = [self.cluster.of_gpu[gpu] for gpu in ends]
        if hosts[0] is not hosts[1]:
            networks = [host.group.network for host in hosts]
            rates = _line(("nccl",), max(each.latency_us for each in networks), min(each.gbs for each in networks))
            return Link(source, target, LinkKind.NETWORK, rates)
        described = hosts[0].group.gpu_link
        if described is not None:
            rates = _line(("copy", "nccl", "staged"), described.latency_us, described.gbs)
            return Link(source, target, described.kind, rates, signal_us=0.0)
        positions = [gpu - host.first_gpu for gpu, host in zip(ends, hosts, strict=True)]
        if max(positions) >= len(self.devices):
            raise KeyError(f"no link was measured, and none described, between GPUs {positions[0]} and {positions[1]}")
        measured = self._between[self.devices[positions[0]].uuid, self.devices[positions[1]].uuid]
        return replace(measured, source=source, target=target)

    def with_link(self, link: Link) -> Topology:
        """The same with one link replaced, in its place, or added."""
        return replace(self, links=_with(self.links, link, "source", "target"))

    def with_slowdown(self, slowdown: Slowdown) -> Topology:
        """The same with one pair of factors replaced or added."""
        return replace(self, slowdowns=_with(self.slowdowns, slowdown, "transport", "work"))

    def with_crowd(self, crowd: Crowd) -> Topology:
        """The same with one crowd replaced or added."""
        return replace(self, crowds=_with(self.crowds, crowd, "transport", "transfers", "size_bytes"))

    def with_launch(self, launch: Launch) -> Topology:
        """The same with one cost replaced or added."""
        return replace(self, launches=_with(self.launches, launch, "device", "operation"))

    def to_json(self) -> str:
        """Text that `from_json` reads."""
        return written(self.to_data())

    def to_data(self) -> dict[str, Any]:
        """What JSON can hold, and `from_data` reads."""
        data = {"version": _VERSION, **asdict(self)}
        return data if self.hosts else {name: part for name, part in data.items() if name not in _OF_CLUSTERS}

    @classmethod
    def from_json(cls, text: str) -> Topology:
        """Reads what `to_json` wrote, or what a person wrote of a cluster."""
        return cls.from_data(
            parsed(text, "topology", f"the file is JSON: docs/clusters.md describes a cluster's; or {_NEW_ONE}")
        )

    @classmethod
    def from_data(cls, data: Any) -> Topology:
        """Reads what `to_data` gave. What describes a cluster may leave out what was measured."""
        try:
            is_cluster = isinstance(data, dict) and "hosts" in data
            if is_cluster:
                data = _with_nothing_measured(data)
            if data["version"] != _VERSION:
                raise ValueError(f"version {data['version']}, and this crossfade reads {_VERSION}")
            topology = cls(
                tuple(Device(**each) for each in data["devices"]),
                tuple(_link(each) for each in data["links"]),
                tuple(Slowdown(**each) for each in data["slowdowns"]),
                tuple(_crowd(each) for each in data["crowds"]),
                tuple(Launch(**each) for each in data["launches"]),
                groups_from_data(data["hosts"]) if is_cluster else (),
                placement_from_data(data["placement"]) if is_cluster else Placement(),
            )
            _check_parts(topology)
        except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
            raise _no_topology(repr(error)) from None
        return topology


def _with_nothing_measured(data: dict[str, Any]) -> dict[str, Any]:
    """The data of a cluster with what it leaves out. Refuses names that mean nothing."""
    names = [item.name for item in fields(Topology)]
    for name in data:
        if name not in ("version", *names):
            hint = nearest(name, names, f"a file of a cluster has version, {', '.join(names)}")
            raise ValueError(f"the file has {name!r}, which means nothing there\nhint: {hint}")
    if "version" not in data:
        raise ValueError(f'the file does not say its version\nhint: write "version": {_VERSION} into it')
    return {**{name: [] for name in names}, "placement": {}, **data}


def _line(transports: Iterable[str], latency_us: float, gbs: float) -> tuple[Rate, ...]:
    """Rates on a line: a fixed time, and a rate for every further byte."""
    longest = latency_us + _ENDLESS_BYTES / (gbs * 1e3)
    points = ((1, max(latency_us, 1e-9)), (_ENDLESS_BYTES, longest))
    return tuple(Rate(transport, size, time_us) for transport in transports for size, time_us in points)


def _with(parts: tuple[_Part, ...], new: _Part, *key: str) -> tuple[_Part, ...]:
    """The parts with a new one in the place of that with the same key, if there is one, else behind them."""
    key_of = attrgetter(*key)
    return tuple({key_of(part): part for part in (*parts, new)}.values())


def _link(data: Mapping[str, Any]) -> Link:
    link = Link(data["source"], data["target"], LinkKind(data["kind"]), signal_us=data["signal_us"])
    return link.with_rates(Rate(**each) for each in data["rates"])


def _crowd(data: Mapping[str, Any]) -> Crowd:
    transfers = tuple((source, target) for source, target in data["transfers"])
    return Crowd(data["transport"], transfers, data["size_bytes"], data["duration_us"])


def _check_parts(topology: Topology) -> None:
    """Refuses what the classes themselves let pass: names that are no text, or of devices that are not there."""
    rates = (rate for link in topology.links for rate in link.rates)
    measured: tuple[Any, ...] = (*topology.links, *rates, *topology.slowdowns, *topology.crowds, *topology.launches)
    for part in (*topology.devices, *measured):
        for item in fields(part):
            name, value = f"{type(part).__name__}.{item.name}", getattr(part, item.name)
            if item.type == "str":
                _check_text(name, value)
            elif item.type == "int":
                _check_whole(name, value)
    uuids = {device.uuid for device in topology.devices}
    if len(uuids) < len(topology.devices):
        raise _no_topology("two devices have one UUID")
    ends = [end for link in topology.links for end in (("Link.source", link.source), ("Link.target", link.target))]
    ends += [("an end of Crowd.transfers", end) for each in topology.crowds for pair in each.transfers for end in pair]
    for name, uuid in (*ends, *(("Launch.device", launch.device) for launch in topology.launches)):
        _check_text(name, uuid)
        if uuid not in uuids:
            raise _no_topology(f"{name} is {uuid!r}, which is none of the devices")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise _no_topology(f"{name} is {value!r}, which is no text")


def _check_whole(name: str, value: object) -> None:
    check_figure(name, value)
    if not isinstance(value, int):
        raise _no_topology(f"{name} is {value!r}, which is no whole number")


def topology_path() -> Path:
    """Where this host's measured topology is kept: in the user's cache folder, under the host's name."""
    return cache_folder() / f"topology-{platform.node() or 'host'}.json"


def load_topology(path: Path | None = None) -> Topology | None:
    """Reads a kept topology; None where there is none, or no home for one. A damaged one is warned of and counts as none."""
    if path is None:
        try:
            path = topology_path()
        except RuntimeError:
            return None
    try:
        return Topology.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        warnings.warn(f"{path} is ignored: {reason}; `crossfade topology` writes a new one", stacklevel=2)
        return None


def save_topology(topology: Topology, path: Path | None = None) -> Path:
    """Writes a topology by `replace_file`, and returns the path.

    Without a path it is `topology_path`, whose folder is made.
    """
    if path is None:
        path = topology_path()
        path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, f"{topology.to_json()}\n")
    return path
