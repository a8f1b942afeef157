"""What goes from host to host in the simulator: NICs of the parties, connections, and how long bytes are on their way.

A party with GPUs uses the NIC of its first one; those of a host without GPUs are dealt out to its NICs in order. Values of a party
for a host go over one connection, one after another; a value for several readers there crosses once. Bytes take what the NICs at
both ends allow, shared with whatever else leaves or arrives there (`schedule.gpus`); after them the value is there one latency
later.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from crossfade.cluster import Network
from crossfade.plan.plan import ChannelSpec, Plan
from crossfade.schedule.cost import BYTES_PER_US_AT_1_GBS, CostModel
from crossfade.schedule.gpus import Flow, GpuClock, Kernels, link_name
from crossfade.types import Transport


def told_apart(plan: Plan) -> Plan:
    """The plan with a number of its own for each GPU, where hosts count theirs alike."""
    places = {gpu: plan.host_of(party) for party, gpus in plan.devices.items() for gpu in gpus}
    if all(places[gpu] == plan.host_of(party) for party, gpus in plan.devices.items() for gpu in gpus):
        return plan
    numbers: dict[tuple[str, int], int] = {}
    devices = {
        party: tuple(numbers.setdefault((plan.host_of(party), gpu), len(numbers)) for gpu in gpus)
        for party, gpus in plan.devices.items()
    }
    return replace(plan, devices=devices)


class Hosts:
    """Where the parties of a plan are, and what lies between them."""

    def __init__(self, plan: Plan, costs: CostModel) -> None:
        self.of = plan.hosts
        cluster = costs.topology.cluster
        self._known = cluster.by_name
        self._unknown = Network(costs.gbs, costs.latency_us)
        names = list(dict.fromkeys(plan.hosts.values()))
        is_described = bool(names) and all(name in self._known for name in names)
        self.index = {name: self._known[name].index if is_described else place for place, name in enumerate(names)}
        self.num_cores = [host.group.num_cores for host in cluster.hosts] if is_described else []
        self._nics: dict[str, str] = {}
        on_cores: dict[str, list[str]] = defaultdict(list)
        for party, host in plan.hosts.items():
            gpus = plan.devices.get(party)
            if gpus and gpus[0] < len(cluster.of_gpu):
                self._nics[party] = cluster.nic_of_gpu(gpus[0])
            else:
                on_cores[host].append(party)
        for host, parties in on_cores.items():
            for position, party in enumerate(parties):
                is_known = host in self._known
                self._nics[party] = self._known[host].nic(position, len(parties)) if is_known else host

    def index_of(self, party: str) -> int:
        """The number of a party's host."""
        return self.index.get(self.of.get(party, ""), 0)

    def are_apart(self, one: str, other: str) -> bool:
        """Whether two parties are on different hosts."""
        return self.of.get(one) != self.of.get(other)

    def latency_us(self, one: str, other: str) -> float:
        """From the host of one to that of the other."""
        return max(self._network(party).latency_us for party in (one, other)) if self.are_apart(one, other) else 0.0

    def gbs(self, one: str, other: str) -> float:
        """Of one transfer from the host of one to that of the other, alone."""
        return min(self._network(party).gbs for party in (one, other))

    def _network(self, party: str) -> Network:
        host = self._known.get(self.of.get(party, ""))
        return self._unknown if host is None else host.group.network

    def link(self, writer: str, reader: str) -> str:
        """What a value goes through, in words: two NICs, or between the two parties of one host."""
        return (
            link_name(self._nics[writer], self._nics[reader])
            if self.are_apart(writer, reader)
            else f"{writer} -> {reader}"
        )

    def firsts(self, channel: ChannelSpec) -> list[str]:
        """One reader of each host."""
        return list({self.of.get(reader, ""): reader for reader in reversed(channel.readers)}.values())[::-1]

    def flow(self, transport: Transport, writer: str, reader: str, size_bytes: int) -> Flow:
        """A value on its way."""
        time_us = size_bytes / (self.gbs(writer, reader) * BYTES_PER_US_AT_1_GBS)
        return Flow(transport, self._nics[writer], self._nics[reader], size_bytes, time_us)


class Connections:
    """Those of every party to every host."""

    def __init__(self, hosts: Hosts, clock: GpuClock) -> None:
        self._hosts, self._clock = hosts, clock
        self._lines: defaultdict[tuple[str, str], deque[Callable[[float], None]]] = defaultdict(deque)

    def send(
        self,
        channel: ChannelSpec,
        reader: str,
        size_bytes: int,
        now_us: Callable[[], float],
        done: Callable[[float], None],
    ) -> None:
        """Sends a value to a reader's host. ``done`` is called when it is there, with the time at which its bytes began to move."""
        writer = channel.writer
        flow = self._hosts.flow(channel.transport, writer, reader, size_bytes)
        latency_us = self._hosts.latency_us(writer, reader)
        line = self._lines[writer, self._hosts.of.get(reader, "")]

        def begin(start_us: float) -> None:
            self._clock.start(flow, start_us, partial(moved, start_us))

        def moved(start_us: float) -> None:
            self._clock.start(Kernels((), latency_us), now_us(), partial(done, start_us))
            line.popleft()
            if line:
                line[0](now_us())

        line.append(begin)
        if len(line) == 1:
            begin(now_us())
