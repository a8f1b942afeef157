"""The tuner of a group, which its operators ask, and tuners beside it; and how long a call takes on the ranks of a group."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import TYPE_CHECKING

from crossfade.device.borrowed import torch_or_raise
from crossfade.errors import DeviceError
from crossfade.ops.cache import Cache, versions
from crossfade.ops.figures import H200, Figures, with_topology
from crossfade.ops.model import Model
from crossfade.ops.ranks import Alone, GroupRanks, Ranks
from crossfade.ops.recording import Recorder
from crossfade.ops.replays import forget
from crossfade.ops.tunable import OPERATORS, Tunable
from crossfade.ops.tune import Trial, Tuner
from crossfade.ops.waves import measure_waves, product_timer
from crossfade.peers.group import PeerGroup
from crossfade.topology import load_topology

if TYPE_CHECKING:
    import torch

__all__ = ["open_tuner", "trial_of", "tuner_of"]

NUM_WARM_UPS = 3
NUM_IN_GRAPH = 4
"""Calls of a replay that is timed."""
_NUM_HEATS = 4
"""Replays, or calls, in front of those that are timed."""
_HEAT_SIZE, _NUM_PRODUCTS = 4096, 50
"""Products of bfloat16 in front of those, 10 ms on an H200: short calls alone would leave a GPU cooler than long ones."""
_KEPT_AS, _RECORDER, _HEAT = "crossfade.ops.tuner", "crossfade.ops.tuner's recorder", "crossfade.ops.tuner's heat"
_MAKING = Lock()


def tuner_of(group: PeerGroup) -> Tuner:
    """The tuner that a group's operators ask when they are given no candidate; what it tunes holds for them at once.

    Not collective, so the first call may be anywhere, also inside a capture. The choices are kept in the user's cache folder. Ranks
    that torch.distributed does not know have nobody to ask and no disk: each follows the model with figures that all have.
    """
    tuner = group.belongings.get(_KEPT_AS)
    if tuner is None:
        with _MAKING:
            tuner = group.belongings.get(_KEPT_AS)
            if tuner is None:
                tuner = group.belongings[_KEPT_AS] = _make(group)
    return tuner


def _make(group: PeerGroup) -> Tuner:
    operators = {name: make(group) for name, make in OPERATORS.items()}
    if group.process_group is None:
        return _tuner(group, operators, Alone(), None, _with_sms(H200, group.device))
    ranks: Ranks = Alone()
    if group.num_ranks > 1:
        name = f"group {group.number}"
        ranks = GroupRanks(group.process_group, group.device, name=name, check=group.check)
    cache = _cache(group)
    return _tuner(group, operators, ranks, cache, _figures(group, cache, is_measuring=False))


def open_tuner(
    group: PeerGroup,
    operators: Mapping[str, Tunable] | None = None,
    *,
    cache: Cache | None = None,
    is_measuring: bool = False,
) -> Tuner:
    """A tuner of its own, which the group's operators do not ask. Collective.

    Args:
        group: where they run.
        operators: what is tuned, by name; None for all that there are.
        cache: where choices are kept; None for the user's cache folder.
        is_measuring: GPUs only: begin by measuring products, a second's work, if that was never done on such a device.

    Raises:
        DeviceError: torch.distributed does not know the group.
    """
    if group.process_group is None:
        raise DeviceError(
            "these ranks have no group of torch.distributed, by which they would agree", hint="make it with open_group"
        )
    if operators is None:
        operators = {name: make(group) for name, make in OPERATORS.items()}
    ranks = GroupRanks(group.process_group, group.device, check=group.check)
    cache = cache or _cache(group)
    return _tuner(group, operators, ranks, cache, _figures(group, cache, is_measuring=is_measuring))


def _tuner(
    group: PeerGroup, operators: Mapping[str, Tunable], ranks: Ranks, cache: Cache | None, figures: Figures
) -> Tuner:
    return Tuner(
        lambda shape, candidate: trial_of(group, operators[shape.operator].runner(shape, candidate)),
        Model(figures.captured() if _is_replayed(group) else figures).predict,
        lambda shape: operators[shape.operator].candidates(shape),
        ranks,
        cache,
    )


def _cache(group: PeerGroup) -> Cache:
    device = group.device
    name = "CPU" if device.type == "cpu" else str(torch_or_raise().cuda.get_device_name(device))
    # What is best may differ where each call is enqueued by itself.
    return Cache(name, group.num_ranks, versions() + (", replayed" if _is_replayed(group) else ""))


def _figures(group: PeerGroup, cache: Cache, *, is_measuring: bool) -> Figures:
    """What is known of this device, and what four H200 do where it is not. Rank 0 decides, so only it looks."""
    if group.rank:
        return H200
    device, topology, figures = group.device, load_topology(), H200
    if topology is not None:
        figures = with_topology(figures, topology)
    figures = _with_sms(figures, device)
    waves = cache.load_waves()
    if waves is None and is_measuring and device.type == "cuda":
        waves = measure_waves(product_timer(device), figures.num_sms)
        cache.keep_waves(waves)
    return figures if waves is None else replace(figures, waves=waves)


def _with_sms(figures: Figures, device: torch.device) -> Figures:
    if device.type == "cpu":
        return figures
    return replace(figures, num_sms=torch_or_raise().cuda.get_device_properties(device).multi_processor_count)


def trial_of(group: PeerGroup, run: Callable[[], object]) -> Trial:
    """Times something that all ranks of a group do together, on the group's lane 0.

    They begin each repetition together. On a GPU all of them are enqueued one behind the other, so the host's launches count only
    where the device has to wait for them; on a lane that can be replayed they do not count, for there a call that comes again is
    replayed (`crossfade.ops.replays`), or captured by its caller. What is captured is not done yet, so a capture that fails on
    one rank keeps no other one waiting.
    """
    is_warm, timed, num_calls = False, run, 1

    def trial(num_repeats: int) -> Sequence[float]:
        nonlocal is_warm, timed, num_calls
        if not is_warm:
            for _ in range(NUM_WARM_UPS):
                run()
            if _is_replayed(group):
                timed, num_calls = _captured(group, run), NUM_IN_GRAPH
            is_warm = True
        if group.device_type == "cpu":
            return _on_host(group, run, num_repeats)
        return [each / num_calls for each in _on_gpu(group, timed, num_repeats)]

    return trial


def _is_replayed(group: PeerGroup) -> bool:
    return group.device_type == "cuda" and group.lane().is_replayable


def _captured(group: PeerGroup, run: Callable[[], object]) -> Callable[[], object]:
    """What replays several calls. What was captured of the calls before (`crossfade.ops.replays`) nobody needs again."""
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
    cuda.synchronize(group.home.driver.device)
    group.check()
    return [1e3 * begin.elapsed_time(end) for begin, end in pairs]
