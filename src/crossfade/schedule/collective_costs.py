"""What a collective between GPUs takes alone, by the way that it goes in fact.

W parties, each bringing n bytes (of a broadcast: the root has n). Copies between GPUs, signals and NCCL's transfers are taken as
``crossfade topology`` measured them; what was not measured is taken from the cost model, and `Estimate.reason` says so.

**By copy engines**, `crossfade.peers`, as `crossfade.collectives.movers.copies` calls it. Symbols::

    C(s)  the copies of one exchange: max over ranks of the sum over the other W - 1 of one copy of s bytes, one after another on
          one stream, times what copies of all ranks to their neighbours slow each other down
    X(s)  = C(s) + 2 signals: an exchange. It sets and awaits a signal for each other rank, and ranks wait for each other in it:
          15 to 20 us where a signal takes 7.7 (benchmarks/reports/peer_collectives_4-nvidia-h200_2026-11-21.md)
    K(t)  = kernel_us + t / memory_gbs: a kernel within one GPU that reads and writes t bytes together
    B     a buffer; longer tensors go in pieces: p is the length of one, a rank's share of one where each rank has its own

=================  =====================================================  ====================================================
kind               each piece                                             besides
=================  =====================================================  ====================================================
allgather          p <= B: 2 signals + C(p), fetched out of the buffers    K(2 p) of the first, see below
reducescatter      p <= B / W: X(p), pushed                               K((W + 1) p), see below
allreduce          p <= B / W: 2 X(p), shares pushed, sums fetched        K((W + 2) p), see below
allreduce, small   n <= 256 KiB: X(n) + K((W + 1) n)
broadcast          p <= B: 2 signals + F(p), all fetch from the root      K(2 p) of the first, see below
=================  =====================================================  ====================================================

F(p) is one copy from the root beside those for the others. While a piece is fetched the next one is made ready, and as much of the
own block goes to its place: two kernels, which hold the next exchange up if they take longer. Pieces of sums go two at a time
(`peers/steps.py`): the addition of one goes on beside the other's copies, the signals that offer its sum too, and both hold up that
sum's way to the others if they take longer. Averages are divided by a kernel, K(2 n) of what comes out. Other reductions are dealt
out, reduced by kernels and gathered.

A host that enqueues more slowly than the GPU works is what counts: a collective takes at least what enqueuing it costs.

**By NCCL**: with the factors of its bus bandwidth (nccl-tests, doc/PERFORMANCE.md), which are those of the ring algorithms (Thakur,
Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH", 2005), each GPU sends 2 (W - 1) / W n to
reduce, (W - 1) / W n to reduce and scatter, (W - 1) n to gather, n to broadcast. It takes as long as one measured transfer of so
many bytes by NCCL over the slowest link. Between hosts of a described cluster each host sends those bytes to the next by all NICs
of its GPUs, in rings, one a NIC; the fixed part is that of a tree of the hosts, up and down, which NCCL takes where messages are
short (NVIDIA, "Massively Scale Your Deep Learning Training with NCCL 2.4", 2019): the lesser of both ways' costs, so it is a lower
bound. The fixed part of that is its launch, which a collective has once. Measured crowds are *not* applied: NCCL's sends and
receives share channels, of which its collectives use all. K of the copies that `crossfade.collectives.movers.c10d` and torch make
around it come on top.

Against that report, with four GPUs and 16 MB and more, both lie within 20 % (`tests/unit/test_collective_costs.py`).

Beside matrix products see `crossfade.schedule.gpus`. A kernel waits there for the end of one that holds all SMs: that is not in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations, zip_longest

from crossfade.cluster import Host
from crossfade.plan.plan import CollectiveSpec, Plan
from crossfade.schedule.cost import BYTES_PER_US_AT_1_GBS, CostModel
from crossfade.schedule.links import crowding
from crossfade.topology import Crowd
from crossfade.types import CollectiveKind, ReduceOp, Transport

BUFFER_BYTES = 32 << 20
"""Of a lane, on each GPU; `crossfade.collectives.movers.copies` gives its groups as much."""
_ONE_SHOT_BYTES = 256 << 10
_PACKED_BYTES = 64 << 10
_SLOT_ALIGNMENT = 256
_SIGNALS = 2
_NUM_LANES = 2
_MOST_PAIRED = 16
"""With more parties than this, links between neighbours stand for those between all."""
_ADDED = (None, ReduceOp.SUM, ReduceOp.AVG)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What a collective takes alone."""

    time_us: float  # from when all parties' tensors are there until all have what they get
    reason: str = ""  # what of it was not measured, and what stands for that; empty if all was


