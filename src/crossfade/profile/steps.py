"""What a calibration measures, as data: a list of steps, each with the ranks that take part.

Rank r is the process of the r-th device of the topology.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from crossfade.topology import LinkKind, Topology

COPY, STAGED, NCCL = TRANSPORTS = ("copy", "staged", "nccl")
WORKS = ("gemm", "memory")

_MB = 1 << 20
_SIZES = (4 << 10, 64 << 10, _MB, 4 * _MB, 16 * _MB, 64 * _MB, 256 * _MB)
_MOST_BYTES = {COPY: 256 * _MB, STAGED: 64 * _MB, NCCL: 256 * _MB}
"""Staged values are bound by the pinned memory that a calibration takes."""
_CROWD_SIZES = (16 * _MB, 64 * _MB)
_BESIDE_BYTES = 64 * _MB
_LIMIT_S = 20.0

Transfers = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """One measure on some ranks."""

    measure: str  # ``launch``, ``signals``, ``transfers``, ``beside``, or what a crew needs for itself
    ranks: tuple[int, ...]  # who takes part
    transport: str = ""  # ``copy``, ``staged`` or ``nccl``, where one is measured
    transfers: Transfers = ()  # (source, target) of what is moved at once
    sizes: tuple[int, ...] = ()  # in bytes, one after another
    work: str = ""  # what runs beside it: ``gemm`` or ``memory``
    limit_s: float = _LIMIT_S  # afterwards the processes are ended

    @property
    def kind(self) -> tuple[str, str]:
        """What steps have in common that fail for the same reason."""
        return self.measure, self.transport

    def __str__(self) -> str:
        moves = f"{len(self.transfers)} at once" if len(self.transfers) > 2 else _arrows(self.transfers)
        match self.measure:
            case "launch":
                return f"launch cost on GPU {self.ranks[0]}"
            case "signals":
                return f"signals between GPU {self.ranks[0]} and {self.ranks[1]}"
            case "transfers":
                return f"{self.transport} {moves}"
            case "beside":
                return f"{self.transport} {moves} beside {self.work}"
            case _:
                return self.measure


def _arrows(transfers: Transfers) -> str:
    return ", ".join(f"{source} -> {target}" for source, target in transfers)


def steps_for(topology: Topology, transports: Collection[str] = TRANSPORTS) -> list[Step]:
    """All steps of a calibration, the most useful first: it may be cut short."""
    asked = [transport for transport in TRANSPORTS if transport in transports]
    return [*_alone(topology, asked), *_beside(topology, asked), *_crowds(topology, asked)]


def _kinds(topology: Topology) -> dict[tuple[int, int], LinkKind]:
    return {(topology.index(link.source), topology.index(link.target)): link.kind for link in topology.links}


def _can(transport: str, transfers: Transfers, kinds: Mapping[tuple[int, int], LinkKind]) -> bool:
    return transport != COPY or all(kinds[pair] is not LinkKind.HOST for pair in transfers)


def _alone(topology: Topology, transports: list[str]) -> Iterator[Step]:
    kinds = _kinds(topology)
    for rank in range(len(topology.devices)):
        yield Step("launch", (rank,))
    for source, target in kinds:
        if source < target:
            yield Step("signals", (source, target))
    for transport in transports:
        for pair in kinds:
            if _can(transport, (pair,), kinds):
                sizes = tuple(size for size in _SIZES if size <= _MOST_BYTES[transport])
                yield Step("transfers", tuple(sorted(pair)), transport, (pair,), sizes)


def _beside(topology: Topology, transports: list[str]) -> Iterator[Step]:
    """On the first link that a transport can use: the GPUs of a host are alike."""
    kinds = _kinds(topology)
    for transport in transports:
        pair = next((pair for pair in kinds if _can(transport, (pair,), kinds)), None)
        if pair is not None:
            for work in WORKS:
                yield Step("beside", tuple(sorted(pair)), transport, (pair,), (_BESIDE_BYTES,), work)


def _crowds(topology: Topology, transports: list[str]) -> Iterator[Step]:
    kinds = _kinds(topology)
    for transport in transports:
        for transfers in _patterns(len(topology.devices)):
            sources = [source for source, _ in transfers]
            is_possible = transport != STAGED or len(set(sources)) == len(sources)  # a rank's staging serves one value
            if is_possible and all(pair in kinds for pair in transfers) and _can(transport, transfers, kinds):
                ranks = tuple(sorted({rank for pair in transfers for rank in pair}))
                yield Step("transfers", ranks, transport, transfers, _CROWD_SIZES)


def _patterns(num: int) -> Iterator[Transfers]:
    """Both ways between two; to several and from several; each to its neighbour; each to each."""
    if num >= 2:
        yield (0, 1), (1, 0)
    for num_peers in range(2, num):
        yield tuple((0, peer) for peer in range(1, num_peers + 1))
        yield tuple((peer, 0) for peer in range(1, num_peers + 1))
    if num >= 3:
        yield tuple((rank, (rank + 1) % num) for rank in range(num))
        yield tuple((rank, (rank + step) % num) for step in range(1, num) for rank in range(num))
