"""Which transport carries a value from one party to another, or moves the tensors of a collective: what was asked, against the GPUs
of the parties and what lies between them.

==================================================  ========================================================================
parties                                             ``auto``
==================================================  ========================================================================
one has no GPU, or is the driver                    ``shm``, between hosts ``tcp``
both have one, and the readers want CPU tensors     ``shm``, between hosts ``tcp``
both have one, on different hosts                   ``nccl``
both have one, and copies reach from one to the     ``copy``, or ``staged`` where that was measured to be faster
other
both have one, and copies do not                    ``staged``
a collective, and one has no GPU                    ``gloo``
a collective, and copies reach from each to each    ``copy``
a collective, and copies do not, as between hosts   ``nccl``
==================================================  ========================================================================

Values from and to the driver go by ``shm`` or ``tcp`` whichever transport was asked for: that wish is about edges between actors.
Where the readers want the tensors is heard there too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import permutations

from crossfade.errors import GraphError
from crossfade.graph.nodes import Node, describe
from crossfade.plan.plan import CommunicatorSpec
from crossfade.schedule import links
from crossfade.topology import Link, LinkKind, Topology
from crossfade.types import DRIVER, TargetDevice, Transport

_HAVE_STAND_INS = (Transport.COPY, Transport.STAGED)
_BETWEEN_HOSTS = (Transport.AUTO, Transport.TCP, Transport.NCCL, Transport.ACCELERATOR)

TYPICAL_BYTES = 16_000_000
"""The size that is assumed where none is declared."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a node asks for one of its readers."""

    node: Node
    transport: str = Transport.AUTO  # the name of a transport, ``auto`` and ``accelerator`` included
    device: TargetDevice = TargetDevice.DEFAULT  # where the reader wants the tensors
    communicator: CommunicatorSpec | None = None  # for ``communicator``, the user-defined communicator that is wanted


@dataclass(frozen=True, slots=True)
class Way:
    """How a value moves to a reader; the readers that get a value the same way share a channel."""

    # transport, device: as in `ChannelSpec`.
    transport: Transport
    device: TargetDevice = TargetDevice.DEFAULT
    # communicator, reader: for ``communicator``, the communicator's id, and the reader: each reader has its own channel.
    communicator: str = ""
    reader: str = ""
    host: str = ""  # for ``tcp``, where the readers are: each host has its own channel


@dataclass(frozen=True, slots=True)
class Gpus:
    """Who has which GPUs, and what is known of them."""

    of: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # indices of the GPUs of the actors that have any
    # what lies between them. Links without rates decide by their kind; where nothing is known, copies are taken to reach.
    topology: Topology | None = None
    uuids: Mapping[int, str] = field(default_factory=dict)  # of the GPUs by index, as far as they are known
    hosts: Mapping[str, str] = field(default_factory=dict)  # where each party is; none where that is the same for all
    # The cluster is a description: what no engine carries between hosts, gloo edges and communicators, is planned all the same.
    is_described: bool = False

    def are_apart(self, parties: Iterable[str]) -> bool:
        """Whether these parties are on several hosts."""
        return len({self.hosts.get(party) for party in parties}) > 1

    def links(self, writer: str, reader: str) -> Iterator[Link]:
        """What is known of the ways that tensors take between two actors; a way within one GPU is none."""
        for source, target in gpu_pairs(self.of.get(writer, ()), self.of.get(reader, ())):
            ends = self.uuids.get(source, ""), self.uuids.get(target, "")
            if self.topology is not None and source != target:
                with suppress(KeyError):  # not known
                    yield self.topology.link(*ends)

    def firsts(self, parties: Iterable[str]) -> Gpus:
        """The same for these parties, each with its first GPU alone, on which it does collectives."""
        return replace(self, of={party: self.of[party][:1] for party in parties})


def gpu_pairs(sources: tuple[int, ...], targets: tuple[int, ...]) -> list[tuple[int, int]]:
    """From which GPU of a writer to which of a reader tensors go: to that of the same position where both have as many, else to
    the first.
    """
    pairs = zip(sources, targets if len(sources) == len(targets) else targets[:1] * len(sources), strict=False)
    return list(dict.fromkeys(pairs))


