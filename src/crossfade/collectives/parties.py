"""The parties of a group as one of them has them: names, doorbells, and the processes of the others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

from crossfade.host.doorbell import Bell
from crossfade.host.processes import Alive, open_pidfd

__all__ = ["Parties"]


class Parties:
    """All parties, in the order of ranks. ``bells`` are the doorbells of all, ``pids`` the process ids of the others."""

    def __init__(self, names: Sequence[str], me: str, bells: Mapping[str, Bell], pids: Mapping[str, int]) -> None:
        self.names = tuple(names)
        self.label = ", ".join(names)
        self.own_bell = bells[me]
        self.other_bells = [bells[name] for name in names if name != me]
        with ExitStack() as undo:
            pidfds = {name: open_pidfd(pid, undo) for name, pid in pids.items()}
            self.alive = Alive(pidfds)

    def death(self, wait_s: float = 0.0) -> str:
        """A sentence that names the dead; empty if there are none.

        The system knows of a death before this party does: others that heard of it first may have left because of it.
        """
        dead = self.alive.check(wait_s)
        return f"the process of {' and '.join(dead)} is gone" if dead else ""
