"""Workers of the tests of collectives of device tensors."""

from __future__ import annotations

import os
import random
import threading
import time
from typing import Any

import torch

from crossfade.channels.collective import Meeting
from crossfade.errors import ChannelBroken, Failure
from crossfade.types import CollectiveKind, ReduceOp
from tests.helpers.collective_cases import Party, Peers, Ring, draw_meeting, failure_of, names, random_calls
from tests.helpers.footprint import footprint, growth


def sums(num_parties: int, count: int = 1) -> list[Meeting]:
    return [
        Meeting(f"c{k}", CollectiveKind.ALLREDUCE, ReduceOp.SUM, 0, names(num_parties)) for k in range(count)
    ]


def random_work(peers: Peers, rank: int, seed: int, num_rounds: int, buffer_bytes: int) -> list[str]:
    """Random meetings of one group, and of a second one beside it."""
    torch.set_num_threads(1)
    num_parties, draw = len(peers) + 1, random.Random(seed)
    ring, wrong = Ring(peers, rank), []
    groups = []
    for number in range(2):
        meetings = [draw_meeting(draw, k, num_parties) for k in range(draw.choice((1, 2, 5)))]
        groups.append((Party(peers, ring, rank, meetings, number=number, buffer_bytes=buffer_bytes), meetings))
    for number in range(2):
        for party, meetings in groups:
            wrong += random_calls(party, meetings, seed + number, num_rounds)
    for party, _ in groups:
        party.close()
    ring.close()
    return wrong
