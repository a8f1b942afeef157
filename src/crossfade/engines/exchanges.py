"""The groups in which a process does collectives on its devices, of all its plans.

A value that one plan's method uses may have been sent behind another plan's exchange. So whatever may wait for a device comes
behind a look at the groups of all plans (`crossfade.collectives.group.Group.enqueue_all`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from crossfade.collectives.group import Group


class Exchanges:
    """Any thread adds groups; one thread asks them, and drops those that are over."""

    def __init__(self) -> None:
        self._groups: tuple[Group, ...] = ()
        self._lock = threading.Lock()

    def add(self, group: Group) -> None:
        with self._lock:
            self._groups = (*self._groups, group)

    def forget_over(self) -> None:
        """Groups that do nothing any more need not be kept."""
        with self._lock:
            self._groups = tuple(each for each in self._groups if not each.is_over)

    def enqueue_all(self) -> None:
        """Before a method, or anything else that may wait for a device. As a rule there is nothing to do."""
        for group in self._groups:
            group.enqueue_all()
