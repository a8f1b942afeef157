"""GPUs in the simulator: work on streams, each piece alone on its stream, slowed down by what else its GPU and its links do.

Kernels of k actors on one GPU take k times as long each. A transfer takes what its link takes alone, times the crowding that was
measured where others leave the same GPU or reach the same one (its fair share of the busier end where none was). A kernel beside a
transfer, and a transfer beside a kernel, take the factors measured beside matrix products. A collective counts, for others, as a
transfer from each of its GPUs to the next one, and is slowed down as the slowest of these.

What goes to another host leaves by a NIC and arrives by one: transfers that do so at the same time share that NIC fairly, in each
direction by itself. The time until the first byte is there is not shared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

from crossfade.schedule import links
from crossfade.schedule.cores import Cores, Lane, Work
from crossfade.schedule.cost import CostModel, Slowdown
from crossfade.types import Transport

Port: TypeAlias = int | str
"""A GPU by its index, or a NIC by its name."""

_MANY = 1 << 30
_BESIDE = "gemm"


class Kernels(NamedTuple):
    """What a method does on its actor's GPUs."""

    gpus: tuple[int, ...]  # their indices; none for a copy to the host, which nothing slows down
    time_us: float  # how long it takes alone


class Push(NamedTuple):
    """A transfer from one GPU to another."""

    transport: Transport  # by which means
    # source, target: indices of the GPUs; equal for a copy within one.
    source: int
    target: int
    size_bytes: int  # of the value

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """From one GPU to the other."""
        return [(self.source, self.target)]


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective of several GPUs, each once."""

    transport: Transport  # by which means
    gpus: tuple[int, ...]  # their indices
    size_bytes: int  # what each brings
    time_us: float  # how long it takes alone

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """From each GPU to the next one."""
        return list(zip(self.gpus, (*self.gpus[1:], self.gpus[0]), strict=True))


@dataclass(frozen=True, slots=True)
class Flow:
    """A value of a host's memory that goes to another host."""

    transport: Transport
    # source, target: the NICs by which it leaves and arrives.
    source: str
    target: str
    size_bytes: int  # of the value
    time_us: float  # how long its bytes move when they have both NICs for themselves


def push_time_us(costs: CostModel, push: Push) -> float:
    """Time of a transfer by itself: measured where that was, else by the model's figures for its transport."""
    if push.source != push.target:
        try:
            source, target = costs.gpu_uuid(push.source), costs.gpu_uuid(push.target)
            return links.alone_us(costs.topology, push.transport, source, target, push.size_bytes)
        except KeyError:
            pass  # not measured
    return costs.push_time_us(push.transport, push.size_bytes, is_within=push.source == push.target)


class _Way(NamedTuple):
    """Where work is, and how long it takes alone."""

    gpus: tuple[int, ...]  # those that it uses
    pairs: tuple[tuple[Port, Port], ...]  # where it leaves and arrives, for a move
    time_us: float
    latency_us: float = 0.0  # what a transfer between hosts takes before that, and others do not slow down
    link: str = ""  # what a transfer goes through, in words


@dataclass(slots=True, eq=False)
class _Running:
    """Work that has begun, with what slows it down."""

    what: Kernels | Push | Exchange
    number: int  # in the order of their beginnings
    gpus: tuple[int, ...]  # those that it uses
    pairs: tuple[tuple[Port, Port], ...]  # where it leaves and arrives, for a move
    work: Work | None = None
    crowding: float = 1.0  # of a move: how much others that leave or arrive at the same ports slow it down
    num_kernels: int = 0  # of a move: kernels on its GPUs


@dataclass(slots=True, eq=False)
class _Wire:
    """What is on its way from one NIC to another: all of it equally fast."""

    out: Port
    into: Port
    lane: Lane
    num: int = 0  # how many values


