"""How long a call takes on the ranks of a group: of a graph of calls where they are replayed, else of calls one by one."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.ops.choice.replays import forget, is_replayed
from crossfade.ops.choice.tune import Trial
from crossfade.peers.replays import Recorder

if TYPE_CHECKING:
    from crossfade.peers.group import PeerGroup

__all__ = ["trial_of"]

NUM_WARM_UPS = 3
NUM_IN_GRAPH = 4
"""Calls of a replay that is timed."""
_NUM_HEATS = 4
"""Replays, or calls, in front of those that are timed."""
_HEAT_SIZE, _NUM_PRODUCTS = 4096, 50
"""Products of bfloat16 in front of those, 10 ms on an H200: short calls alone would leave a GPU cooler than long ones."""
_RECORDER, _HEAT = "crossfade.ops.trials' recorder", "crossfade.ops.trials' heat"


def trial_of(group: PeerGroup, run: Callable[[], object]) -> Trial:
    """Times something that all ranks of a group do together, on the group's lane 0.

    They begin each repetition together. On a GPU all of them are enqueued one behind the other, so the host's launches count only
    where the device has to wait for them; on a lane that can be replayed they do not count, for there a call that comes again is
    replayed (`crossfade.ops.choice.replays`), or captured by its caller. What is captured is not done yet, so a capture that fails
    on one rank keeps no other one waiting.
    """
    is_warm, timed, num_calls = False, run, 1

    def trial(num_repeats: int) -> Sequence[float]:
        nonlocal is_warm, timed, num_calls
        if not is_warm:
            for _ in range(NUM_WARM_UPS):
                run()
            if is_replayed(group):
                timed, num_calls = _captured(group, run), NUM_IN_GRAPH
            is_warm = True
        if group.device_type == "cpu":
            return _on_host(group, run, num_repeats)
        return [each / num_calls for each in _on_gpu(group, timed, num_repeats)]

    return trial


def _captured(group: PeerGroup, run: Callable[[], object]) -> Callable[[], object]:
    """What replays several calls. What was captured of the calls before (`crossfade.ops.choice.replays`) is not needed again."""
    forget(group)
    recorder: Recorder | None = group.belongings.get(_RECORDER)
    if recorder is None:
        recorder = group.belongings[_RECORDER] = Recorder(group)

    def several() -> None:
        for _ in range(NUM_IN_GRAPH):
            run()

    replay: Callable[[], object] = recorder.capture(several).replay
    return replay


def _on_host(group: PeerGroup, run: Callable[[], object], num_repeats: int) -> list[float]:
    times_us = []
    for _ in range(num_repeats):
        group.barrier()
        begin_ns = time.perf_counter_ns()
        run()
        times_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
    return times_us


def _heat(group: PeerGroup) -> None:
    """Products of this rank's own, so no other rank has to do as many."""
    torch = torch_or_raise()
    square = group.belongings.get(_HEAT)
    if square is None:
        square = group.belongings[_HEAT] = torch.randn(
            _HEAT_SIZE, _HEAT_SIZE, dtype=torch.bfloat16, device=group.device
        )
    for _ in range(_NUM_PRODUCTS):
        torch.mm(square, square)


def _on_gpu(group: PeerGroup, run: Callable[[], object], num_repeats: int) -> list[float]:
    cuda = torch_or_raise().cuda
    # Behind the host's pause the first ones find a cool GPU. With nothing to time there are none: another rank may have failed to
    # capture it, and would never do its part.
    if num_repeats:
        _heat(group)
        for _ in range(_NUM_HEATS):
            run()
    pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(num_repeats)]
    for begin, end in pairs:
        group.barrier()
        begin.record()
        run()
        end.record()
    cuda.synchronize(group.memory.driver.device)
    group.check()
    return [1e3 * begin.elapsed_time(end) for begin, end in pairs]