def is_on_gpus(plan: Plan, collective: CollectiveSpec) -> bool:
    """Whether a collective's tensors go from GPU to GPU, as edges' do (`crossfade.schedule.device_steps.is_pushed`)."""
    return collective.id in plan.collectives_on_devices


def estimate(
    costs: CostModel,
    collective: CollectiveSpec,
    gpus: Sequence[int],
    sizes_bytes: Sequence[int],
    *,
    buffer_bytes: int = BUFFER_BYTES,
) -> Estimate:
    """What a collective between GPUs takes (see the module's text). ``sizes_bytes`` is of the tensors that each party brings, or a
    broadcast's root.
    """
    way = _Nccl(costs, gpus) if collective.transport is Transport.NCCL else _Copies(costs, gpus, buffer_bytes)
    time_us = sum(way.time_us(collective, size_bytes) for size_bytes in _jobs(collective, sizes_bytes))
    return Estimate(time_us, "; ".join(way.reasons))


def _jobs(collective: CollectiveSpec, sizes_bytes: Sequence[int]) -> list[int]:
    """Tensors that are reduced one by one; small ones travel together."""
    if collective.transport is Transport.NCCL or collective.op not in _ADDED:
        return list(sizes_bytes)
    small = [size for size in sizes_bytes if size <= _PACKED_BYTES]
    large = [size for size in sizes_bytes if size > _PACKED_BYTES]
    return [sum(small), *large] if small else large


def _pieces(size_bytes: int, limit_bytes: int) -> Iterator[int]:
    for begin in range(0, size_bytes, max(limit_bytes, 1)):
        yield min(limit_bytes, size_bytes - begin)


class _Way:
    """What both ways have in common."""

    transport: Transport

    def __init__(self, costs: CostModel, gpus: Sequence[int]) -> None:
        self.costs, self.gpus, self.num = costs, tuple(gpus), len(gpus)
        self.reasons: dict[str, None] = {}  # what was not measured and was asked for
        self._uuids = {gpu: costs.gpu_uuid(gpu) for gpu in self.gpus}
        neighbours = [(rank, (rank + 1) % self.num) for rank in range(self.num)]
        self._pairs = list(permutations(range(self.num), 2)) if self.num <= _MOST_PAIRED else neighbours
        self._tell_of_links()

    def time_us(self, collective: CollectiveSpec, size_bytes: int) -> float:
        """For one tensor of each party."""
        raise NotImplementedError

    def _measured_us(self, source: int, target: int, size_bytes: int) -> float | None:
        return self._link_us(self._uuids[source], self._uuids[target], size_bytes)

    def _link_us(self, source: str, target: str, size_bytes: int) -> float | None:
        try:
            return self.costs.topology.link(source, target).duration_us(self.transport, size_bytes)
        except KeyError:
            return None

    def alone_us(self, source: int, target: int, size_bytes: int) -> float:
        """One transfer between two ranks, when nothing else runs."""
        ends = self.gpus[source], self.gpus[target]
        measured_us = None if ends[0] == ends[1] else self._measured_us(*ends, size_bytes)
        if measured_us is not None:
            return measured_us
        return self.costs.push_time_us(self.transport, size_bytes, is_within=ends[0] == ends[1])

    def _tell_of_links(self) -> None:
        links = dict.fromkeys((self.gpus[source], self.gpus[target]) for source, target in self._pairs)
        within = [source for source, target in links if source == target]
        if within:
            self._tell(f"copies within GPU {within[0]} are not measured: within_gbs stands for their rate")
        missing = [pair for pair in links if pair[0] != pair[1] and self._measured_us(*pair, 0) is None]
        if missing:
            more = f" and {len(missing) - 1} more links" if missing[1:] else ""
            link = f"from GPU {missing[0][0]} to GPU {missing[0][1]}{more}"
            name = str(self.transport)
            self._tell(f"no {name} {link} in the model's topology: {name}_us and {name}_gbs stand for it")

    def _tell(self, reason: str) -> None:
        self.reasons[reason] = None

    def kernel_us(self, moved_bytes: float) -> float:
        """A kernel within one GPU: K."""
        return self.costs.kernel_us + moved_bytes / (self.costs.memory_gbs * BYTES_PER_US_AT_1_GBS)


