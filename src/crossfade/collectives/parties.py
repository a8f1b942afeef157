"""The parties of a group as one of them has them: names, doorbells, and the processes of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from crossfade.host.bulletin import FarAlive
from crossfade.host.doorbell import Bell
from crossfade.host.processes import Alive


class Parties:
    """All parties, in the order of ranks. ``bells`` are the doorbells of those of this host, ``alive`` says who is not."""

    def __init__(self, names: Sequence[str], me: str, bells: Mapping[str, Bell], alive: Alive | FarAlive) -> None:
        self.names = tuple(names)
        self.label = ", ".join(names)
        self.own_bell = bells[me]
        self.other_bells = [bell for name, bell in bells.items() if name != me]
        self.alive = alive

    def death(self, wait_s: float = 0.0) -> str:
        """A sentence that names the dead; empty if there are none.

        The system knows of a death before this party does: others that heard of it first may have left because of it.
        """
        dead = self.alive.check(wait_s)
        how = "cannot be reached any more" if isinstance(self.alive, FarAlive) else "is gone"
        return f"the process of {' and '.join(dead)} {how}" if dead else ""
