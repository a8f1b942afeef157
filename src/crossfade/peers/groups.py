"""The groups of this process: which one a call means, opened on first use.

A call is given a `PeerGroup`, a process group of torch.distributed, or None for the default one. For a process group the first
`PeerGroup` counts that was opened of it for the kind of device of the call's tensor; where there is none, the call opens it. All
ranks of the process group make that call, so opening is collective.

What was opened by itself lives as long as it can be meant: it is closed when its ranks open another one after they have destroyed
the process group, and else when the process ends (or by `close_groups`).
"""

from __future__ import annotations

import atexit
import os
from contextlib import suppress
from threading import RLock
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import ref

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import ChannelError, DeviceError
from crossfade.peers.group import PeerGroup, open_by_key, open_of
from crossfade.peers.keys import PROCESS_GROUP, GroupKey
from crossfade.peers.opening import open_group
from crossfade.peers.rendezvous import gather

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    GroupLike: TypeAlias = PeerGroup | ProcessGroup | None
    Place: TypeAlias = torch.Tensor | torch.device | str | None

_OPENED: list[PeerGroup] = []
_AT_EXIT: list[ref[PeerGroup]] = []
_OPENING = RLock()


def group_of(group: GroupLike, place: Place = None) -> PeerGroup:
    """The open group that is meant; for a process group of which there is none, opens it, which is collective.

    Args:
        group: an open group, a process group, or None for the default process group.
        place: a tensor of the call, or a device; None for torch's current GPU, or the CPU where there is none.

    Raises:
        DeviceError: there is no process group, or the machine or the group does not allow it; or the current stream is being
        captured,
            and it would have to be opened.
    """
    if isinstance(group, PeerGroup):
        return group
    process_group = _process_group(group)
    device = _device(place)
    return open_of(process_group, device.type) or _open(process_group, device)


def ranks_of(group: GroupLike) -> tuple[int, int]:
    """This rank, and of how many. Opens nothing."""
    if isinstance(group, PeerGroup):
        return group.rank, group.num_ranks
    process_group = _process_group(group)
    return process_group.rank(), process_group.size()


def key_of(group: GroupLike) -> str:
    """What `find_group` finds the group by. torch.compile follows it: text, rank and number of ranks are constants."""
    if isinstance(group, PeerGroup):
        return group.key
    process_group = _process_group(group)
    return f"{PROCESS_GROUP}{process_group.group_name}, rank {process_group.rank()} of {process_group.size()}"


def find_group(key: str, place: Place = None) -> PeerGroup:
    """The group of a key. Of a process group it may be opened now, as by `group_of`."""
    name = GroupKey.parse(key).name
    if not name.startswith(PROCESS_GROUP):
        return open_by_key(key)
    resolve: Any = torch_or_raise().distributed.distributed_c10d._resolve_process_group
    return group_of(resolve(name.removeprefix(PROCESS_GROUP)), place)


def close_groups() -> None:
    """Closes all groups that calls have opened by themselves, in their order. All ranks call it, or end. Idempotent.

    Raises:
        ChannelTimeout: CPU only: not all ranks of one came. All are closed all the same.
    """
    with _OPENING:
        failed: ChannelError | None = None
        while _OPENED:
            try:
                _OPENED.pop(0).close()
            except ChannelError as error:
                failed = failed or error
        if failed is not None:
            raise failed


def _process_group(group: ProcessGroup | None) -> ProcessGroup:
    if group is not None:
        return group
    default: ProcessGroup | None = torch_or_raise().distributed.group.WORLD
    if default is None:
        raise DeviceError(
            "there is no process group", hint="call torch.distributed.init_process_group first, or give a group"
        )
    return default


def _device(place: Place) -> torch.device:
    torch = torch_or_raise()
    if place is None:
        place = "cuda" if torch.cuda.is_available() else "cpu"
    if isinstance(place, torch.Tensor):
        return place.device  # type: ignore[no-any-return]
    if not isinstance(place, str | torch.device):
        raise TypeError(f"an input is a {type(place).__name__}\nhint: give a torch tensor")
    return torch.device(place)  # type: ignore[no-any-return]


def _open(process_group: ProcessGroup, device: torch.device) -> PeerGroup:
    torch = torch_or_raise()
    if not isinstance(process_group, torch.distributed.ProcessGroup):
        raise TypeError(
            f"the group is a {type(process_group).__name__}\n"
            "hint: one of torch.distributed, what open_group gave, or None for the default group"
        )
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise DeviceError(
            "this call is the first one of its process group, whose buffers it would open, and it is being captured",
            hint="make one such call before the capture, or open_group() first",
        )
    with _OPENING:
        if (found := open_of(process_group, device.type)) is not None:
            return found
        group = open_group(process_group, device=device, is_replayable=True)
        keep(group)
        return group


def keep(group: PeerGroup) -> None:
    """A call has opened it, and not the user: it lives as long as it can be meant. Collective, when it is opened."""
    with _OPENING:
        if group not in _OPENED:
            _close_destroyed(group)
            close_at_exit(group)
            _OPENED.append(group)


def close_at_exit(group: PeerGroup) -> None:
    """Closes it at the end of the process, if nobody has before. Those of several groups go in the order in which they were opened:
    closing waits for a group's ranks, and two ranks that are in two groups would wait for each other in other orders.
    """
    _AT_EXIT[:] = [*(known for known in _AT_EXIT if known() is not None), ref(group)]
    atexit.unregister(_close_at_exit)
    atexit.register(_close_at_exit, os.getpid())


def _close_destroyed(new: PeerGroup) -> None:
    """Closes those of the same processes whose process group is destroyed, if all of these see the same ones. Collective."""
    process_group: Any = new.process_group
    gone = [each for each in _OPENED if set(each.pids) == set(new.pids) and each.process_group is None]
    rows = gather(process_group, new.device, [len(gone), sum(each.number for each in gone)])
    if all(row == rows[0] for row in rows):
        for each in gone:
            _OPENED.remove(each)
            with suppress(ChannelError):
                each.close()


def _close_at_exit(pid: int) -> None:
    """The others may still read this rank's memory: it goes when all are done, or dead. Forks of this process leave it alone."""
    if os.getpid() == pid:
        for known in _AT_EXIT:
            if (group := known()) is not None:
                with suppress(Exception):
                    group.close()
