"""`record`: a program's trace for the doctor, by torch.profiler, with what such a trace lacks."""

from __future__ import annotations

import importlib
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

from crossfade.errors import MissingDependency, TraceError
from crossfade.profile.recording.calls import CallLog
from crossfade.profile.recording.machine import GpuSampler, environment
from crossfade.profile.recording.streams import StreamNumbers
from crossfade.profile.recording.tensors import TensorLog
from crossfade.profile.traces.record import KEY, VERSION
from crossfade.profile.traces.steps import MARK

_ONE_PROFILER = "torch has one profiler at a time: leave the program's own out while it is recorded"


def record(
    folder: str | os.PathLike[str] = "traces",
    *,
    with_stack: bool = False,
    with_tensors: bool = False,
    untraced_steps: int = 0,
) -> Recording:
    """Records what runs inside a ``with`` block, for ``crossfade doctor FOLDER``: a few steps are enough.

    Each rank writes ``FOLDER/rankN.json.gz``, a trace of torch.profiler with one more key. Without a GPU there is a trace too, of
    the CPU alone.

    Args:
        folder: is made where it is missing.
        with_stack: also record Python's functions, so that a diagnosis names the line. It makes the host slower.
        with_tensors: also record which tensors operators read and write, so that the doctor knows what makes the input of a
            collective, and whether it waits for more. It makes the host slower still.
        untraced_steps: so many steps of the block, up to the first ``step()`` and so on, are not traced but timed. The doctor takes
            away what the profiler needs by them, and tells a host that launches slowly from one that the profiler makes slow.

    Raises:
        MissingDependency: torch is not installed; when the block begins.
        TraceError: a profiler of torch runs already, where the trace would begin; or, at the block's end, it has no more than the
            untraced steps, or ran a profiler of its own.
    """
    # the program may go to another folder
    return Recording(
        Path(folder).absolute(), with_stack=with_stack, with_tensors=with_tensors, untraced_steps=untraced_steps
    )


