"""What each rank of a CPU group does in the tests of closing: ranks that agree, and such as make a collective more than others."""

from __future__ import annotations

import itertools
import random
import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossfade.errors import ChannelBroken, ChannelTimeout
from crossfade.peers.collectives import all_reduce
from crossfade.peers.exchange import barrier
from crossfade.peers.group import PeerGroup
from crossfade.peers.opening import open_group
from tests.helpers.peer_cases import FUNCTIONS, check, on_cpu

HINT = r"(.|\n)*hint: each rank makes the same collectives before it closes the group"
IS_AHEAD = r"rank \d \(process \d+\) has begun a collective that this rank has not made" + HINT
HAS_CLOSED = r"rank \d \(process \d+\) has closed the group; results of collectives .* are not valid" + HINT
LATER_S = 0.03


def _opened(**options: Any) -> PeerGroup:
    group = open_group(**{"device": "cpu", "buffer_bytes": 4096, "timeout_s": 20, **options})
    check(group, "all_reduce", 7)
    return group


def _apart(rank: int, num_ranks: int, call: Callable[[PeerGroup], object], num_ahead: int = 1, **options: Any) -> None:
    """The first ranks make a call that the others do not, before those close or after: nobody takes its result for one."""
    for is_call_first in (True, False):
        group, said = _opened(**options), torch.zeros(1)
        dist.barrier()
        time.sleep(0 if (rank < num_ahead) == is_call_first else LATER_S)
        begin = time.monotonic()
        if rank < num_ahead:
            for use in (call, PeerGroup.check, call):
                with pytest.raises(ChannelBroken, match=HAS_CLOSED):
                    use(group)
            group.close()
        else:
            error = _close(group)
            assert not error or re.match(IS_AHEAD, error)
            said += bool(error)
        group.close()
        assert time.monotonic() - begin < 5
        dist.all_reduce(said)
        assert said >= 1  # of ranks that close, the first one to see it leaves the others


def _close(group: PeerGroup) -> str:
    """What it raises, or nothing."""
    try:
        group.close()
    except ChannelBroken as error:
        return str(error)
    return ""


def _one_more(rank: int, num_ranks: int) -> None:
    for function in FUNCTIONS.values():
        _apart(rank, num_ranks, partial(function, torch.ones(3 * num_ranks)))
    _apart(rank, num_ranks, PeerGroup.barrier)
    _apart(rank, num_ranks, partial(all_reduce, torch.ones(5)), num_ranks - 1)


def _one_more_in_pieces(rank: int, num_ranks: int) -> None:
    call = partial(all_reduce, torch.ones(20_000))
    for options in ({}, {"is_replayable": True}, {"is_staged": True}):
        _apart(rank, num_ranks, call, **options)
    _apart(rank, num_ranks, partial(call, lane=1), num_lanes=2)


def _one_more_on_a_stream(rank: int, num_ranks: int) -> None:
    """As on a GPU: the call returns before its result is there, and nobody asks for the group before it is closed."""
    group = _opened()
    if rank == 0:
        barrier(group.lane(), group.current_stream())
        with pytest.raises(ChannelBroken, match="closed the group before the last collective of this rank" + HINT):
            group.close()
    else:
        with pytest.raises(ChannelBroken, match=IS_AHEAD):
            group.close()
    dist.barrier()


def _all_agree(rank: int, num_ranks: int) -> None:
    """Ranks come at any time, with collectives of any number of exchanges on any lane behind them; some of them replay."""
    draw = random.Random(rank)
    for number in range(40):
        group = _opened(num_lanes=2, is_replayable=number % 2 == 1, is_staged=number % 5 == 4)
        for lane in range(number % 3):
            check(group, "all_gather", 3000, lane=lane)
        if group.lane().is_replayable:
            _replay_on_some(group, is_captured=rank == number % num_ranks)
        time.sleep(draw.choice((0, 0, draw.uniform(0, 0.01))))
        group.close()
        group.close()


def _replay_on_some(group: PeerGroup, *, is_captured: bool) -> None:
    own, driver, stream = torch.ones(2000), group.memory.driver, group.current_stream()
    if not is_captured:
        for _ in range(3):
            all_reduce(own, group)
        return
    driver.begin_capture(stream)
    out = all_reduce(own, group)
    graph = driver.end_capture(stream)
    for _ in range(3):
        driver.launch(graph, stream)
    driver.destroy_graph(graph)
    assert out[0] == group.num_ranks