def choose(wish: Wish, writer: str, reader: str, gpus: Gpus, *, size_bytes: int = 0) -> Way:
    """How a value of the declared size (or 0) goes from one party to another. Raises a `GraphError` if the wish cannot be met."""
    has_gpu = bool(gpus.of.get(writer)), bool(gpus.of.get(reader))
    are_apart = gpus.are_apart((writer, reader))
    if are_apart and not gpus.is_described and DRIVER not in (writer, reader):
        _check_between_hosts(wish, writer, reader, gpus)
    if wish.transport == Transport.TCP and not are_apart and DRIVER not in (writer, reader):
        raise GraphError(
            f"{_asks(wish, writer, reader)}, which are on one host", hint="'auto' takes 'tcp' where it is needed"
        )
    by_hosts, host = (Transport.TCP, gpus.hosts[reader]) if are_apart else (Transport.SHM, "")
    if DRIVER in (writer, reader):
        _check_device(wish, by_hosts, writer, reader, gpus)
        return Way(by_hosts, _device(wish, by_hosts, writer, reader, has_gpu[1]), host=host)
    if wish.communicator is not None:
        return _by_communicator(wish, wish.communicator, writer, reader, has_gpu[1])
    transport = Transport(wish.transport)
    if transport is Transport.ACCELERATOR or transport.moves_device_memory:
        _check_ends(wish, writer, reader, has_gpu)
        if transport is Transport.ACCELERATOR:
            transport = _between(writer, reader, gpus, size_bytes)
        elif transport is Transport.STAGED and by_hosts is Transport.TCP:
            raise GraphError(
                f"{_asks(wish, writer, reader)}, which are on different hosts",
                hint="'auto' takes 'nccl' there; 'staged' goes through the memory of one host",
            )
        elif transport is Transport.COPY:
            _check_reach(wish, writer, reader, gpus)
        elif transport is Transport.NCCL:
            _check_apart(wish, writer, reader, gpus)
    elif transport is Transport.AUTO:
        is_direct = all(has_gpu) and wish.device is not TargetDevice.CPU
        transport = _between(writer, reader, gpus, size_bytes) if is_direct else by_hosts
    elif transport is Transport.SHM:
        transport = by_hosts
    _check_device(wish, transport, writer, reader, gpus)
    return Way(transport, _device(wish, transport, writer, reader, has_gpu[1]), host=host)


def _check_device(wish: Wish, transport: Transport, writer: str, reader: str, gpus: Gpus) -> None:
    """What TCP brings stays on the CPU."""
    if transport is Transport.TCP and wish.device is TargetDevice.CUDA and not gpus.is_described:
        raise GraphError(
            f"{_asks(wish, writer, reader)}, for tensors on the GPU, and what goes between their hosts by 'tcp' arrives on the CPU",
            hint="leave the device out and move them in the method; between two actors with GPUs 'nccl' is there",
        )


def _check_between_hosts(wish: Wish, writer: str, reader: str, gpus: Gpus) -> None:
    """What goes between hosts, for edges between actors."""
    asked = "a communicator" if wish.communicator is not None else repr(str(wish.transport))
    apart = f"{writer} is on {gpus.hosts[writer]} and {reader} on {gpus.hosts[reader]}"
    if wish.communicator is not None or wish.transport not in _BETWEEN_HOSTS:
        raise GraphError(
            f"{describe(wish.node)} asks for {asked} from {writer} to {reader}, and {apart}",
            hint="between hosts 'auto', 'tcp' and 'nccl' are there; place the two on one node for the others",
        )


