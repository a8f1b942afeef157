"""What each party does in the tests of collectives of device tensors, between processes, and what it must get by plain torch."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from crossfade.channels.collective import Meeting, Offer, reference
from crossfade.channels.device_collective import DeviceCollective, DeviceGroup
from crossfade.channels.device_group import open_copy_group
from crossfade.channels.device_home import DeviceHome
from crossfade.errors import Failure
from crossfade.host.doorbell import Bell, Doorbell
from crossfade.host.memory import Memory
from crossfade.types import CollectiveKind, ReduceOp
from tests.helpers.device_pair import Peer, run_workers

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
MOVED = (*FLOATS, *WHOLE, torch.bool, torch.complex64)
Peers = Mapping[int, Peer]
Open = Callable[..., DeviceGroup]


class Party:
    """One party of a group, with its doorbell.

    Args:
        peers: the other workers.
        rank: of this one.
        num_parties: of how many.
        meetings: what the group does; every one has all parties.
        home: its device; None for the CPU.
        number: of the group.
    """

    def __init__(
        self,
        peers: Peers,
        rank: int,
        num_parties: int,
        meetings: Sequence[Meeting],
        home: DeviceHome | None = None,
        *,
        number: int = 0,
        opener: Open = open_copy_group,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.me = name(rank)
        self.names = [name(k) for k in range(num_parties)]
        self.meetings = list(meetings)
        self.doorbell = Doorbell(*Doorbell.create_fds(self.me))
        bells: dict[str, Bell] = {self.me: self.doorbell.bell()}
        for k, peer in peers.items():  # everybody's bell, over the workers' own connections
            peer.share_fds(self.doorbell.memory_fd, self.doorbell.event_fd)
            bells[name(k)] = Bell(*peer.shared_bell())
        self._bells = bells
        store = shared_store(peers, rank)
        self.group = opener(store, number, self.names, self.me, bells, meetings, home, **options)
        self.ends: list[DeviceCollective] = []
        for k, meeting in enumerate(meetings):
            mine = meeting.parties.index(self.me)
            num_outputs = 1
            self.ends.append(self.group.collective(meeting, k, mine, num_outputs))

    def finish(self, end: DeviceCollective, timeout_s: float = 20.0) -> Sequence[Any]:
        """What comes out of what was started."""
        found: list[Sequence[Any]] = []

        def ready() -> bool:
            result = end.try_finish()
            if result is not None:
                found.append(result)
            return bool(found)

        assert self.doorbell.wait_until(ready, timeout_s, end.is_idle), "nothing came out"
        return found[0]

    def close(self) -> None:
        for end in self.ends:
            end.close()
        self.group.ask_to_end()
        self.group.close(time.monotonic() + 10.0)
        for bell in self._bells.values():
            bell.close()
        self.doorbell.close()


def name(rank: int) -> str:
    return f"A{rank}"
