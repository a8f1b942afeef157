"""Closing groups of `crossfade.peers`: between ranks that agree, and such as do not, or end."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="peers are ranks of a torch.distributed group")

import torch

from crossfade.errors import ChannelBroken
from crossfade.peers.group import PeerGroup
from crossfade.peers.opening import open_group
from tests.helpers.peer_closing_cases import CASES
from tests.helpers.ranks import join_world, suite

TestTwoRanks = suite(CASES, 2, limit_s=60)
TestThreeRanks = suite(CASES, 3, limit_s=60)


def _stays(group: PeerGroup) -> str:
    """Until the other rank has ended."""
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            group.check()
        except ChannelBroken as error:
            group.close()
            return str(error)
        time.sleep(0.01)
    return "nothing"


def _closes(group: PeerGroup) -> str:
    group.close()
    return "closed"


def _rank(rank: int, folder: str, use: Callable[[PeerGroup], str], said: Connection) -> None:
    join_world(rank, 2, f"{folder}/store")
    group = open_group(device="cpu", buffer_bytes=4096)
    torch.distributed.barrier()
    if rank:
        time.sleep(0.1)
        os._exit(3)
    begin = time.monotonic()
    said.send((use(group), time.monotonic() - begin))
    os._exit(0)


def _other_ends(folder: Path, use: Callable[[PeerGroup], str]) -> tuple[str, float]:
    """What one rank says, and after how long, while the other one ends."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    processes = [context.Process(target=_rank, args=(k, str(folder), use, theirs)) for k in range(2)]
    for process in processes:
        process.start()
    assert mine.poll(60)
    answer: Any = mine.recv()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 3]
    return answer  # type: ignore[no-any-return]


def test_a_rank_that_ends_is_named(tmp_path: Path) -> None:
    text, _ = _other_ends(tmp_path, _stays)
    assert text.startswith("rank 1 (process ")
    assert ") died" in text
    assert "hint: close the group and open one of the ranks that are left" in text


def test_a_rank_that_ends_while_another_one_closes(tmp_path: Path) -> None:
    text, after_s = _other_ends(tmp_path, _closes)
    assert (text, after_s < 5) == ("closed", True)
