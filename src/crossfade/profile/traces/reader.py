"""A file of torch.profiler becomes a `RankTrace`.

What was seen in traces of torch 1.13 to 2.11 is said beside what reads it. CUDA calls are spread over the categories
``cuda_runtime`` and ``cuda_driver``; flows between calls and activities are incomplete, so both are joined by ``correlation``.
"""

from __future__ import annotations

import os
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from crossfade.errors import TraceError
from crossfade.profile.traces.chrome import ChromeEvent, ChromeFile
from crossfade.profile.traces.events import Activity, ActivityKind, Call, CollectiveCall, Enclosing, Message, RankTrace
from crossfade.profile.traces.record import KEY, Record
from crossfade.profile.traces.roles import Role, role_of

COMMUNICATION = re.compile(
    r"nccl(Dev)?Kernel|^Memcpy PtoP|cross_device_reduce|(one|two)_shot_all|multimem_|allreduce_fusion|nvshmem|deep_ep::|mscclpp",
    re.IGNORECASE,
)
_T = TypeVar("_T")
_ONE_RUN = "give one file for each rank, all of one run"
_OTHER_GPUS = {"hip": "AMD GPUs", "mtia": "MTIA", "xpu": "Intel GPUs"}


class _ActivityArgs(msgspec.Struct, gc=False):
    correlation: int = 0
    device: int = 0
    stream: int = 0
    grid: list[int] = []
    num_bytes: float = msgspec.field(default=0, name="bytes")
    collective: str = msgspec.field(default="", name="Collective name")
    group: Any = msgspec.field(default="", name="Process Group Name")
    num_in: int = msgspec.field(default=0, name="In msg nelems")
    num_out: int = msgspec.field(default=0, name="Out msg nelems")
    dtype: str = msgspec.field(default="", name="dtype")
    ranks: Any = msgspec.field(default="", name="Process Group Ranks")

    def message(self) -> Message:
        return Message(self.collective, str(self.group), self.num_in, self.num_out, self.dtype, str(self.ranks))


class _CallArgs(msgspec.Struct, gc=False):
    correlation: int = 0
    stream: int = -1


class _Device(msgspec.Struct):
    name: str | None = None
    num_sms: int | None = msgspec.field(default=None, name="numSms")
    compute_major: int | None = msgspec.field(default=None, name="computeMajor")


class _About(msgspec.Struct):
    rank: int | None = None
    world_size: int | None = None


class _OperatorArgs(msgspec.Struct, gc=False):
    number: int = msgspec.field(default=0, name="Record function id")


_decode_operator = msgspec.json.Decoder(_OperatorArgs, strict=False).decode
_decode_activity = msgspec.json.Decoder(_ActivityArgs, strict=False).decode
_decode_call = msgspec.json.Decoder(_CallArgs, strict=False).decode


def read_traces(paths: Iterable[str | os.PathLike[str]]) -> list[RankTrace]:
    """The traces of one run, by rank; those that do not say theirs get the numbers that are left.

    Raises:
        TraceError: a file cannot be read, is no trace of CUDA GPUs, or is given twice; or files are of one rank, or of
            different numbers of ranks.
    """
    paths = list(paths)
    for file, num in Counter(map(os.path.realpath, paths)).items():
        if num > 1:
            raise TraceError(f"{file} is given {num} times", hint=_ONE_RUN)
    traces = [read_trace(path) for path in paths]
    known: dict[int, RankTrace] = {}
    for trace in traces:
        if trace.rank is None:
            continue
        if trace.rank in known and len(traces) > 1:
            raise TraceError(
                f"{known[trace.rank].label} and {trace.label} are both of rank {trace.rank}", hint=_ONE_RUN
            )
        known[trace.rank] = trace
    sizes = {trace.world_size: trace for trace in traces if trace.world_size is not None}
    if len(sizes) > 1:
        said = ", ".join(f"{trace.label} of {size}" for size, trace in sizes.items())
        raise TraceError(f"the files are of runs with different numbers of ranks: {said}", hint=_ONE_RUN)
    free = (number for number in count() if number not in known)
    for trace in traces:
        trace.rank = next(free) if trace.rank is None else trace.rank
        trace.label = f"rank {trace.rank}"
    return sorted(traces, key=lambda trace: trace.rank or 0)


