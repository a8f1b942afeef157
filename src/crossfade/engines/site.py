"""One host's part of a plan: the memory of its rings, handed out to the actors that are there. By the driver on its own host, by an
agent of the driver's on others.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from contextlib import ExitStack

from crossfade.engines import control
from crossfade.engines.board import (
    board_size_bytes,
    device_memories,
    format_board,
    heap_owners,
    heaps_of,
    meeting_parties,
    peers_of,
    uses_devices,
)
from crossfade.engines.local_processes import Processes
from crossfade.host.memory import Memory
from crossfade.plan.plan import Plan
from crossfade.plan.turns import predecessors


class Site:
    """The memory. ``undo`` gives it back, but for the heaps of ``keeper``, a party of this process, which are ``kept``."""

    def __init__(self, plan: Plan, host: str, undo: ExitStack, keeper: str = "") -> None:
        self._plan = plan

        def create(label: str, size_bytes: int, undo: ExitStack = undo) -> Memory:
            memory = Memory.create(label, size_bytes)
            undo.callback(memory.close)
            return memory

        self._board_memory = create("board", board_size_bytes(plan, host))
        self.board: mmap.mmap = self._board_memory.map(self._board_memory.size_bytes, populate=True)
        format_board(plan, self.board, host)
        self._own = undo.enter_context(ExitStack())
        kept = heaps_of(plan, keeper) if keeper else ()
        self._heaps = {
            owner: create(f"heap-{owner}", 0, self._own if owner in kept else undo) for owner in heap_owners(plan, host)
        }
        self.kept: Mapping[str, Memory] = {owner: self._heaps[owner] for owner in kept}
        self._meeting = meeting_parties(plan)
        self._store = create("store", 0) if self._meeting else None
        self._shared = [create(name, size_bytes) for name, size_bytes in device_memories(plan, host).items()]

    def keep(self) -> None:
        """The heaps that are kept have another owner from now on."""
        self._own.pop_all()

    def hand_out(self, processes: Processes, messages: Mapping[str, control.OpenPlan]) -> None:
        """Makes the actors of this host known to each other, and gives each its part of the plan."""
        plan = self._plan
        before = predecessors(plan)
        for actor, message in messages.items():
            for peer in sorted(peers_of(plan, actor, before)):
                if plan.host_of(peer) == plan.host_of(actor):
                    processes.introduce(actor, peer)
            fds = (
                self._board_memory.fd,
                *((self._store.fd,) if self._store and actor in self._meeting else ()),
                *(memory.fd for memory in self._shared if uses_devices(plan, actor)),
                *(self._heaps[owner].fd for owner in message.heaps),
            )
            processes.post(actor, message, fds)
