"""Traces of a machine that does not exist: hosts and GPUs of several ranks, simulated, written as torch.profiler writes them.

The simulation knows nothing of the doctor: a program is run here with and without a cause, and the difference of its lengths is
what the doctor has to predict from the trace with the cause.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from crossfade.profile.doctor.diagnosis import Report, diagnose
from crossfade.profile.doctor.view import Cause
from crossfade.profile.traces.reader import read_traces
from crossfade.profile.traces.roles import Role

__all__ = ["Machine", "Program", "Rank", "causes", "gain"]

_LAUNCH_US = 5.0  # a launch call
_LAUNCH_LAG_US = 7.0
_LANE_LAG_US = 1.6
_EVENT_LAG_US = 3.0
_RETURN_US = 6.0
_NUM_SMS = 132
_CALLER, _GROUP = 7, 20
_HANDLES = 0xF000  # of streams
_T = TypeVar("_T")


class Rank:
    """One rank's program; its calls happen in order. Collectives are matched with the other ranks' by their number."""

    def __init__(self, machine: Machine, number: int) -> None:
        self.number = number
        self.events: list[dict[str, Any]] = []
        self.thread = 1
        self.stream = _CALLER
        self._machine = machine
        self._now = 1000.0 * (number == 0) + 1007.0 * (number > 0)
        self._free_us: dict[int, float] = {}  # by stream, when it is free
        self._latest_us = 0.0  # the last start on the GPU
        self._held: dict[int, float] = {}  # by stream, until when events hold it
        self._communicators: dict[str, float] = {}  # until when each has something to do, on whichever stream
        self._num_calls = 0
        self._num_collectives = 0
        self.entries: list[tuple[int, int, int, int, int]] = []  # as `crossfade.record` keeps them
        self.tensors: list[tuple[int, list[int], list[int]]] = []  # likewise
        self._num_events = 0
        self.blocking: set[int] = set()  # streams that wait for the default stream, and it for them

    def python(self, length_us: float) -> None:
        """The host does something else."""
        self._now += length_us

    def kernel(self, length_us: float, name: str = "gemm", num_blocks: int = 264) -> float:
        """Launches a kernel on the current stream; returns when it ends."""
        call = self._call("cudaLaunchKernel", _LAUNCH_US)
        start = self._start(call["ts"])
        grid = {"grid": [num_blocks, 1, 1], "block": [256, 1, 1], "shared memory": 98304}
        return self._activity("kernel", name, start, length_us, call, grid)

    def copy(self, length_us: float, num_bytes: int, *, is_pageable: bool) -> None:
        """A copy to the GPU, out of pageable memory (the host waits for it) or pinned memory."""
        call, end = self._memcpy(length_us, f"HtoD ({'Pageable' if is_pageable else 'Pinned'} -> Device)", num_bytes)
        if is_pageable:
            self._return(call, end - 19.0)

    def peer_copy(self, length_us: float, num_bytes: int) -> None:
        """A copy to another GPU by copy engine."""
        self._memcpy(length_us, "PtoP (Device -> Device)", num_bytes)

    def item(self) -> None:
        """Reads a value: a small copy, and the host waits for the stream."""
        begin = self._now
        _, end = self._memcpy(1.5, "DtoH (Device -> Pinned)", 4)
        call = self._call("cudaStreamSynchronize", 5.0)
        self._return(call, end + _RETURN_US)
        self._scope("cpu_op", "aten::item", begin, self._now)

    def _memcpy(self, length_us: float, what: str, num_bytes: int) -> tuple[dict[str, Any], float]:
        """Returns the call, and when the copy ends."""
        call = self._call("cudaMemcpyAsync", _LAUNCH_US)
        name, args = f"Memcpy {what}", {"bytes": num_bytes}
        return call, self._activity("gpu_memcpy", name, self._start(call["ts"]), length_us, call, args)

    def free(self) -> None:
        """cudaFree and cudaMalloc: waits for all streams."""
        call = self._call("cudaFree", 100.0)
        self._return(call, max(self._free_us.values(), default=0.0) + 100.0)
        self._call("cudaMalloc", 150.0)

    def all_reduce(
        self,
        length_us: float,
        num: int,
        *,
        group: str = "0",
        is_async: bool = True,
        stream: int = 0,
        dtype: str = "BFloat16",
    ) -> Callable[[], None]:
        """Sums over all ranks: on the group's own stream, or on the caller's. Returns how to wait for it."""
        begin, caller = self._now, self.stream
        message = {
            "Collective name": "allreduce",
            "In msg nelems": num,
            "Out msg nelems": num,
            "dtype": dtype,
            "Group size": self._machine.num_ranks,
            "Process Group Name": group,
            "Process Group Ranks": str(list(range(self._machine.num_ranks))),
        }
        if is_async:
            event = self._record_event(caller)
            self._call("cudaStreamWaitEvent", 2.0)
            self.stream = stream or _GROUP + int(group)
            self._entry(Role.WAIT_EVENT, event, self.stream)
            self._hold(self._free_us.get(caller, 0.0))
        annotated = self._now
        call = self._call("cuLaunchKernelEx", _LAUNCH_US)
        start = max(self._start(call["ts"]), self._communicators.get(group, 0.0) + _EVENT_LAG_US)
        end = self._machine.meet(self.number, self._num_collectives, start, length_us)
        self._communicators[group] = end
        self._num_collectives += 1
        args = {"grid": [24, 1, 1], "block": [512, 1, 1], "shared memory": 87568, **message}
        self._activity("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", start, end - start, call, args)
        self._scope("user_annotation", "nccl:all_reduce", annotated, self._now)
        event = self._record_event(self.stream) if self._machine.has_record else 0
        self._scope("cpu_op", "record_param_comms", begin, self._now, message)
        self.stream = caller
        return lambda: self._wait_for(end, group, event) if is_async else None

    def wait_stream(self, other: int) -> None:
        """The current stream waits for all that another one has."""
        event = self._record_event(other)
        self._call("cudaStreamWaitEvent", 2.0)
        self._entry(Role.WAIT_EVENT, event, self.stream)
        self._hold(max(self._free_us.get(other, 0.0), self._held.get(other, 0.0)))

    def scope(self, name: str, body: Callable[[], object]) -> None:
        """An operator around what ``body`` does."""
        begin = self._now
        body()
        self._scope("cpu_op", name, begin, self._now)

    def operator(self, name: str, body: Callable[[], _T], reads: Sequence[int] = (), writes: Sequence[int] = ()) -> _T:
        """The same, with the storages that the operator reads and writes."""
        begin = self._now
        result = body()
        self.tensors.append((len(self.tensors) + 1, list(reads), list(writes)))
        self._scope("cpu_op", name, begin, self._now, {"Record function id": len(self.tensors)})
        return result

    def _wait_for(self, end_us: float, group: str, event: int) -> None:
        begin = self._now
        self._call("cudaStreamWaitEvent", 2.0)
        self._entry(Role.WAIT_EVENT, event, self.stream)
        self._hold(end_us)
        self._scope(
            "cpu_op", "record_param_comms", begin, self._now, {"Collective name": "wait", "Process Group Name": group}
        )

    def _record_event(self, stream: int) -> int:
        self._call("cudaEventRecordWithFlags", 2.0)
        self._num_events += 1
        self._entry(Role.RECORD, self._num_events, stream)
        return self._num_events

    def _entry(self, role: Role, event: int, stream: int) -> None:
        """What torch reports just after a call; streams have other names there."""
        self.entries.append((int(role), self.thread, int(self._now * 1e3) - 500, event, _HANDLES + stream))

    def _hold(self, until_us: float) -> None:
        self._held[self.stream] = max(self._held.get(self.stream, 0.0), until_us)

    def _start(self, launched_us: float) -> float:
        free = self._free_us.get(self.stream, 0.0) + _LANE_LAG_US
        held = self._held.pop(self.stream, 0.0) + _EVENT_LAG_US
        start = max(launched_us + _LAUNCH_LAG_US, free, held)
        if self.stream in self.blocking or self.stream == _CALLER:
            others = {_CALLER} if self.stream in self.blocking else self.blocking
            start = max(start, *(self._free_us.get(other, 0.0) + _LANE_LAG_US for other in (*others, self.stream)))
        if self._machine.environment.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            start = max(start, self._latest_us)  # one queue: behind all that was launched before
        self._latest_us = start
        return start

    def _call(self, name: str, length_us: float) -> dict[str, Any]:
        self._num_calls += 1
        category = "cuda_driver" if name.startswith("cu") and not name.startswith("cuda") else "cuda_runtime"
        call = self._event(category, name, self._now, length_us, 100 + self.number, self.thread)
        call["args"] = {"correlation": self._num_calls}
        self._now += length_us + 1.0 + self._machine.profiler_us
        return call

    def _return(self, call: dict[str, Any], end_us: float) -> None:
        call["dur"] = max(call["dur"], end_us - call["ts"])
        self._now = max(self._now, call["ts"] + call["dur"] + 1.0)

    def _activity(
        self, category: str, name: str, start_us: float, length_us: float, call: dict[str, Any], args: dict[str, Any]
    ) -> float:
        event = self._event(category, name, start_us, length_us, self.number, self.stream)
        event["args"] = {"device": self.number, "stream": self.stream, **call["args"], **args}
        end: float = start_us + length_us
        self._free_us[self.stream] = end
        return end

    def _scope(
        self, category: str, name: str, start_us: float, end_us: float, args: dict[str, Any] | None = None
    ) -> None:
        self._event(category, name, start_us, end_us - start_us, 100 + self.number, self.thread)["args"] = args or {}
        self._now += self._machine.profiler_us

    def _event(self, category: str, name: str, ts: float, dur: float, pid: int, tid: int) -> dict[str, Any]:
        event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur}
        self.events.append(event)
        return event


Program = Callable[[Rank], None]


class Machine:
    """Runs a program on all ranks until the times at which they meet no longer change.

    ``has_record``: traces have what `crossfade.record` adds, with ``untraced_us`` as the length of a step that was not traced.
    """

    def __init__(
        self,
        program: Program,
        num_ranks: int = 1,
        *,
        profiler_us: float = 2.5,
        has_record: bool = False,
        environment: dict[str, str] | None = None,
        untraced_us: float = 0.0,
    ) -> None:
        self.untraced_us = untraced_us
        self.has_record = has_record
        self.environment = environment or {}
        self.num_ranks = num_ranks
        self.profiler_us = (
            profiler_us  # what the profiler needs for each call and operator; 0 in a program that is not traced
        )
        self._starts: dict[int, dict[int, float]] = {}
        for _ in range(60):
            before = {number: dict(starts) for number, starts in self._starts.items()}
            self.ranks = [Rank(self, number) for number in range(num_ranks)]
            for rank in self.ranks:
                program(rank)
            if before == self._starts:
                break
        else:
            raise AssertionError("the ranks' times do not settle")

    def meet(self, rank: int, number: int, start_us: float, length_us: float) -> float:
        """When a collective ends: a fixed time after its last rank's start."""
        starts = self._starts.setdefault(number, {})
        starts[rank] = start_us
        return max(starts.values()) + length_us

    @property
    def length_us(self) -> float:
        """From the first call to the last activity's end."""
        events = [event for rank in self.ranks for event in rank.events]
        begin, end = min(event["ts"] for event in events), max(event["ts"] + event["dur"] for event in events)
        return float(end - begin)

    def save(self, folder: Path) -> list[Path]:
        """A file for each rank."""
        paths = []
        for rank in self.ranks:
            path = folder / f"rank{rank.number}.json"
            about = {"rank": rank.number, "world_size": self.num_ranks}
            gpu = {"id": rank.number, "name": "NVIDIA H200", "computeMajor": 9, "numSms": _NUM_SMS}
            trace = {"deviceProperties": [gpu], "distributedInfo": about, "traceEvents": rank.events}
            if self.has_record:
                streams = [(entry[4], entry[4] - _HANDLES) for entry in rank.entries]
                trace["crossfade"] = {
                    "version": 1,
                    "calls": rank.entries,
                    "streams": streams,
                    "environment": self.environment,
                    "untraced_us": self.untraced_us,
                    "tensors": rank.tensors,
                }
            path.write_text(json.dumps(trace))
            paths.append(path)
        return paths

    def report(self, folder: Path) -> Report:
        """What the doctor says of these files."""
        return diagnose(read_traces(self.save(folder)))


def causes(report: Report) -> list[Cause]:
    """Of the diagnoses that are no remarks, which come first."""
    return [one.finding.cause for one in report.diagnoses if not one.is_remark]


def gain(program: Program, fixed: Program, num_ranks: int) -> float:
    """What share of its time the machine wins by a fix, without a profiler."""
    length_us, fixed_us = (Machine(one, num_ranks, profiler_us=0.0).length_us for one in (program, fixed))
    return 1 - fixed_us / length_us
