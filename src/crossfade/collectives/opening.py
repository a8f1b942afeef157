"""Opens a group: its parties meet, in two steps. All of them call it, and wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch

from crossfade.collectives.group import Group
from crossfade.collectives.movers.c10d import C10dOpener
from crossfade.collectives.movers.communicator import CommunicatorOpener
from crossfade.collectives.movers.copies import CopyOpener
from crossfade.collectives.movers.kernels import load_reductions
from crossfade.collectives.parties import Parties
from crossfade.collectives.protocol import Mover
from crossfade.collectives.rendezvous import Rendezvous
from crossfade.collectives.table import Part
from crossfade.collectives.terms import Terms
from crossfade.device.home import DeviceHome
from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import Pool
from crossfade.device.streams import Streams
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Memory
from crossfade.types import Transport

__all__ = ["MoverOpener", "host_context", "open_group"]

_HOST_WAIT_S = 60.0


class MoverOpener(Protocol):
    """Makes a mover in two steps.

    Attributes:
        signal_bytes: of each party's part of the table, for the mover's signals.
    """

    signal_bytes: int

    def describe(self, opened: ExitStack) -> str:
        """Takes what the other parties' movers need of this one, to be given back by ``opened``; a text by which they find it."""

    def open(
        self, opened: ExitStack, rendezvous: Rendezvous, parts: Sequence[Part], published: Sequence[tuple[int, str]]
    ) -> Mover:
        """Makes the mover.

        Args:
            opened: gives everything back.
            rendezvous: of the parties.
            parts: of the table, by rank.
            published: process id and description of each party, by rank.
        """


def host_context() -> DeviceHome:
    """The CPU in the place of a device."""
    driver = HostDriver(_HOST_WAIT_S, hint="a party of the collective is stopped, or its machine is overloaded")
    return DeviceHome(driver, Pool(driver), Streams(driver))


def open_group(
    transport: Transport,
    store: Memory,
    number: int,
    parties: Sequence[str],
    me: str,
    bells: Mapping[str, Bell],
    terms: Sequence[Terms],
    context: DeviceHome | None = None,
    on_death: Callable[[str], None] | None = None,
    communicator: Any = None,
    buffer_bytes: int | None = None,
) -> Group:
    """Opens this party's part of a group.

    Args:
        transport: moves the tensors.
        store: memory that all parties see, to meet in; owned by this function from now on.
        number: the group's number among those of the plan.
        parties: everybody's name, in the same order everywhere.
        me: this party's.
        bells: the doorbells of all of them.
        terms: the collectives that they do together.
        context: this party's device; None for the CPU. Transports of CPU tensors do not use it.
        on_death: called with the name of a party that has died, in another thread, before any stream that waits for it is released.
        communicator: the user's, for `Transport.COMMUNICATOR`; stays the caller's.
        buffer_bytes: of each of the four buffers of a group that moves by copies; longer tensors go in pieces.

    Raises:
        ChannelError: the parties could not connect, or another one cannot take part.
        DeviceError, MissingDependency: this one cannot.
    """
    is_on_device = context is not None and transport.moves_device_memory
    device = context if context is not None and is_on_device else host_context()
    opener: MoverOpener
    match transport:
        case Transport.COPY:
            opener = CopyOpener(device, parties, buffer_bytes, on_death)
        case Transport.COMMUNICATOR:
            opener = CommunicatorOpener(communicator)
        case _:
            opener = C10dOpener(device, is_nccl=transport is Transport.NCCL)
    with (
        torch.cuda.device(device.device),
        ExitStack() as opened,
    ):  # another one may be this thread's; -1, the CPU, does nothing
        opened.callback(store.close)
        if not is_on_device:
            opened.callback(device.pool.close)
        rendezvous = Rendezvous(store, number, parties, me)
        opened.callback(rendezvous.close)
        num_slots = 2 * len(terms)
        with rendezvous.reporting("part"):
            own = rendezvous.create_part(opener.signal_bytes, num_slots)
            opened.callback(own.close)
            rendezvous.publish("part", [rendezvous.address_of(own), opener.describe(opened)])
        published = rendezvous.gather("part")
        with rendezvous.reporting("ready"):
            addresses = [address for address, _ in published]
            table = rendezvous.open_table(own, addresses, opener.signal_bytes, num_slots)
            opened.callback(table.close)
            pids = {party: pid for party, (pid, *_) in zip(parties, addresses, strict=True)}
            others = Parties(parties, me, bells, {party: pid for party, pid in pids.items() if party != me})
            opened.callback(others.close)
            load_reductions(terms, device.device)
            descriptions = [(pids[party], text) for party, (_, text) in zip(parties, published, strict=True)]
            mover = opener.open(opened, rendezvous, table.parts, descriptions)
            rendezvous.publish("ready", None)
        rendezvous.gather("ready")
        return Group(table, mover, device, others, opened.pop_all().close)
