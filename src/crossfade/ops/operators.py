"""What can be tuned, as the tuner sees it: what can do a shape, what does it once, and how long that takes on a group's ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from crossfade.device.borrowed import device_of, torch_or_raise
from crossfade.device.driver import HOST
from crossfade.ops.cache import Cache, versions
from crossfade.ops.candidate import Candidate
from crossfade.ops.figures import H200, Figures, with_topology
from crossfade.ops.model import Model
from crossfade.ops.ranks import GroupRanks
from crossfade.ops.shape import Shape
from crossfade.ops.tune import Trial, Tuner
from crossfade.ops.waves import measure_waves, product_timer
from crossfade.peers.group import PeerGroup
from crossfade.topology import load_topology

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

__all__ = ["OPERATORS", "Operator", "open_tuner", "trial_of"]

NUM_WARM_UPS = 2


class Operator(Protocol):
    """One of a group's operators."""

    def candidates(self, shape: Shape) -> Sequence[Candidate]:
        """All that can do a shape, the same ones on all ranks, and plain among them."""

    def runner(self, shape: Shape, candidate: Candidate) -> Callable[[], object]:
        """Makes operands and an output, and loads all kernels: loading one while a stream waits for a peer can hang. Says no word
        to other ranks. Gives what does it once, on all ranks.
        """


OPERATORS: Mapping[str, Callable[[PeerGroup], Operator]] = {}
"""What makes an operator of a group, by the name of its function. Each operator has its line here."""


def open_tuner(
    group: PeerGroup,
    process_group: ProcessGroup,
    operators: Mapping[str, Operator],
    *,
    cache: Cache | None = None,
    is_measuring: bool = False,
) -> Tuner:
    """A tuner for the operators of a group. Collective.

    Args:
        group: where they run.
        process_group: the same ranks, as torch knows them.
        operators: by name.
        cache: where choices are kept; None for the user's cache folder.
        is_measuring: GPUs only: begin by measuring products, a second's work, if that was never done on such a device.
    """
    device = _device(group)
    if cache is None:
        cache = Cache(_device_name(device), group.num_ranks, versions())
    model = Model(_figures(device, cache, is_measuring=is_measuring) if group.rank == 0 else H200)  # rank 0 decides
    return Tuner(
        lambda shape, candidate: trial_of(group, operators[shape.operator].runner(shape, candidate)),
        model.predict,
        lambda shape: operators[shape.operator].candidates(shape),
        GroupRanks(process_group, device),
        cache,
    )


def _figures(device: torch.device, cache: Cache, *, is_measuring: bool) -> Figures:
    """What is known of this device, and what four H200 do where it is not."""
    topology, figures = load_topology(), H200
    if topology is not None:
        figures = with_topology(figures, topology)
    if device.type == "cuda":
        num_sms = torch_or_raise().cuda.get_device_properties(device).multi_processor_count
        figures = replace(figures, num_sms=num_sms)
    waves = cache.load_waves()
    if waves is None and is_measuring and device.type == "cuda":
        waves = measure_waves(product_timer(device), figures.num_sms)
        cache.keep_waves(waves)
    return figures if waves is None else replace(figures, waves=waves)


def trial_of(group: PeerGroup, run: Callable[[], object]) -> Trial:
    """Times something that all ranks of a group do together, on the group's lane 0.

    They begin each repetition together. On a GPU all of them are enqueued one behind the other, so the host's launches count only
    where the device has to wait for them.
    """
    is_warm = False

    def trial(num_repeats: int) -> Sequence[float]:
        nonlocal is_warm
        for _ in range(0 if is_warm else NUM_WARM_UPS):
            run()
        is_warm = True
        return _on_host(group, run, num_repeats) if group.device_type == "cpu" else _on_gpu(group, run, num_repeats)

    return trial


def _on_host(group: PeerGroup, run: Callable[[], object], num_repeats: int) -> list[float]:
    times_us = []
    for _ in range(num_repeats):
        group.barrier()
        begin_ns = time.perf_counter_ns()
        run()
        times_us.append((time.perf_counter_ns() - begin_ns) / 1e3)
    return times_us


def _on_gpu(group: PeerGroup, run: Callable[[], object], num_repeats: int) -> list[float]:
    cuda = torch_or_raise().cuda
    pairs = [(cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)) for _ in range(num_repeats)]
    for begin, end in pairs:
        group.barrier()
        begin.record()
        run()
        end.record()
    cuda.synchronize(group.home.driver.device)
    group.check()
    return [1e3 * begin.elapsed_time(end) for begin, end in pairs]


def _device(group: PeerGroup) -> torch.device:
    return device_of(HOST if group.device_type == "cpu" else group.home.driver.device)


def _device_name(device: torch.device) -> str:
    return "CPU" if device.type == "cpu" else str(torch_or_raise().cuda.get_device_name(device))
