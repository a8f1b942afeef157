"""Opening groups for collectives of device tensors: by copy engines, or by NCCL. All parties do it, and wait for each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext

from crossfade.collectives.end import Mover
from crossfade.collectives.group import DeviceGroup
from crossfade.collectives.movers.kernels import load_reductions
from crossfade.collectives.rendezvous import Place
from crossfade.collectives.table import Part
from crossfade.collectives.terms import Meeting
from crossfade.device.borrowed import device_of
from crossfade.device.home import DeviceHome
from crossfade.device.host_driver import HostDriver
from crossfade.device.memory import Block, Pool
from crossfade.device.streams import Streams
from crossfade.errors import DeviceError
from crossfade.host.doorbell import Bell
from crossfade.host.memory import Memory
from crossfade.host.processes import open_pidfd
from crossfade.peers.exported_home import Rank, Shape, open_exported

__all__ = ["host_home", "open_copy_group", "open_nccl_group"]

_HOST_WAIT_S = 60.0
_NUM_LANES = 2
_GPU_BUFFER_BYTES = 32 << 20
_HOST_BUFFER_BYTES = 1 << 20


def host_home() -> DeviceHome:
    """The CPU in the place of a device."""
    driver = HostDriver(_HOST_WAIT_S, hint="a party of the collective is stopped, or its machine is overloaded")
    return DeviceHome(driver, Pool(driver), Streams(driver))


def open_copy_group(
    store: Memory,
    number: int,
    parties: Sequence[str],
    me: str,
    bells: Mapping[str, Bell],
    meetings: Sequence[Meeting],
    home: DeviceHome | None = None,
    on_death: Callable[[str], None] | None = None,
    *,
    buffer_bytes: int | None = None,
) -> DeviceGroup:
    """A group whose tensors are moved by copy engines.

    Args:
        store: memory that all parties see, for meeting each other; owned by this function from now on.
        number: the group's number among those of the plan.
        parties: everybody's name, in the same order everywhere.
        me: this party's.
        bells: the doorbells of all of them.
        meetings: what they do together.
        home: this party's device; None for the CPU in its place.
        on_death: is given the name of a party that has died, in another thread, before any stream that waits for it is let go.
        buffer_bytes: of each of the group's four buffers on each device; longer tensors go in pieces.

    Raises:
        ChannelError: the parties could not connect, or another one cannot take part.
        DeviceError: this one cannot.
    """
    device = host_home() if home is None else home
    size = buffer_bytes or (_HOST_BUFFER_BYTES if device.is_host else _GPU_BUFFER_BYTES)
    shape, label = Shape(len(parties), _NUM_LANES, size), f"collectives of {', '.join(parties)}"

    def handle(opened: ExitStack) -> str:
        if home is None:
            opened.callback(device.pool.close)
        block = device.pool.take(shape.data_bytes, f"buffers of {label}", label)
        opened.callback(block.drop, label)
        blocks.append(block)
        return f"{device.device} {block.handle.hex()}"

    def mover(opened: ExitStack, place: Place, parts: Sequence[Part], told: Sequence[tuple[int, str]]) -> Mover:
        from crossfade.collectives.movers.copies import CopyMover

        ranks = [
            Rank(party, pid, part.memory, bytes.fromhex(handle), int(index))
            for party, part, (pid, text) in zip(parties, parts, told, strict=True)
            for index, handle in [text.split()]
        ]
        group = open_exported(
            device.driver, blocks[0], ranks, place.rank, shape, signals_at=Part.SIGNALS_AT, on_death=on_death
        )
        opened.callback(group.close, have_met=True)
        return CopyMover(group, parties)

    blocks: list[Block] = []
    return _open(store, number, parties, me, bells, meetings, device, shape.signal_bytes, handle, mover)


def open_nccl_group(
    store: Memory,
    number: int,
    parties: Sequence[str],
    me: str,
    bells: Mapping[str, Bell],
    meetings: Sequence[Meeting],
    home: DeviceHome | None = None,
    on_death: Callable[[str], None] | None = None,
) -> DeviceGroup:
    """A group whose tensors NCCL moves (see `open_copy_group`).

    Raises:
        ChannelError: the parties could not connect, or another one cannot take part.
        DeviceError, MissingDependency: this one cannot.
    """

    def nothing(opened: ExitStack) -> str:
        if home is None or home.is_host:
            raise DeviceError(f"{me} has no GPU, which NCCL needs", hint="give its actor one: num_gpus=1")
        return ""

    def mover(opened: ExitStack, place: Place, parts: Sequence[Part], told: Sequence[tuple[int, str]]) -> Mover:
        from crossfade.collectives.movers.c10d import GroupMover, open_nccl

        group = open_nccl(place.store, place.rank, len(parties), device_of(device.device))
        return GroupMover(group, parties)

    device = host_home() if home is None else home
    return _open(store, number, parties, me, bells, meetings, device, 0, nothing, mover)


_MakeMover = Callable[[ExitStack, Place, Sequence[Part], Sequence[tuple[int, str]]], Mover]


def _open(
    store: Memory,
    number: int,
    parties: Sequence[str],
    me: str,
    bells: Mapping[str, Bell],
    meetings: Sequence[Meeting],
    home: DeviceHome,
    signal_bytes: int,
    make_text: Callable[[ExitStack], str],
    make_mover: _MakeMover,
) -> DeviceGroup:
    """In two steps: each tells of its part, and a text of its own; each makes what moves tensors of what all told."""
    num_slots = 2 * len(meetings)
    with _current(home), ExitStack() as opened:
        opened.callback(store.close)
        place = Place(store, number, parties, me)
        opened.callback(place.close)
        with place.reporting("part"):
            own = place.create_part(signal_bytes, num_slots)
            opened.callback(own.close)
            place.tell("part", [place.where(own), make_text(opened)])
        told = place.hear("part")
        with place.reporting("ready"):
            table = place.open_table(own, [where for where, _ in told], signal_bytes, num_slots)
            opened.callback(table.close)
            pidfds = {}
            for party, ((pid, _, _), _) in zip(parties, told, strict=True):
                if party != me:
                    pidfds[party] = open_pidfd(pid)
                    opened.callback(os.close, pidfds[party])
            load_reductions(meetings, home.device)
            mover = make_mover(opened, place, table.parts, [(where[0], text) for where, text in told])
            place.tell("ready", None)
        place.hear("ready")
        return DeviceGroup(table, mover, home, parties, bells, pidfds, opened.pop_all().close)


def _current(home: DeviceHome) -> AbstractContextManager[object]:
    """Makes the device torch's current one: this may be a thread in which another one is."""
    if home.is_host:
        return nullcontext()
    import torch

    return torch.cuda.device(home.device)