class Recording:
    """What `record` gives. ``step()`` at the end of each step tells the doctor where steps begin; it finds them without, mostly.

    Attributes:
        path: the file that was written; None before the block's end.
        has_replaced: whether there was a file of that name, of an earlier recording.
        has_gpu: whether the program had begun to use a GPU.
    """

    def __init__(self, folder: Path, *, with_stack: bool, with_tensors: bool, untraced_steps: int) -> None:
        self.path: Path | None = None
        self.has_replaced = self.has_gpu = False
        self._folder = folder
        self._with_stack = with_stack
        self._streams = StreamNumbers()
        self._log = CallLog(self._streams.see)
        self._sampler = GpuSampler()
        self._tensors = TensorLog()
        self._with_tensors = with_tensors
        self._is_watching = False
        self._num_untraced = untraced_steps
        self._num_steps = 0
        self._untraced_us = 0.0
        self._step_ends: list[Any] = []  # of untraced steps: events of the GPU, or times of the host
        self._torch: Any = None
        self._profiler: Any = None
        self._memory: dict[str, int] = {}

    def __enter__(self) -> Recording:
        try:
            import torch
        except ImportError:
            raise MissingDependency("torch", extra="torch", needed_for="crossfade.record()") from None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._torch = torch
        if self._num_untraced:
            self._wait()
            self._end_untraced_step()
        else:
            self._trace()
        return self

    def _wait(self) -> None:
        if self._torch.cuda.is_initialized():
            self._torch.cuda.synchronize()

    def _end_untraced_step(self) -> None:
        """Keeps when a step ends: on the GPU where there is one, since the host may be steps ahead of it."""
        cuda = self._torch.cuda
        end: Any = time.perf_counter()
        if cuda.is_initialized():
            end = cuda.Event(enable_timing=True)
            end.record()
        self._step_ends.append(end)

    def _trace(self) -> None:
        torch = self._torch
        if torch.autograd._profiler_enabled():
            raise TraceError("a profiler of torch runs already", hint=_ONE_PROFILER)
        self._has_gpu = torch.cuda.is_available()
        activity = torch.profiler.ProfilerActivity
        activities = [activity.CPU] + [activity.CUDA] * self._has_gpu
        self._profiler = torch.profiler.profile(
            activities=activities,
            with_stack=self._with_stack,
            acc_events=True,  # or it warns that a second cycle, which there is not, would drop the first
            experimental_config=_with_sync_events(torch),
        )
        reports = None
        with suppress(ImportError):  # a torch that reports nothing
            reports = importlib.import_module("torch.cuda._gpu_trace")  # before any is made
        if self._has_gpu:
            torch._C._activate_gpu_trace()
            self._memory = _memory(torch)
            self._watch_gpu()
        self._profiler.start()
        if self._with_tensors:
            self._tensors.open(torch)
        self._streams.open()
        if reports is not None:
            self._log.open(reports)
        self._begin_step()

    def step(self) -> None:
        """One step is over, and the next one begins."""
        self._num_steps += 1
        if self._profiler is None:
            self._end_untraced_step()
            if self._num_steps == self._num_untraced:
                self._wait()
                self._untraced_us = _median_step_us(self._step_ends)
                self._num_steps = 0
                self._trace()
            return
        self._begin_step()
        self._watch_gpu()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._profiler is None:
            if kind is None:
                raise TraceError(
                    f"the block ended after {self._num_steps} steps, and {self._num_untraced} were not to be traced\n"
                    "hint: call step() behind each step, and run more of them"
                )
            return
        self._wait()
        self._log.close()
        self._tensors.close()
        self._sampler.close()
        if not self._torch.autograd._profiler_enabled():  # exporting what another profiler ended is a crash of torch's
            if kind is None:
                raise TraceError("the program ran a profiler of its own, which ended this one", hint=_ONE_PROFILER)
            return
        rank, world_size = _rank_of(self._torch)
        self._profiler.add_metadata_json(KEY, json.dumps(self._contents(rank, world_size), separators=(",", ":")))
        self._profiler.stop()
        path = self._folder / f"rank{rank or 0}.json.gz"
        self.has_replaced, self.has_gpu = path.exists(), self._torch.cuda.is_initialized()
        self._profiler.export_chrome_trace(str(path))
        self.path = path

    def __repr__(self) -> str:
        return f"Recording({str(self.path or self._folder)!r})"

    def _watch_gpu(self) -> None:
        """Begins to read clocks once the program has chosen its GPU: asking earlier would make a context on another one."""
        cuda = self._torch.cuda
        if cuda.is_initialized() and not self._is_watching:
            self._is_watching = True
            self._sampler.open(f"GPU-{cuda.get_device_properties(cuda.current_device()).uuid}")

    def _begin_step(self) -> None:
        with self._torch.profiler.record_function(f"{MARK}{self._num_steps}"):
            pass  # over before the program goes on: torch writes into freed memory where a range outlives its profiler

    def _contents(self, rank: int | None, world_size: int | None) -> dict[str, Any]:
        """As `traces.record` reads it."""
        after = _memory(self._torch) if self._has_gpu else {}
        return {
            "version": VERSION,
            "rank": rank,
            "world_size": world_size,
            "num_steps": self._num_steps,
            "calls": self._log.entries,
            "streams": list(self._streams.known.items()),
            "environment": environment(),
            "clocks": {"samples": self._sampler.samples, **self._sampler.limits, "missing": self._sampler.missing},
            "untraced_us": self._untraced_us,
            "tensors": self._tensors.uses,
            "memory": {name: value - self._memory.get(name, 0) for name, value in after.items()},
        }


def _median_step_us(ends: Sequence[Any]) -> float:
    """The usual time between two ends of steps, which a hiccup in one of them does not lengthen; 0 where there is none."""
    lengths = []
    for begin, end in pairwise(ends):
        if isinstance(begin, float) and isinstance(end, float):
            lengths.append((end - begin) * 1e6)
        elif not isinstance(begin, float):  # else the step has begun to use the GPU
            lengths.append(begin.elapsed_time(end) * 1e3)
    return median(lengths) if lengths else 0.0


def _with_sync_events(torch: Any) -> Any:
    """The configuration by which a trace says on which stream a wait or a synchronisation is; None where torch has none."""
    try:
        return torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True)
    except (AttributeError, TypeError):
        return None


def _memory(torch: Any) -> dict[str, int]:
    """How often the allocator has asked CUDA for memory, and how often it had to free some first."""
    seen = torch.cuda.memory_stats()
    return {"num_allocated": seen.get("num_device_alloc", 0), "num_retried": seen.get("num_alloc_retries", 0)}


def _rank_of(torch: Any) -> tuple[int | None, int | None]:
    """This process's rank and how many there are, as torch.distributed or torchrun has it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world_size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    return (int(rank), int(world_size)) if rank.isdecimal() and world_size.isdecimal() else (None, None)
