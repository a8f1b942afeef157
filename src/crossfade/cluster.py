"""The hosts of a cluster, as a person describes them: how many, what is in each, what lies between them, which actor goes where.

Plain data, in and out of JSON as a part of a `crossfade.topology.Topology`. Like hosts are one group: group ``node`` of 64 has the
hosts ``node0`` to ``node63``, and GPU 5 of ``node3`` is called ``node3/gpu5``. Rates are in GB/s (10^9 bytes a second), times in
microseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from crossfade.figures import arguments_of, check_figure, check_whole

__all__ = [
    "Cluster",
    "GpuLink",
    "Host",
    "HostGroup",
    "LinkKind",
    "Network",
    "Placement",
    "Places",
    "Rule",
    "groups_from_data",
    "placement_from_data",
]

MOST_HOSTS = 100_000


@dataclass(frozen=True, slots=True)
class Places:
    """Where the parties of a graph are."""

    hosts: Mapping[str, str] = field(default_factory=dict)  # the host of each party
    gpus: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # indices of the GPUs of the actors that have any


_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*\Z")
_HINT = "docs/clusters.md describes the file of a cluster"


class LinkKind(StrEnum):
    """How two devices reach each other."""

    NVLINK = "nvlink"
    PCIE = "pcie"
    HOST = "host"
    """Only through the host's memory."""
    NETWORK = "network"
    """They are in different hosts."""


class Rule(StrEnum):
    """How actors that nobody placed find a host, in the order in which they were made."""

    PACK = "pack"
    """The first host with room: GPUs, and for actors without GPUs a core."""
    SPREAD = "spread"
    """The host with room that has fewest actors."""


@dataclass(frozen=True, slots=True)
class GpuLink:
    """What connects each two GPUs of a host."""

    gbs: float  # of one transfer, alone
    latency_us: float = 10.0  # until the first byte can be used
    kind: LinkKind = LinkKind.NVLINK

    def __post_init__(self) -> None:
        check_figure("GpuLink.gbs", self.gbs, 1e-9)
        check_figure("GpuLink.latency_us", self.latency_us)
        if self.kind is LinkKind.NETWORK:
            raise ValueError(
                f"GpuLink.kind is {str(self.kind)!r}\nhint: between GPUs of one host it is nvlink, pcie or host"
            )