def _by_communicator(wish: Wish, communicator: CommunicatorSpec, writer: str, reader: str, has_gpu: bool) -> Way:
    asks = f"{describe(wish.node)} asks for a communicator from {writer} to {reader}"
    members = communicator.parties
    outside = [party for party in (writer, reader) if party not in members]
    if outside:
        raise GraphError(
            f"{asks}, in whose group {' and '.join(outside)} {'are' if outside[1:] else 'is'} not: it has {', '.join(members)}",
            hint="list the actor's handle in get_actor_handles(); with_tensor_transport('auto', reader=...) asks for nothing to "
            "one reader",
        )
    if wish.device is TargetDevice.CUDA or (wish.device is TargetDevice.CPU and has_gpu):
        raise GraphError(
            f"{asks}, and for the device {str(wish.device)!r}",
            hint="leave the device out: the communicator's recv decides where a tensor comes",
        )
    return Way(Transport.COMMUNICATOR, communicator=communicator.id, reader=reader)


def _between(writer: str, reader: str, gpus: Gpus, size_bytes: int) -> Transport:
    """The quickest transport between two actors that have GPUs."""
    if gpus.are_apart((writer, reader)):
        return Transport.NCCL
    known = list(gpus.links(writer, reader))
    if not all(map(is_reached_by_copies, known)):
        return Transport.STAGED
    if gpus.topology is None or not known:
        return Transport.COPY
    of = size_bytes or TYPICAL_BYTES
    times_us = {
        transport: [_alone_us(gpus.topology, transport, link, of) for link in known]
        for transport in (Transport.COPY, Transport.STAGED)
    }
    measured = {transport: sum(each) for transport, each in times_us.items() if None not in each}  # type: ignore[arg-type]
    return min(measured, key=measured.__getitem__) if len(measured) > 1 else Transport.COPY


def _alone_us(topology: Topology, transport: Transport, link: Link, size_bytes: int) -> float | None:
    if link.duration_us(transport, size_bytes) is None:
        return None
    return links.alone_us(topology, transport, link.source, link.target, size_bytes)


def is_reached_by_copies(link: Link) -> bool:
    """Signals are trusted to arrive behind the data over NVLink only."""
    return link.kind is LinkKind.NVLINK


def _check_ends(wish: Wish, writer: str, reader: str, has_gpu: tuple[bool, bool]) -> None:
    """Both actors have a GPU; for what memory of the host can stand in for, both or neither."""
    asks = _asks(wish, writer, reader)
    if wish.device is TargetDevice.CPU:
        raise GraphError(
            f"{asks}, which moves device tensors, and for tensors on the CPU",
            hint="leave one of both out: 'auto' takes tensors from a GPU to a CPU",
        )
    if all(has_gpu) or (wish.transport in _HAVE_STAND_INS and not any(has_gpu)):
        return
    without = [party for party, has in zip((writer, reader), has_gpu, strict=True) if not has]
    rays = " (Ray's 'nccl' means that too)" if wish.transport == Transport.ACCELERATOR else ""
    raise GraphError(
        f"{asks}{rays}, which goes from GPU to GPU, and {' and '.join(without)} {'have' if without[1:] else 'has'} none",
        hint="options(num_gpus=1) gives an actor a GPU; with_tensor_transport('auto', reader=...) asks for nothing to one reader",
    )


def _asks(wish: Wish, writer: str, reader: str) -> str:
    return f"{describe(wish.node)} asks for the transport {wish.transport!r} from {writer} to {reader}"


def _check_reach(wish: Wish, writer: str, reader: str, gpus: Gpus) -> None:
    for link in gpus.links(writer, reader):
        if not is_reached_by_copies(link):
            raise GraphError(
                f"{_asks(wish, writer, reader)}, and their GPUs, {link.source} and {link.target}, are not connected by NVLink "
                f"but by {link.kind}",
                hint="'staged' goes through the host; 'auto' chooses; `crossfade topology` shows the links",
            )


def _check_apart(wish: Wish, writer: str, reader: str, gpus: Gpus) -> None:
    """NCCL refuses a communicator of two processes on one GPU."""
    if gpus.are_apart((writer, reader)):
        return
    for source, target in gpu_pairs(gpus.of[writer], gpus.of[reader]):
        if source == target:
            raise GraphError(
                f"{_asks(wish, writer, reader)}, which share GPU {source}, and NCCL takes one process of each GPU",
                hint="'auto' takes 'copy' there; num_gpus=1 gives each of them a GPU of its own",
            )


