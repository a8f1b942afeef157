"""Names of open groups, for places where no object can be: what torch.compile traces holds numbers and text."""

from __future__ import annotations

import re
from typing import NamedTuple

PROCESS_GROUP = "process group "
"""How the name begins of what need not be open yet."""
_TEXT = re.compile(r"((?:process )?group .+), rank (\d+) of (\d+)")


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
