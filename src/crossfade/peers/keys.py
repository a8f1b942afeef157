"""Open groups by name, for places where no object can be: what torch.compile traces holds numbers and text."""

from __future__ import annotations

import re
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from weakref import WeakValueDictionary, finalize, ref

from crossfade.errors import ChannelClosed

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

PROCESS_GROUP = "process group "
"""How the name begins of what need not be open yet."""
_NUMBERS = count(1)
_OPEN: WeakValueDictionary[str, Any] = WeakValueDictionary()
_OF: dict[int, dict[str, ref[Any]]] = {}
"""The open groups of a process group, by its `id` while it lives; by key, in their order."""
_TEXT = re.compile(r"((?:process )?group .+), rank (\d+) of (\d+)")


class _Ranks(Protocol):
    """An open group, as far as its key depends on it."""

    rank: int
    num_ranks: int
    device_type: str
    is_staged: bool

    @property
    def process_group(self) -> ProcessGroup | None: ...


class GroupKey(NamedTuple):
    """One rank's side of a group, in its process: ``group 1`` for the first that the process has opened, or the name of a process
    group behind `PROCESS_GROUP`.
    """

    name: str
    rank: int
    num_ranks: int

    @classmethod
    def parse(cls, text: str) -> GroupKey:
        """What `str` gave."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is no group's key\nhint: PeerGroup.key")
        return cls(match[1], int(match[2]), int(match[3]))

    def __str__(self) -> str:
        return f"{self.name}, rank {self.rank} of {self.num_ranks}"


def register(group: _Ranks) -> str:
    """A new key of an open group."""
    key = str(GroupKey(f"group {next(_NUMBERS)}", group.rank, group.num_ranks))
    _OPEN[key] = group
    if (process_group := group.process_group) is not None:
        if id(process_group) not in _OF:
            _OF[id(process_group)] = {}
            finalize(process_group, _OF.pop, id(process_group), None).atexit = False
        _OF[id(process_group)][key] = ref(group)
    return key


def forget(key: str) -> None:
    """The group is closed. Idempotent."""
    _OPEN.pop(key, None)
    for known in list(_OF.values()):
        known.pop(key, None)


def find(key: str) -> Any:
    """The open group of a key."""
    group = _OPEN.get(key)
    if group is None:
        raise ChannelClosed(
            f"there is no open group '{key}' in this process",
            hint="keep the group open as long as what was compiled with it is called; with a new one, call torch.compile again",
        )
    return group


def find_of(process_group: ProcessGroup, device_type: str) -> Any:
    """The first open group of a process group for a kind of device, a staged one only where there is no other; None if there is
    none.
    """
    staged = None
    for known in _OF.get(id(process_group), {}).values():
        group = known()
        if group is not None and group.device_type == device_type:
            if not group.is_staged:
                return group
            staged = staged or group
    return staged