def _device(wish: Wish, transport: Transport, writer: str, reader: str, has_gpu: bool) -> TargetDevice:
    """Where the reader gets the tensors, said only where that is not what it gets by default."""
    if wish.device is TargetDevice.CPU:
        return TargetDevice.CPU if has_gpu else TargetDevice.DEFAULT
    if wish.device is TargetDevice.CUDA and reader == DRIVER:
        raise GraphError(
            f"{describe(wish.node)} asks for its tensors on the GPU of the driver, which uses none",
            hint="results come on the CPU: leave `device` out, or ask for the actors that read the value: reader=...",
        )
    if wish.device is TargetDevice.CUDA and not has_gpu and transport not in _HAVE_STAND_INS:
        raise GraphError(
            f"{describe(wish.node)} asks for its tensors on the GPU of {reader}, which has none",
            hint="options(num_gpus=1) gives an actor a GPU; or leave `device` out, also for this reader alone: reader=...",
        )
    if wish.device is TargetDevice.CUDA and transport is Transport.GLOO:
        raise GraphError(
            f"{_asks(wish, writer, reader)}, which gives CPU tensors, and for tensors on the GPU",
            hint="leave the transport out: 'auto', and all transports but 'gloo' bring CPU tensors to the reader's GPU",
        )
    return wish.device


def transport_of_collective(asked: str, parties: Sequence[str], gpus: Gpus) -> Transport:
    """How a collective's tensors move: where all parties have GPUs, by their copy engines, or by NCCL if not all of these reach
    each other. What is not known is taken to be reached, as for edges.
    """
    without = [party for party in parties if not gpus.of.get(party)]
    if asked == Transport.AUTO and without:
        return Transport.GLOO
    is_any = asked in (Transport.AUTO, Transport.ACCELERATOR)
    transport = Transport.COPY if is_any else Transport(asked)
    if transport is Transport.COPY and len(without) == len(parties) and not is_any and not gpus.are_apart(parties):
        return transport
    if without and transport.moves_device_memory:
        raise GraphError(
            f"a collective asks for the transport {str(asked)!r}, and {', '.join(without)} has no GPU",
            hint="give each of its actors one, with num_gpus=1, or leave the transport out",
        )
    far = _out_of_reach(parties, gpus) if transport is Transport.COPY else None
    if far is None:
        return transport
    if not is_any:
        raise GraphError(
            f"a collective asks for the transport {str(asked)!r}, and {far}",
            hint="'auto' takes NCCL; `crossfade topology` shows the links",
        )
    _check_that_nccl_can(parties, gpus, far)
    return Transport.NCCL


def _out_of_reach(parties: Sequence[str], gpus: Gpus) -> str | None:
    """Between which two of the parties copies are known not to reach, in words."""
    if gpus.are_apart(parties):
        return f"its actors are on several hosts: {', '.join(f'{party} on {gpus.hosts[party]}' for party in parties)}"
    firsts = gpus.firsts(parties)
    for one, other in permutations(parties, 2):
        for link in firsts.links(one, other):
            if not is_reached_by_copies(link):
                whose = f"the GPUs of {one} and {other}, {link.source} and {link.target}"
                return f"{whose}, are not connected by NVLink but by {link.kind}"
    return None


def _check_that_nccl_can(parties: Sequence[str], gpus: Gpus, far: str) -> None:
    """NCCL takes one party of each GPU."""
    owner: dict[tuple[str, int], str] = {}
    for party in parties:
        gpu = gpus.hosts.get(party, ""), gpus.of[party][0]
        if gpu in owner:
            raise GraphError(
                f"there is no way for a collective of {', '.join(parties)}: {far}, and {owner[gpu]} and {party} share GPU "
                f"{gpu[1]}, which NCCL refuses",
                hint="give each of them a GPU of its own, with num_gpus=1; transport='gloo' takes CPU tensors",
            )
        owner[gpu] = party
