"""What things cost: the figures that the simulator and the scheduling passes use.

Times are in microseconds (us), sizes in bytes; 1 MB is 1e6 bytes and 1 GB/s moves 1e3 bytes in a microsecond. The
defaults are those of a virtual machine with two cores; calibration replaces them with measured ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields

from crossfade.figures import arguments_of, check_figure, check_whole, parsed, written
from crossfade.schedule import links
from crossfade.topology import Topology
from crossfade.types import CollectiveKind, Transport

BYTES_PER_MB = 1e6
BYTES_PER_US_AT_1_GBS = 1e3
LARGE_BYTES = 1_000
"""About the largest value that fits into a record of a ring."""
_PARTS = ("slowdown", "topology")
"""Fields of a cost model that are no figures."""
_HINT = "CostModel.to_json() gives one"


@dataclass(frozen=True, slots=True)
class Slowdown:
    """How much longer work takes while other work of the same actor is under way; 1.0 is no longer at all.

    Sharing of the cores is no part of these factors: the simulator computes that by itself. They stand for what is left: caches,
    memory bandwidth, power.
    """

    compute: float = 1.0
    """A method's time beside a background transfer of its actor, over its time alone."""
    transfer: float = 1.0
    """A background transfer's time beside a method that runs on one of its two actors, over its time alone."""

    def __post_init__(self) -> None:
        for name, factor in asdict(self).items():
            check_figure(f"Slowdown.{name}", factor, 1.0)


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the steps of a plan cost on one kind of machine.

    Raises:
        ValueError: a figure is negative or not finite, the bandwidth is 0, or there is no core.
    """

    write_us: float = 1.0
    """Fixed cost of writing a value into a shared-memory ring."""
    write_large_us: float = 8.0
    """What is added to ``write_us`` for a value over ``LARGE_BYTES``: its buffers are taken out and it needs a slot."""
    write_us_per_mb: float = 35.0
    """Cost of a written MB (one copy) on top of ``write_us``."""
    read_us: float = 0.6
    """Fixed cost of taking a value from a shared-memory ring."""
    read_large_us: float = 8.0
    """What is added to ``read_us`` for a value over ``LARGE_BYTES``: views on its slot are made."""
    read_us_per_mb: float = 0.0
    """Cost of a read MB; about 0, since a reader gets a view on the slot."""
    hop_us: float = 0.4
    """From the end of a write, or of a release, until a polling process on the other side sees it."""
    wake_us: float = 35.0
    """What is added to ``hop_us`` when that process had waited longer than ``spin_us`` and sleeps. It includes what the
    writer spends on waking it and what both lose to cold caches."""
    spin_us: float = 150.0
    """How long a process polls before it sleeps."""
    latency_us: float = 100.0
    """Fixed cost of one transfer by gloo: from both sides' readiness until the receiver's main thread has the value."""
    gbs: float = 2.5
    """Bandwidth of one transfer by gloo, in GB/s."""
    host_us: float = 40.0
    """What starting a send by gloo costs the main thread that starts it."""
    receive_host_us: float = 2.0
    """What starting a receive by gloo costs the main thread that starts it."""
    host_us_per_mb: float = 350.0
    """What a MB sent by gloo costs a core of the sender, in the background of its main thread, while the receiver's side
    of the transfer takes another core. Without a free core the transfer and all else take longer."""
    collective_us: float = 300.0
    """Fixed cost of a collective by gloo: from the last party's start until all have what they get."""
    push_host_us: float = 12.0
    """What handing a value to a GPU's copy engine costs the writer's host, for each reader: events, the copy, the signal."""
    accept_host_us: float = 10.0
    """What taking such a value costs the reader's host: the stream's wait, views on the slot, the signal at their end."""
    copy_us: float = 8.6
    """Fixed part of a copy to another GPU whose link was not measured, its signal included."""
    copy_gbs: float = 395.0
    """Bandwidth of such a copy."""
    within_gbs: float = 2000.0
    """Bandwidth of a copy within one GPU, from one actor to another (an H200: 1,830 to 2,050 GB/s of 128 and 256 MB)."""
    staged_us: float = 20.0
    """Fixed part of a staged copy through the host that was not measured."""
    staged_gbs: float = 49.0
    """Bandwidth of such a copy."""
    nccl_us: float = 32.0
    """Fixed part of a transfer by NCCL that was not measured."""
    nccl_gbs: float = 350.0
    """Bandwidth of such a transfer."""
    up_us: float = 20.0
    """From the end of a method's kernels until their result, copied to the host, is published; for a small one."""
    up_gbs: float = 54.0
    """Bandwidth of that copy."""
    down_us: float = 11.0
    """Fixed part of a copy from the host to a GPU, for a value that is wanted there."""
    down_gbs: float = 54.0
    """Bandwidth of that copy."""
    collective_host_us: float = 15.0
    """What a collective between GPUs costs each party's host beside what it enqueues: the offer, and a look at all others'."""
    enqueue_us: float = 6.0
    """What enqueuing one operation of such a collective costs a host where that was not measured."""
    kernel_us: float = 3.0
    """Fixed part of a kernel that only adds or copies, within one GPU."""
    memory_gbs: float = 2700.0
    """Rate at which such a kernel moves bytes, in and out together."""
    tcp_us: float = 30.0
    """Fixed cost of a value that goes to another host by TCP, for its writer and each reader, beside ``write_us``, ``read_us``."""
    tcp_us_per_mb: float = 250.0
    """What a MB of it costs a core of either, on top of the writer's copy: system calls, and the kernel's copy."""
    step_us: float = 0.1
    """The runtime's own cost for each action."""
    num_cores: int = 2
    """Cores of the host, shared by all processes."""
    balance_us: float = 7_500.0
    """How long a core is idle before it takes over work from a core that has several pieces of it."""
    slowdown: Slowdown = field(default_factory=Slowdown)
    """Computation and communication are not independent: how much they slow each other down."""
    topology: Topology = field(default_factory=Topology)
    """The GPUs and their links, as ``crossfade topology`` measured them; empty for none."""

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.name == "num_cores":
                check_whole("CostModel.num_cores", self.num_cores, 1)
            elif item.name not in _PARTS:
                least = 1e-9 if item.name.endswith("gbs") else 0.0
                check_figure(f"CostModel.{item.name}", getattr(self, item.name), least)

    def write_time_us(self, size_bytes: int) -> float:
        """Time that the writer spends on putting a value of that size into a ring."""
        large_us = self.write_large_us if size_bytes > LARGE_BYTES else 0.0
        return self.write_us + large_us + self.write_us_per_mb * size_bytes / BYTES_PER_MB

    def read_time_us(self, size_bytes: int) -> float:
        """Time that a reader spends on taking a value of that size from a ring."""
        large_us = self.read_large_us if size_bytes > LARGE_BYTES else 0.0
        return self.read_us + large_us + self.read_us_per_mb * size_bytes / BYTES_PER_MB

    def tcp_time_us(self, size_bytes: int) -> float:
        """Time that either end spends on a value of that size because it goes to another host."""
        return self.tcp_us + self.tcp_us_per_mb * size_bytes / BYTES_PER_MB

    def transfer_time_us(self, size_bytes: int) -> float:
        """Time that gloo takes for a value of that size when nothing else runs."""
        return self.latency_us + size_bytes / (self.gbs * BYTES_PER_US_AT_1_GBS)

    def send_host_time_us(self, size_bytes: int) -> float:
        """Time that the sender's background thread spends on a core for a value of that size."""
        return self.host_us_per_mb * size_bytes / BYTES_PER_MB

    def collective_time_us(self, kind: CollectiveKind, num_parties: int, size_bytes: int) -> float:
        """Time that a collective by gloo takes when nothing else runs and each party brings (a broadcast's root: has) that many
        bytes. Between GPUs see `crossfade.schedule.collective_costs`.

        By ring algorithms each of n parties moves 2 (n - 1) / n of it to reduce it, n - 1 times as much to gather it.
        """
        return self.collective_us + ring_share(kind, num_parties) * size_bytes / (self.gbs * BYTES_PER_US_AT_1_GBS)

    def push_time_us(self, transport: Transport, size_bytes: int, *, is_within: bool = False) -> float:
        """Time of a transfer between two GPUs whose link was not measured; or, by the copy engine, within one."""
        fixed_us, gbs = {
            Transport.STAGED: (self.staged_us, self.staged_gbs),
            Transport.NCCL: (self.nccl_us, self.nccl_gbs),
        }.get(transport, (self.copy_us, self.within_gbs if is_within else self.copy_gbs))
        return fixed_us + size_bytes / (gbs * BYTES_PER_US_AT_1_GBS)

    def up_time_us(self, size_bytes: int) -> float:
        """Time from the end of a method's kernels until the host has their result and may publish it."""
        return self.up_us + size_bytes / (self.up_gbs * BYTES_PER_US_AT_1_GBS)

    def down_time_us(self, size_bytes: int) -> float:
        """Time of a copy from the host to a GPU."""
        return self.down_us + size_bytes / (self.down_gbs * BYTES_PER_US_AT_1_GBS)

    def gpu_uuid(self, index: int) -> str:
        """How the topology calls the GPU of that index; a name of its own where it is not in it."""
        if self.topology.hosts:
            names = self.topology.cluster.gpu_names
            return names[index] if 0 <= index < len(names) else f"GPU {index}"
        devices = self.topology.devices
        return devices[index].uuid if 0 <= index < len(devices) else f"GPU {index}"

    def device_transfer_time_us(
        self,
        transport: str,
        source: str,
        target: str,
        size_bytes: int,
        *,
        beside: str | None = None,
        others: Iterable[tuple[str, str]] = (),
    ) -> float:
        """Time from the start of a transfer between two GPUs until a stream of the target may use the value.

        Args:
            transport: ``copy``, ``staged`` or ``nccl``.
            source: UUID of the GPU that has the value.
            target: UUID of the one that gets it.
            size_bytes: of the value.
            beside: work that runs on one of the two meanwhile, ``gemm`` or ``memory``.
            others: (source, target) of transfers that begin at the same time.

        Raises:
            KeyError: there is no such link in the topology, or the transport was not measured on it.
        """
        alone_us = links.alone_us(self.topology, transport, source, target, size_bytes)
        crowding = links.crowding(self.topology, transport, (source, target), tuple(others), size_bytes)
        return alone_us * crowding * self.device_slowdown(transport, beside).transfer

    def device_slowdown(self, transport: str, work: str | None) -> Slowdown:
        """How much work on a GPU and a transfer of its own slow each other down; 1 and 1 where that was not measured."""
        for each in self.topology.slowdowns:
            if (each.transport, each.work) == (transport, work):
                return Slowdown(max(1.0, each.computation), max(1.0, each.communication))
        return Slowdown()

    def to_json(self) -> str:
        """The figures as text, one JSON object; ``from_json`` gives an equal model back."""
        return written({**asdict(self), "topology": self.topology.to_data()})

    @classmethod
    def from_json(cls, text: str) -> CostModel:
        """Reads what ``to_json`` wrote. Figures that are left out keep their defaults.

        Raises:
            ValueError: the text is no JSON object, or has a name or a kind of figure that is not known.
        """
        figures = arguments_of(cls, parsed(text, "cost model", _HINT), "CostModel", _HINT)
        if "slowdown" in figures:
            figures["slowdown"] = Slowdown(**arguments_of(Slowdown, figures["slowdown"], "CostModel.slowdown", _HINT))
        if "topology" in figures:
            figures["topology"] = Topology.from_data(figures["topology"])
        return cls(**figures)


def ring_share(kind: CollectiveKind, num_parties: int) -> float:
    """How often each party sends what it brings, by ring algorithms."""
    shares = {CollectiveKind.ALLGATHER: num_parties - 1.0, CollectiveKind.BROADCAST: 1.0}
    return shares.get(kind, 2 * (num_parties - 1) / num_parties)