def read_trace(path: str | os.PathLike[str]) -> RankTrace:
    """One process's trace.

    Raises:
        TraceError: it cannot be read, or is no trace of a CUDA GPU.
    """
    return _Reader(Path(path)).read()


class _Reader:
    def __init__(self, path: Path) -> None:
        self._file = ChromeFile(path)
        self._activities: list[Activity] = []
        self._calls: list[Call] = []
        self._collectives: list[CollectiveCall] = []
        self._operators = Enclosing()
        self._functions = Enclosing()
        self._texts: dict[str, str] = {}  # one object for each name
        self._kinds: dict[str, ActivityKind] = {}
        self._roles: dict[str, Role | None] = {}
        self._threads: dict[Any, int] = {}
        self._num_unreadable = 0
        self._categories: set[str] = set()
        self._sync_streams: dict[int, int] = {}
        self._first_us = float("inf")
        self._host_events = array("d")
        self._numbered: dict[int, tuple[int, float, float]] = {}

    def read(self) -> RankTrace:
        readers: dict[str, Callable[[ChromeEvent], None]] = {
            "kernel": self._activity,
            "gpu_memcpy": self._activity,
            "gpu_memset": self._activity,
            "memcpy": self._activity,
            "memset": self._activity,
            "cuda_runtime": self._call,
            "cuda_driver": self._call,
            "runtime": self._call,
            "cpu_op": self._operator,
            "operator": self._operator,
            "user_annotation": self._operator,
            "python_function": self._function,
            "cuda_sync": self._sync,
        }
        for events in self._file:
            for event in events:
                if event.ph != "X" or not isinstance(event.cat, str):
                    continue
                reader = readers.get(event.cat) or readers.get(event.cat.lower())
                if reader is None:
                    self._categories.add(event.cat)
                    continue
                if not isinstance(event.name, str):
                    self._num_unreadable += 1
                    continue
                try:
                    reader(event)
                except (msgspec.DecodeError, TypeError, ValueError):
                    self._num_unreadable += 1
        return self._whole()

    def _activity(self, event: ChromeEvent) -> None:
        args = _decode_activity(event.args)
        name = self._text(event.name)
        kind = self._kinds.get(name)
        if kind is None:
            is_copy = event.cat.lower() in ("gpu_memcpy", "memcpy")
            kind = ActivityKind.COPY if is_copy else ActivityKind.COMPUTE
            if COMMUNICATION.search(name):
                kind = ActivityKind.COMMUNICATION
            self._kinds[name] = kind
        start, end = self._times(event)
        self._activities.append(
            Activity(
                kind,
                name,
                args.device,
                args.stream,
                start,
                end,
                args.correlation,
                prod(args.grid) if args.grid else 0,
                int(args.num_bytes),
                args.message() if kind is ActivityKind.COMMUNICATION else Message(),
            )
        )

    def _call(self, event: ChromeEvent) -> None:
        self._host_events.append(event.ts or 0.0)
        name = event.name
        if name not in self._roles:
            self._roles[name] = role_of(name)
        role = self._roles[name]
        if role is None:
            return
        start, end = self._times(event)
        correlation = _decode_call(event.args).correlation
        self._calls.append(Call(role, self._text(name), self._thread(event), start, end, correlation))

    def _sync(self, event: ChromeEvent) -> None:
        args = _decode_call(event.args)
        self._sync_streams[args.correlation] = args.stream

    def _operator(self, event: ChromeEvent) -> None:
        start, end = self._times(event)
        self._host_events.append(start)
        thread = self._thread(event)
        self._operators.add(thread, event.name, start, end)
        number = _decode_operator(event.args).number
        if number:
            self._numbered[number] = thread, start, end
        if event.name == "record_param_comms":
            self._collectives.append(CollectiveCall(thread, start, end, _decode_activity(event.args).message()))

    def _function(self, event: ChromeEvent) -> None:
        start, end = self._times(event)
        self._functions.add(self._thread(event), event.name, start, end)

    def _times(self, event: ChromeEvent) -> tuple[float, float]:
        start = event.ts or 0.0
        self._first_us = min(self._first_us, start)
        return start, start + max(event.dur or 0.0, 0.0)

    def _text(self, name: Any) -> str:
        return self._texts.setdefault(str(name), str(name))

    def _thread(self, event: ChromeEvent) -> int:
        key = event.tid
        return self._threads.setdefault(key, len(self._threads))

    def _whole(self) -> RankTrace:
        metadata = self._file.metadata
        self._refuse_others()
        notes = [f"{self._num_unreadable:,} events could not be read"] if self._num_unreadable else []
        device, *_ = (*self._part("deviceProperties", list[_Device], notes), _Device())
        about = self._part("distributedInfo", _About, notes)
        base_ns = self._part("baseTimeNanoseconds", float, notes)
        origin = self._first_us
        self._move_to(origin)
        record = self._record(notes)
        self._operators.pack(origin)
        self._functions.pack(origin)
        return RankTrace(
            self._file.path.name,
            record.rank if about.rank is None and record else about.rank,
            record.world_size if about.world_size is None and record else about.world_size,
            base_ns + origin * 1e3,
            device.num_sms or 0,
            device.name or "",
            sorted(self._activities, key=lambda activity: (activity.start_us, activity.end_us)),
            sorted(self._calls, key=lambda call: (call.start_us, call.end_us)),
            sorted(self._collectives, key=lambda call: call.start_us),
            self._operators,
            self._functions,
            notes,
            metadata,
            self._threads,
            self._sync_streams,
            record,
            {
                number: (thread, start - origin, end - origin)
                for number, (thread, start, end) in (self._numbered.items() if record and record.tensors else ())
            },
            np.sort(np.array(self._host_events)) - origin,
            device.compute_major or 0,
        )

    def _part(self, name: str, kind: type[_T], notes: list[str]) -> _T:
        """What the file says besides its events; an empty one, with a note, where that cannot be read."""
        try:
            return msgspec.convert(self._file.metadata.get(name) or kind(), kind, strict=False)
        except msgspec.ValidationError as error:
            notes.append(f"{name} could not be read: {error}")
            return kind()

    def _record(self, notes: list[str]) -> Record | None:
        """What `crossfade.record` added; None, with a note, where that cannot be read."""
        contents = self._file.metadata.pop(KEY, None)
        try:
            return None if contents is None else Record.read(contents)
        except ValueError as error:
            notes.append(str(error))
            return None

    def _refuse_others(self) -> None:
        if self._activities and self._calls:
            return
        name = self._file.path.name
        seen = " ".join((*self._categories, *self._roles)).lower()
        for mark, gpu in _OTHER_GPUS.items():
            if mark in seen:
                raise TraceError(f"{name} is a trace of {gpu}\nhint: the doctor knows traces of NVIDIA GPUs only")
        if self._activities or self._calls:
            missing = "the calls that launched them" if self._activities else "what GPUs did"
            raise TraceError(
                f"{name} lacks {missing}\nhint: record with activities=[CPU, CUDA], as torch.profiler does by default"
            )
        if self._operators or self._functions:
            raise TraceError(
                f"{name} is a trace of the CPU alone\nhint: record with activities=[CPU, CUDA] on a machine with a GPU"
            )
        raise TraceError(
            f"{name} has no events of torch.profiler\nhint: crossfade reads what torch.profiler's export_chrome_trace writes"
        )

    def _move_to(self, origin: float) -> None:
        moved: list[Activity | Call] = [*self._activities, *self._calls]
        for item in moved:
            item.start_us -= origin
            item.end_us -= origin
        self._collectives = [
            call._replace(start_us=call.start_us - origin, end_us=call.end_us - origin) for call in self._collectives
        ]