class _Nccl(_Way):
    transport = Transport.NCCL

    def time_us(self, collective: CollectiveSpec, size_bytes: int) -> float:
        num, kind = self.num, collective.kind
        match kind:
            case CollectiveKind.ALLREDUCE:
                sent, copied = 2 * (num - 1) / num, 2.0
            case CollectiveKind.REDUCESCATTER:
                sent, copied = (num - 1) / num, 2.0 + 2.0 / num
            case CollectiveKind.ALLGATHER:
                sent, copied = num - 1.0, 2.0 * num
            case _:
                sent, copied = 1.0, 2.0
        sent_bytes = round(sent * size_bytes)
        hosts = self._hosts()
        within = [(one, other) for one, other in self._pairs if not self._are_apart(one, other)]
        times_us = [self.alone_us(source, target, sent_bytes) for source, target in within]
        if len(hosts) > 1:
            times_us.append(self._between_us(hosts, sent_bytes))
        return max(times_us, default=0.0) + self.kernel_us(copied * size_bytes)

    def _are_apart(self, one: int, other: int) -> bool:
        topology = self.costs.topology
        return bool(topology.hosts) and self._host(one) is not self._host(other)

    def _host(self, rank: int) -> Host:
        return self.costs.topology.cluster.of_gpu[self.gpus[rank]]

    def _hosts(self) -> dict[str, set[str]]:
        """For each host of its GPUs, in a described cluster, the NICs that they use."""
        nics: dict[str, set[str]] = {}
        if self.costs.topology.hosts:
            for rank, gpu in enumerate(self.gpus):
                nics.setdefault(self._host(rank).name, set()).add(self.costs.topology.cluster.nic_of_gpu(gpu))
        return nics

    def _between_us(self, nics: dict[str, set[str]], sent_bytes: int) -> float:
        """What goes from each host to the next takes all NICs of its GPUs; the latency is that of a tree of hosts, up and down."""
        networks = [(self.costs.topology.cluster.by_name[host].group.network, len(nics[host])) for host in nics]
        slowest_gbs = min(network.gbs * num for network, num in networks)
        latency_us = 2 * math.ceil(math.log2(len(nics))) * max(network.latency_us for network, _ in networks)
        return self.costs.nccl_us + latency_us + sent_bytes / (slowest_gbs * BYTES_PER_US_AT_1_GBS)


