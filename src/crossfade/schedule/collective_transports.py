"""Which transport moves the tensors of a collective: what was asked, against the GPUs of its actors and what lies between them.

==================================================  ========================================================================
actors                                              ``auto``
==================================================  ========================================================================
one has no GPU                                      ``gloo``
all have one, and copies reach from each to each    ``copy``
all have one, and copies do not, as between hosts   ``nccl``
==================================================  ========================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations

from crossfade.errors import GraphError
from crossfade.schedule.transports import Gpus, is_reached_by_copies
from crossfade.types import Transport

__all__ = ["transport_of_collective"]


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