@dataclass(frozen=True, slots=True)
class Network:
    """What connects a host to all others. What leaves by one NIC at the same time shares it, and what arrives likewise."""

    gbs: float  # of each NIC, in each direction
    latency_us: float = 20.0  # from one host to another
    num_nics: int = 1  # of a host; its GPUs, and its actors without GPUs, are dealt out to them in order

    def __post_init__(self) -> None:
        check_figure("Network.gbs", self.gbs, 1e-9)
        check_figure("Network.latency_us", self.latency_us)
        check_whole("Network.num_nics", self.num_nics, 1)


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Hosts that are alike."""

    network: Network
    num_cores: int  # of each host
    num: int = 1  # how many hosts
    num_gpus: int = 0  # of each host
    gpu_link: GpuLink | None = None  # None: as measured on a host, else the cost model's figures
    name: str = "host"  # the hosts are called host0, host1, ...

    def __post_init__(self) -> None:
        check_whole("HostGroup.num", self.num, 1)
        check_whole("HostGroup.num_cores", self.num_cores, 1)
        check_whole("HostGroup.num_gpus", self.num_gpus, 0)
        name: object = self.name  # as a file has it
        if not (isinstance(name, str) and _NAME.match(name)):
            raise ValueError(f"HostGroup.name is {self.name!r}\nhint: letters of ASCII, digits, _ and -, such as node")


@dataclass(frozen=True, slots=True)
class Placement:
    """Which actor is on which host."""

    rule: Rule = Rule.PACK  # for those that are not in ``hosts``, and among the hosts that it gives
    # for an actor's name, or a pattern of such (``Loader*``), a host's name or a pattern of such. The first that fits counts.
    hosts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        given: Mapping[Any, Any] = self.hosts
        for actor, host in given.items():
            if not (isinstance(actor, str) and isinstance(host, str)):
                raise ValueError(
                    f"Placement.hosts has {actor!r}: {host!r}\nhint: names, or patterns such as 'Loader*': 'cpu*'"
                )


@dataclass(frozen=True, slots=True)
class Host:
    """One of the hosts."""

    name: str
    index: int  # among all hosts
    group: HostGroup
    first_gpu: int  # the index of its first GPU among those of all hosts

    @property
    def gpus(self) -> range:
        """Indices of its GPUs among those of all hosts."""
        return range(self.first_gpu, self.first_gpu + self.group.num_gpus)

    def nic(self, position: int, of: int) -> str:
        """The name of the NIC that the GPU, or the actor, at a position among so many uses."""
        num_nics = self.group.network.num_nics
        return self.name if num_nics == 1 else f"{self.name}.nic{position * num_nics // max(of, num_nics) % num_nics}"


class Cluster:
    """All hosts of some groups, in order, and their GPUs."""

    def __init__(self, groups: Sequence[HostGroup]) -> None:
        self.hosts: list[Host] = []
        self.of_gpu: list[Host] = []  # the host of each GPU
        for group in groups:
            for number in range(group.num):
                host = Host(f"{group.name}{number}", len(self.hosts), group, len(self.of_gpu))
                self.hosts.append(host)
                self.of_gpu += [host] * group.num_gpus
        self.by_name = {host.name: host for host in self.hosts}
        self.gpu_names = [f"{host.name}/gpu{gpu - host.first_gpu}" for gpu, host in enumerate(self.of_gpu)]
        self.gpu_index = {name: gpu for gpu, name in enumerate(self.gpu_names)}

    def nic_of_gpu(self, gpu: int) -> str:
        """The NIC by which a GPU reaches other hosts."""
        host = self.of_gpu[gpu]
        return host.nic(gpu - host.first_gpu, host.group.num_gpus)


def groups_from_data(data: Any) -> tuple[HostGroup, ...]:
    """Reads the groups of a file: a list of objects, or one of them."""
    listed = data if isinstance(data, list) else [data]
    groups = tuple(_group(each, f"hosts[{place}]") for place, each in enumerate(listed))
    if not 0 < sum(group.num for group in groups) <= MOST_HOSTS:
        raise ValueError(
            f"the file has no hosts, or over {MOST_HOSTS:,}\nhint: 'num' of a group says how many hosts it has"
        )
    seen: set[str] = set()
    for host in Cluster(groups).hosts:
        if host.name in seen:
            raise ValueError(f"two hosts are called {host.name!r}\nhint: give each group a 'name' of its own")
        seen.add(host.name)
    return groups


def placement_from_data(data: Any) -> Placement:
    """Reads the placement of a file: an object, or the name of a rule."""
    if isinstance(data, str):
        data = {"rule": data}
    figures = arguments_of(Placement, data, "placement", _HINT)
    if "rule" in figures:
        figures["rule"] = _member(Rule, figures["rule"], "placement.rule")
    if not isinstance(figures.get("hosts", {}), dict):
        raise ValueError(f"placement.hosts is {figures['hosts']!r}\nhint: an object of actors and hosts")
    return Placement(**figures)


def _group(data: Any, where: str) -> HostGroup:
    figures = arguments_of(HostGroup, data, where, _HINT)
    figures["network"] = Network(**arguments_of(Network, figures["network"], f"{where}.network", _HINT))
    link = figures.get("gpu_link")
    if link is not None:
        of_link = arguments_of(GpuLink, link, f"{where}.gpu_link", _HINT)
        if "kind" in of_link:
            of_link["kind"] = _member(LinkKind, of_link["kind"], f"{where}.gpu_link.kind")
        figures["gpu_link"] = GpuLink(**of_link)
    return HostGroup(**figures)


def _member(kind: type[LinkKind] | type[Rule], value: Any, where: str) -> Any:
    if value not in [str(each) for each in kind]:
        raise ValueError(f"{where} is {value!r}\nhint: one of {', '.join(kind)}")
    return kind(value)