class _Copies(_Way):
    transport = Transport.COPY

    def __init__(self, costs: CostModel, gpus: Sequence[int], buffer_bytes: int) -> None:
        super().__init__(costs, gpus)
        self._buffer_bytes = buffer_bytes
        self._slot_bytes = buffer_bytes // self.num // _SLOT_ALIGNMENT * _SLOT_ALIGNMENT
        self._signals_us = _SIGNALS * self._find_signal_us()
        self._crowding = self._find_crowding()
        self._enqueue_us = self._find_enqueue_us()

    # What was measured

    def _find_signal_us(self) -> float:
        """The slowest between two of the GPUs. What stands for copies that were not measured has its signal in it."""
        mine = set(self._uuids.values())
        found = [each.signal_us for each in self.costs.topology.links if {each.source, each.target} <= mine]
        known = [signal_us for signal_us in found if signal_us is not None]
        if len(known) < len(found):
            self._tell(
                "not all signals between its GPUs in the model's topology: those that are missing count as nothing"
            )
        return max(known, default=0.0)

    def _find_crowding(self) -> float:
        """How much longer a copy takes while each GPU copies to its neighbour: by the measured crowd with the nearest number."""
        num_gpus = len(set(self.gpus))
        if num_gpus < 2 or not self.costs.topology.links:
            return 1.0
        crowds = [crowd for crowd in self.costs.topology.crowds if self._is_of_neighbours(crowd)]
        if not crowds:
            self._tell("no crowd of neighbours in the model's topology: copies of all at once count as those of one")
            return 1.0
        nearest = min(crowds, key=lambda crowd: (abs(len(crowd.transfers) - num_gpus), -crowd.size_bytes))
        alone_us = [self._link_us(*pair, nearest.size_bytes) or 0.0 for pair in nearest.transfers]
        return max(1.0, nearest.duration_us / max(alone_us, default=nearest.duration_us))

    def _is_of_neighbours(self, crowd: Crowd) -> bool:
        is_one_each = crowd.most_out == crowd.most_in == 1 and len(crowd.transfers) > 1
        return crowd.transport == self.transport and is_one_each and any(self._link_us(*p, 1) for p in crowd.transfers)

    def _find_enqueue_us(self) -> dict[str, float]:
        """What the slowest of the hosts needs to enqueue each kind of operation."""
        costs, mine = self.costs, set(self._uuids.values())
        launches = [launch for launch in costs.topology.launches if launch.device in mine]
        found = dict.fromkeys(("copy", "write", "wait", "kernel"), 0.0)
        for operation in found:
            known = [launch.duration_us for launch in launches if launch.operation == operation]
            found[operation] = max(known, default=costs.enqueue_us)
            if not known:
                self._tell("not all launches of its GPUs in the model's topology: enqueue_us stands for those")
        return found

    # Parts

    def _copies_us(self, size_bytes: int) -> float:
        by_rank = dict.fromkeys(range(self.num), 0.0)
        for source, target in self._pairs:
            by_rank[target] += self.alone_us(source, target, size_bytes)
        return max(by_rank.values()) * self._crowding

    def _exchange_us(self, size_bytes: int) -> float:
        return self._copies_us(size_bytes) + self._signals_us

    def _host_us(self, num_exchanges: int, num_kernels: int, num_copies: int | None = None) -> float:
        """What enqueuing so many exchanges and kernels costs the slowest host."""
        each, copies = self._enqueue_us, num_exchanges * (self.num - 1) if num_copies is None else num_copies
        signals_us = num_exchanges * (each["write"] + each["wait"])
        return copies * each["copy"] + signals_us + num_kernels * each["kernel"]

    # Collectives

    def time_us(self, collective: CollectiveSpec, size_bytes: int) -> float:
        if not size_bytes:
            return 0.0
        match collective.kind:
            case CollectiveKind.ALLGATHER:
                return self._all_gather_us(size_bytes)
            case CollectiveKind.BROADCAST:
                return self._broadcast_us(collective.root, size_bytes)
        if collective.op not in _ADDED:
            return self._dealt_us(collective.kind, size_bytes)
        is_whole = collective.kind is CollectiveKind.ALLREDUCE
        time_us = self._all_reduce_us(size_bytes) if is_whole else self._reduce_scatter_us(size_bytes)
        if collective.op is ReduceOp.AVG:
            time_us += self.kernel_us(2 * (size_bytes if is_whole else size_bytes / self.num))
        return time_us

    def _all_gather_us(self, size_bytes: int) -> float:
        pieces = list(_pieces(size_bytes, self._buffer_bytes))
        time_us = self._pulled_us(pieces, 1, self._copies_us)
        return max(time_us, self._host_us(len(pieces), 2 * len(pieces)))

    def _pulled_us(self, pieces: Sequence[int], num_staged: int, fetched_us: Callable[[int], float]) -> float:
        """Pieces that others fetch. While one is fetched the next is staged, in so many parts of its length, and a piece of the
        own block goes to its place.
        """
        time_us = num_staged * self.kernel_us(2 * pieces[0])
        for piece, *later in zip_longest(pieces, pieces[1:]):
            beside_us = self.kernel_us(2 * piece) + sum(num_staged * self.kernel_us(2 * each) for each in later if each)
            time_us += self._signals_us + max(fetched_us(piece), beside_us)
        return time_us

    def _reduce_scatter_us(self, size_bytes: int) -> float:
        pieces = list(_pieces(-(-size_bytes // self.num), self._slot_bytes))
        time_us = self._rows_us(pieces, self.num + 1, is_fetched=False)
        return max(time_us, self._host_us(len(pieces), len(pieces)))

    def _all_reduce_us(self, size_bytes: int) -> float:
        if size_bytes <= min(_ONE_SHOT_BYTES, self._slot_bytes):
            time_us = self._exchange_us(size_bytes) + self.kernel_us((self.num + 1) * size_bytes)
            return max(time_us, self._host_us(1, 1))
        pieces = list(_pieces(-(-size_bytes // self.num), self._slot_bytes))
        time_us = self._rows_us(pieces, self.num + 2, is_fetched=True)
        return max(time_us, self._host_us(2 * len(pieces), len(pieces)))

    def _rows_us(self, pieces: Sequence[int], num_touched: int, *, is_fetched: bool) -> float:
        """Pieces whose additions read and write ``num_touched`` times their length, some at a time. Sums are offered on the stream
        that adds, so a fetch waits for both, and has copies only.
        """
        time_us = 0.0
        for first in range(0, len(pieces), _NUM_LANES):
            row, now_us, added_us = pieces[first : first + _NUM_LANES], 0.0, []
            for piece in row:
                now_us += self._exchange_us(piece)
                added_us.append(
                    now_us + self.kernel_us(num_touched * piece) + (self._signals_us if is_fetched else 0.0)
                )
            for piece, ready_us in zip(row, added_us if is_fetched else (), strict=False):
                now_us = max(now_us, ready_us) + self._copies_us(piece)
            time_us += max(now_us, *added_us)
        return time_us

    def _broadcast_us(self, root: int, size_bytes: int) -> float:
        pieces = list(_pieces(size_bytes, self._buffer_bytes))
        others = [rank for rank in range(self.num) if rank != root]

        def fetched_us(piece: int) -> float:
            alone_us = max((self.alone_us(root, rank, piece) for rank in others), default=0.0)
            return alone_us * self._crowding_from(root, piece)

        time_us = self._pulled_us(pieces, 1, fetched_us)
        return max(time_us, self._host_us(len(pieces), 2 * len(pieces), len(pieces)))

    def _crowding_from(self, root: int, size_bytes: int) -> float:
        """How much longer a copy from the root takes beside those for the others: as measured, else a fair share."""
        others = sorted({gpu for gpu in self.gpus if gpu != self.gpus[root]})
        if len(others) < 2:
            return 1.0
        pairs = [(self._uuids[self.gpus[root]], self._uuids[gpu]) for gpu in others]
        return crowding(self.costs.topology, self.transport, pairs[0], pairs[1:], size_bytes)

    def _dealt_us(self, kind: CollectiveKind, size_bytes: int) -> float:
        """Blocks are dealt out, each party reduces its own one by one, and all gather them where all want all."""
        block = -(-size_bytes // self.num)
        pieces = list(_pieces(block, self._slot_bytes))
        others = self.num - 1
        time_us = self._pulled_us(pieces, others, self._copies_us)
        time_us += others * self.kernel_us(3 * block) + self.kernel_us(2 * block)
        time_us = max(time_us, self._host_us(len(pieces), (others + 1) * (len(pieces) + 1)))
        if kind is CollectiveKind.REDUCESCATTER:
            return time_us
        return time_us + 2 * self.kernel_us(2 * size_bytes) + self._all_gather_us(block)