class GpuClock:
    """The streams of all GPUs, and the network between hosts.

    A change costs as much as there is beside it: on the same GPUs, and at the same ports.
    """

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs
        self._works = Cores(_MANY)
        self._num_started = 0
        self._kernels: defaultdict[int, dict[_Running, None]] = defaultdict(dict)  # by GPU
        self._moves: defaultdict[int, dict[_Running, None]] = defaultdict(dict)  # by GPU
        self._at_ports: defaultdict[Port, dict[_Running, None]] = defaultdict(dict)  # moves that leave or arrive there
        self._wires: dict[tuple[Port, Port], _Wire] = {}
        self._wires_at: defaultdict[Port, dict[_Wire, None]] = defaultdict(dict)  # those that have something on them
        # where wires have changed since time went on: many begin and end at once, and are looked at once.
        self._changed: dict[Port, None] = {}
        self._num_out: Counter[Port] = Counter()
        self._num_in: Counter[Port] = Counter()
        self._slowdowns: dict[Transport, Slowdown] = {}
        self._ways: dict[Push, _Way] = {}

    @property
    def num_events(self) -> int:
        """Entries that its heaps have seen."""
        return self._works.num_events

    def next_end_us(self) -> float:
        """When something ends if nothing changes before; infinity when nothing runs."""
        time_us = self._works.next_end_us()
        if self._changed and time_us > self._works.now_us:
            self._update_ports(self._changed)
            self._changed.clear()
            time_us = self._works.next_end_us()
        return time_us

    def finish_next(self) -> None:
        """Ends what ends next."""
        self._works.finish_next()

    def start(self, what: Kernels | Push | Exchange | Flow, now_us: float, done: Callable[[], None]) -> None:
        """Starts work; ``done`` is called at its end."""
        self._works.advance(now_us)
        if isinstance(what, Flow):
            self._flow(what, done)
            return
        way = self._way_of(what) if isinstance(what, Push) else self._new_way(what)
        if way.latency_us:
            self._works.start(way.latency_us, partial(self._begin, what, way, done))
        else:
            self._begin(what, way, done)

    def _flow(self, flow: Flow, done: Callable[[], None]) -> None:
        """Starts what needs no GPU. However many values are on a wire, a change looks at the wire as a whole."""
        ports = flow.source, flow.target
        wire = self._wires.get(ports)
        if wire is None:
            wire = self._wires[ports] = _Wire(*ports, self._works.new_lane())
        self._works.start_on(wire.lane, flow.time_us, partial(self._flowed, wire, done))
        self._count(wire, 1)

    def _flowed(self, wire: _Wire, done: Callable[[], None]) -> None:
        self._count(wire, -1)
        done()

    def _count(self, wire: _Wire, change: int) -> None:
        wire.num += change
        self._num_out[wire.out] += change
        self._num_in[wire.into] += change
        for port in (wire.out, wire.into):
            if wire.num:
                self._wires_at[port][wire] = None
            else:
                self._wires_at[port].pop(wire, None)
        self._changed |= {wire.out: None, wire.into: None}

    def _update_ports(self, ports: Iterable[Port]) -> None:
        """Gives all that leaves or arrives at some ports its factor."""
        moves: dict[_Running, None] = {}
        for port in ports:
            moves |= self._at_ports[port]
            for wire in self._wires_at[port]:
                self._works.slow_lane(wire.lane, float(max(self._num_out[wire.out], self._num_in[wire.into])))
        for running in sorted(moves, key=_number):
            running.crowding = self._crowding(running)
            self._slow_down(running)

    def link_of(self, push: Push) -> str:
        """What a transfer goes through, in words: the two GPUs, or between hosts their NICs."""
        return self._way_of(push).link

    def _link(self, out: Port, into: Port) -> str:
        if isinstance(out, str) or isinstance(into, str):
            return link_name(str(out), str(into))
        names = self._costs.topology.cluster.gpu_names if self._costs.topology.hosts else []
        known = [names[gpu] if gpu < len(names) else f"GPU {gpu}" for gpu in (out, into)]
        return link_name(*known)

    def _way_of(self, push: Push) -> _Way:
        """Many values go the same way."""
        way = self._ways.get(push)
        if way is None:
            way = self._ways[push] = self._new_way(push)
        return way

    def _new_way(self, what: Kernels | Push | Exchange) -> _Way:
        if isinstance(what, Kernels):
            return _Way(what.gpus, (), what.time_us)
        gpus = tuple(dict.fromkeys(gpu for pair in what.pairs for gpu in pair))
        pairs = tuple(self._ports(pair) for pair in what.pairs)
        if not isinstance(what, Push):
            return _Way(gpus, pairs, what.time_us)
        is_between_hosts = pairs != tuple(what.pairs)
        latency_us = push_time_us(self._costs, what._replace(size_bytes=0)) if is_between_hosts else 0.0
        time_us = max(0.0, push_time_us(self._costs, what) - latency_us)
        return _Way(gpus, pairs, time_us, latency_us, self._link(*pairs[0]))

    def _begin(self, what: Kernels | Push | Exchange, way: _Way, done: Callable[[], None]) -> None:
        self._num_started += 1
        running = _Running(what, self._num_started, way.gpus, way.pairs)
        self._enter(running)
        if running.pairs:
            running.crowding = self._crowding(running)
        running.work = self._works.start(way.time_us, partial(self._ended, running, done), self._factor(running))
        self._update(running)

    def _ports(self, pair: tuple[int, int]) -> tuple[Port, Port]:
        """Where a transfer leaves and arrives: the GPUs themselves, or between hosts their NICs."""
        if self._costs.topology.hosts:
            cluster = self._costs.topology.cluster
            if cluster.of_gpu[pair[0]] is not cluster.of_gpu[pair[1]]:
                return cluster.nic_of_gpu(pair[0]), cluster.nic_of_gpu(pair[1])
        return pair

    def _enter(self, running: _Running) -> None:
        if isinstance(running.what, Kernels):
            for gpu in running.gpus:
                self._kernels[gpu][running] = None
                for move in self._moves[gpu]:
                    move.num_kernels += 1
            return
        for gpu in running.gpus:
            self._moves[gpu][running] = None
            running.num_kernels += len(self._kernels[gpu])
        for out, into in running.pairs:
            self._num_out[out] += 1
            self._num_in[into] += 1
            for port in (out, into):
                self._at_ports[port][running] = None

    def _ended(self, running: _Running, done: Callable[[], None]) -> None:
        if isinstance(running.what, Kernels):
            for gpu in running.gpus:
                del self._kernels[gpu][running]
                for move in self._moves[gpu]:
                    move.num_kernels -= 1
        else:
            for gpu in running.gpus:
                del self._moves[gpu][running]
            for out, into in running.pairs:
                self._num_out[out] -= 1
                self._num_in[into] -= 1
                for port in (out, into):
                    self._at_ports[port].pop(running, None)
        self._update(running)
        done()

    def _update(self, changed: _Running) -> None:
        """Gives all that is beside what has begun or ended its factor."""
        near: dict[_Running, None] = {}
        for gpu in changed.gpus:
            near |= self._kernels[gpu]
            near |= self._moves[gpu]
        if changed.pairs:
            crowded: dict[_Running, None] = {}
            for pair in changed.pairs:
                for port in pair:
                    crowded |= self._at_ports[port]
            for running in crowded:
                running.crowding = self._crowding(running)
            near |= crowded
        near.pop(changed, None)
        for running in sorted(near, key=_number):
            self._slow_down(running)
        if self._wires:
            self._update_ports(port for pair in changed.pairs for port in pair if self._wires_at.get(port))

    def _slow_down(self, running: _Running) -> None:
        assert running.work is not None, "it has begun"
        self._works.slow_down(running.work, self._factor(running))

    def _factor(self, running: _Running) -> float:
        what = running.what
        if not isinstance(what, Kernels):
            slowdown = self._slowdown(what.transport).transfer if running.num_kernels else 1.0
            return running.crowding * slowdown
        factor, most = 1, 1.0
        for gpu in running.gpus:
            factor = max(factor, len(self._kernels[gpu]))
            for move in self._moves[gpu]:
                if not isinstance(move.what, Kernels):
                    most = max(most, self._slowdown(move.what.transport).compute)
        return factor * most

    def _slowdown(self, transport: Transport) -> Slowdown:
        if transport not in self._slowdowns:
            self._slowdowns[transport] = self._costs.device_slowdown(transport, _BESIDE)
        return self._slowdowns[transport]

    def _crowding(self, running: _Running) -> float:
        """By measured crowds within a host, by fair shares of the NICs between hosts."""
        what = running.what
        assert not isinstance(what, Kernels), "kernels are at no port"
        if len(running.pairs) == 1:
            own_out, own_in = {running.pairs[0][0]: 1}, {running.pairs[0][1]: 1}
        else:
            own_out, own_in = Counter(out for out, _ in running.pairs), Counter(into for _, into in running.pairs)
        most = 1.0
        for out, into in running.pairs:
            num_out, num_in = 1 + self._num_out[out] - own_out[out], 1 + self._num_in[into] - own_in[into]
            if isinstance(out, str):
                most = max(most, float(num_out), float(num_in))
            else:
                topology, size_bytes = self._costs.topology, what.size_bytes
                most = max(most, links.crowding_of(topology, what.transport, num_out, num_in, size_bytes))
        return most


def link_name(source: str, target: str) -> str:
    """How reports call a link."""
    return f"{source} -> {target}"


def _number(running: _Running) -> int:
    return running.number