def _too_late(rank: int, num_ranks: int) -> None:
    """Who closes does not wait for ever. Those that come later close too; calls of theirs find that out at once."""
    for is_called in (True, False):
        group = _opened(timeout_s=0.2)
        if rank == 0:
            with pytest.raises(ChannelTimeout, match=r"not closed in 0.2 s by rank 1 \(process"):
                group.close()
        dist.barrier()
        if rank and is_called:
            with pytest.raises(ChannelBroken, match=HAS_CLOSED):
                all_reduce(torch.ones(4), group)
        group.close()
        dist.barrier()


def _after_an_error(rank: int, num_ranks: int) -> None:
    """A rank that closes after an error of its own waits for nobody, and nobody waits for it: not in the middle of a call of many
    exchanges, which began before or begins later, and not in `close`.
    """
    for error, is_call_first in itertools.product((None, KeyboardInterrupt()), (True, False, None)):
        group = _opened()
        dist.barrier()
        begin = time.monotonic()
        if rank == 0:
            time.sleep(LATER_S if is_call_first else 0)
            if error is None:
                group.lane().cut_off(ValueError())
                with pytest.raises(
                    ChannelBroken, match=r"ended half-way \(ValueError\)(.|\n)*hint: close the group on all"
                ):
                    group.check()
                group.close()
            else:
                vars(group.memory.driver)["is_idle"] = partial(_raise, error)  # as Ctrl-C does while it waits
                with pytest.raises(KeyboardInterrupt):
                    group.close()
        elif is_call_first is not None:
            time.sleep(0 if is_call_first else LATER_S)
            with pytest.raises(ChannelBroken, match=HAS_CLOSED):
                all_reduce(torch.ones(50_000), group)
        group.close()
        assert time.monotonic() - begin < 5
        dist.barrier()


def _raise(error: BaseException, _: int) -> bool:
    raise error


def _goes_on(rank: int, num_ranks: int) -> None:
    """As on a GPU, a rank that nobody asks for the group makes further calls: the next ones raise, and who closes ends."""
    group = _opened()
    vars(group)["check_call"] = lambda lane: lane.check()
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        results = list[torch.Tensor]()
        call = partial(all_reduce, torch.ones(5), group)
        with pytest.raises(ChannelBroken, match=HAS_CLOSED):
            results.extend(call() for _ in range(5))
        dist.barrier()
    else:
        assert re.match(IS_AHEAD, _close(group)) or num_ranks > 2
        dist.barrier()
    group.close()
    assert time.monotonic() - begin < 5


def _closes_twice(rank: int, num_ranks: int) -> None:
    """A second `close`, on another thread or in a signal's handler, while the first one waits for the others."""
    for num_threads in (1, 4):
        group = _opened()
        dist.barrier()
        if rank:
            time.sleep(LATER_S)
            group.close()
        else:
            threads = [threading.Thread(target=group.close) for _ in range(num_threads)]
            for thread in threads:
                thread.start()
            group.close()
            for thread in threads:
                thread.join(5)
            assert not any(thread.is_alive() for thread in threads)
        dist.barrier()


_OF_RANKS: dict[str, Callable[[int, int], None]] = {
    "one more": _one_more,
    "one more, in pieces": _one_more_in_pieces,
    "one more, on a stream": _one_more_on_a_stream,
    "all agree": _all_agree,
    "too late": _too_late,
    "after an error": _after_an_error,
    "goes on": _goes_on,
    "closes twice": _closes_twice,
}
CASES = {name: partial(on_cpu, case) for name, case in _OF_RANKS.items()}


def _one_more_on_gpus(device: str, *, replays: bool = False, **options: Any) -> None:
    """A call has returned before another rank closes: its stream is released, and who asks then is told."""
    for function, is_asked in itertools.product(FUNCTIONS.values(), (True, False)):
        group = open_group(buffer_bytes=1 << 20, is_replayable=replays, **options)
        call = partial(function, torch.ones(3 * group.num_ranks, device=device), group)
        call()
        graph: Any = torch.cuda.CUDAGraph()
        if replays:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call()
        torch.cuda.synchronize()
        dist.barrier()
        if group.rank:
            with pytest.raises(ChannelBroken, match=IS_AHEAD):
                group.close()
        else:
            if replays:
                graph.replay()
            else:
                call()
            if is_asked:
                torch.cuda.synchronize()
                with pytest.raises(ChannelBroken, match=HAS_CLOSED):
                    group.check()
                group.close()
            else:
                with pytest.raises(ChannelBroken, match="closed the group before the last collective" + HINT):
                    group.close()
        graph.reset()
        assert group.memory.driver.ledger.held() == []
        dist.barrier()


GPU_CASES: dict[str, Callable[[str], None]] = {
    "one more": _one_more_on_gpus,
    "one more, replayed": partial(_one_more_on_gpus, replays=True),
    "one more, staged": partial(_one_more_on_gpus, is_staged=True),
}
