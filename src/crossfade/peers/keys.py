"""Groups by name, for places where no object can be: what torch.compile traces holds numbers and text."""

from __future__ import annotations

import re
from itertools import count
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakValueDictionary

from crossfade.errors import ChannelClosed

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup

__all__ = ["GroupKey", "find_group", "forget", "register"]

_NUMBERS = count(1)
_OPEN: WeakValueDictionary[str, PeerGroup] = WeakValueDictionary()
_TEXT = re.compile(r"group (\d+), rank (\d+) of (\d+)")


class GroupKey(NamedTuple):
    """One rank's side of a group, in its process.

    Attributes:
        number: of all groups that the process has opened.
        rank, num_ranks: this rank, and of how many.
    """

    number: int
    rank: int
    num_ranks: int

    @classmethod
    def parse(cls, text: str) -> GroupKey:
        """What `str` gave.

        Raises:
            ValueError: it is no key's text.
        """
        match = _TEXT.fullmatch(text)
        if match is None:
            raise ValueError(f"'{text}' is no group's key\nhint: PeerGroup.key")
        return cls(*map(int, match.groups()))

    def __str__(self) -> str:
        return f"group {self.number}, rank {self.rank} of {self.num_ranks}"


def register(group: PeerGroup) -> str:
    """A new key of an open group."""
    key = str(GroupKey(next(_NUMBERS), group.rank, group.num_ranks))
    _OPEN[key] = group
    return key


def forget(key: str) -> None:
    """The group is closed. Idempotent."""
    _OPEN.pop(key, None)


def find_group(key: str) -> PeerGroup:
    """The open group of a key.

    Raises:
        ChannelClosed: it is closed, or never was in this process.
    """
    group = _OPEN.get(key)
    if group is None:
        raise ChannelClosed(
            f"there is no open group '{key}' in this process",
            hint="keep the group open as long as what was compiled with it is called; with a new one, call torch.compile again",
        )
    return group
