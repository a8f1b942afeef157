"""What the host does in one eager step of a side of `benchmarks.batches`: how long its launches take, and in which calls."""

from __future__ import annotations

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["Launches", "measure_launches", "write_profiles"]

NUM_STEPS, NUM_ROWS = 5, 40


class Launches(NamedTuple):
    """One step's launches, on a device that has nothing else to do: the host never waits for a full queue.

    Attributes:
        wall_ms, cpu_ms: median time until the step's call returns, and what of it the thread computed.
        num_device_allocations: calls of cudaMalloc in a step; more than 0 in a step that has run before is a fault.
    """

    wall_ms: float
    cpu_ms: float
    num_device_allocations: float


def measure_launches(step: Callable[[], Any], settle: Callable[[], None], *, on_gpu: bool) -> Launches:
    """Measures a step that has run before. ``settle`` waits for the device."""
    walls, cpus = list[float](), list[float]()
    before = _num_device_allocations(on_gpu)
    for _ in range(NUM_STEPS):
        settle()
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        step()
        walls.append((time.perf_counter_ns() - wall) / 1e6)
        cpus.append((time.thread_time_ns() - cpu) / 1e6)
    settle()
    allocations = (_num_device_allocations(on_gpu) - before) / NUM_STEPS
    return Launches(statistics.median(walls), statistics.median(cpus), allocations)


def _num_device_allocations(on_gpu: bool) -> int:
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0)) if on_gpu else 0


def write_profiles(step: Callable[[], Any], settle: Callable[[], None], path: Path, *, on_gpu: bool) -> None:
    """Two tables of the calls that take the host's time: Python's and torch's, with those of CUDA."""
    settle()
    python = cProfile.Profile()
    python.runcall(step)
    settle()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as torchs:
        step()
        settle()
    page = io.StringIO()
    page.write(f"One step. Python's calls, by the time in themselves ({NUM_ROWS} of them):\n")
    pstats.Stats(python, stream=page).sort_stats("tottime").print_stats(NUM_ROWS)
    page.write(f"\nOne step. torch's and CUDA's calls, by the host's time in themselves ({NUM_ROWS} of them):\n")
    page.write(torchs.key_averages().table(sort_by="self_cpu_time_total", row_limit=NUM_ROWS, max_name_column_width=60))
    path.write_text(page.getvalue())
