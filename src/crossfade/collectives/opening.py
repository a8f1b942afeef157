"""Opens a group: its parties meet, in two steps. All of them call it, and wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from crossfade.collectives.group import Group
from crossfade.collectives.movers.c10d import C10dMover
from crossfade.collectives.movers.communicator import CommunicatorMover
from crossfade.collectives.movers.copies import CopyMover
from crossfade.collectives.parties import Parties
from crossfade.collectives.protocol import Mover
from crossfade.collectives.rendezvous import Rendezvous
from crossfade.collectives.terms import WHOLE_NUMBERS, Terms, finish_reduction, reduce_in_order, reduced_dtype
from crossfade.device.context import DeviceContext
from crossfade.device.driver import HOST
from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import Pool
from crossfade.device.streams import Streams
from crossfade.host.bulletin import Bulletin, FarAlive
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Memory
from crossfade.host.processes import Alive, open_pidfd
from crossfade.types import CollectiveKind, ReduceOp, Transport

_HOST_WAIT_S = 60.0
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def host_context() -> DeviceContext:
    """The CPU in the place of a device."""
    driver = HostDriver(_HOST_WAIT_S, hint="a party of the collective is stopped, or its machine is overloaded")
    return DeviceContext(driver, Pool(driver), Streams(driver))


def open_group(
    transport: Transport,
    store: Memory | Bulletin,
    number: int,
    parties: Sequence[str],
    me: str,
    bells: Mapping[str, Bell],
    terms: Sequence[Terms],
    context: DeviceContext | None = None,
    on_death: Callable[[str], None] | None = None,
    communicator: Any = None,
    buffer_bytes: int | None = None,
) -> Group:
    """Opens this party's part of a group. All parties give the same ``transport``, ``number``, ``parties`` and ``terms``.

    ``store`` is memory in which all parties meet, owned by this function from now on; between hosts a bulletin, which stays
    the caller's. ``bells`` are those of this host; ``number`` tells the groups of a plan apart.
    ``context`` is this party's device, or None for the CPU; transports of CPU tensors do not use it. ``communicator`` is the
    user's, which stays the caller's. ``on_death`` and ``buffer_bytes``: see `CopyMover`. Raises a `ChannelError` if the parties
    could not connect or another one cannot take part, and a `DeviceError` or `MissingDependency` if this one cannot.
    """
    is_on_device = context is not None and transport.moves_device_memory
    device = context if context is not None and is_on_device else host_context()
    mover: Mover
    match transport:
        case Transport.COPY:
            mover = CopyMover(device, parties, buffer_bytes, on_death)
        case Transport.COMMUNICATOR:
            mover = CommunicatorMover(communicator)
        case _:
            mover = C10dMover(device, is_gloo=transport is Transport.GLOO)
    with (
        torch.cuda.device(device.device),
        ExitStack() as opened,
    ):  # another one may be this thread's; -1, the CPU, does nothing
        if isinstance(store, Memory):
            opened.callback(store.close)
        if not is_on_device:
            opened.callback(device.pool.close)
        rendezvous = Rendezvous(store, number, parties, me)
        opened.callback(rendezvous.close)
        num_slots = 2 * len(terms)
        with rendezvous.reporting("part"):
            own = rendezvous.create_part(mover.signal_bytes, num_slots)
            opened.callback(own.close)
            opened.callback(mover.close)
            rendezvous.publish("part", [rendezvous.address_of(own), mover.describe()])
        published = rendezvous.gather("part")
        with rendezvous.reporting("ready"):
            addresses = [address for address, _ in published]
            table = rendezvous.open_table(own, addresses, mover.signal_bytes, num_slots)
            opened.callback(table.close)
            pids = {party: pid for party, (pid, *_) in zip(parties, addresses, strict=True)}
            alive = _alive(store, {party: pid for party, pid in pids.items() if party != me})
            opened.callback(alive.close)
            others = Parties(parties, me, bells, alive)
            _load_reductions(terms, device.device)
            opened.callback(mover.close)  # before its table
            descriptions = [(pids[party], text) for party, (_, text) in zip(parties, published, strict=True)]
            mover.connect(rendezvous, table.parts, descriptions)
            rendezvous.publish("ready", None)
        rendezvous.gather("ready")
        return Group(table, mover, device, others, opened.pop_all().close)


def _alive(store: Memory | Bulletin, pids: Mapping[str, int]) -> Alive | FarAlive:
    """Says which of the other parties are dead, or cannot be reached."""
    if isinstance(store, Bulletin):
        return FarAlive(store, list(pids))
    with ExitStack() as undo:
        return Alive({party: open_pidfd(pid, undo) for party, pid in pids.items()})


def _load_reductions(terms: Sequence[Terms], device: int) -> None:
    """Runs, and so loads, torch's kernels that reduce, divide and convert tensors of each dtype for these collectives.

    No stream waits yet: loading a kernel later can hang (see `crossfade.device.tensors`).
    """
    if device == HOST:
        return
    for op in {each.op for each in terms if each.op is not None}:
        example = Terms("", CollectiveKind.ALLREDUCE, op, 0, ("", ""))
        for dtype in (*_FLOATS, *WHOLE_NUMBERS):
            if op is not ReduceOp.AVG or dtype.is_floating_point:
                rows = torch.ones(2, 8, device=f"cuda:{device}").to(dtype)
                torch.empty_like(rows[0]).copy_(reduce_in_order(example, list(rows)))
                rows.copy_(rows.to(reduced_dtype(dtype)))
                finish_reduction(example, rows[0])
    torch.cuda.synchronize(device)
