"""Makes a trace small enough for a test: without flows, metadata and fields that the doctor does not read.

::

    python -m benchmarks.doctor.slim TRACE.json.gz OUT.json.gz
    python -m benchmarks.doctor.slim TRACE.json.gz OUT.json.gz 3      # only its first three steps, of those that are marked
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

_OF_GPU = {"kernel", "gpu_memcpy", "gpu_memset", "cuda_sync"}
_CALLS = {"cuda_runtime", "cuda_driver"}
_KEPT = {*_OF_GPU, *_CALLS, "cpu_op", "user_annotation", "python_function"}
_ARGS = {
    "correlation",
    "device",
    "stream",
    "grid",
    "shared memory",
    "bytes",
    "Collective name",
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Group size",
    "Process Group Name",
    "Process Group Ranks",
}
_HEAD = {"schemaVersion", "distributedInfo", "baseTimeNanoseconds", "crossfade"}
_GPU = {"id", "name", "computeMajor", "computeMinor", "numSms"}


def slim(trace: dict[str, Any], num_steps: int | None = None) -> dict[str, Any]:
    """The same trace with less in it: times to a tenth of a microsecond, kernels' names up to their arguments."""
    if num_steps is not None:
        trace = {**trace, "traceEvents": _first_steps(trace["traceEvents"], num_steps)}
    events = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X" or event.get("cat") not in _KEPT:
            continue
        args = {key: value for key, value in event.get("args", {}).items() if key in _ARGS}
        name = event["name"].split("(")[0][:56] if event["cat"] == "kernel" else event["name"]
        kept = {key: event[key] for key in ("ph", "cat", "pid", "tid") if key in event}
        kept.update({key: round(event[key], 1) for key in ("ts", "dur") if key in event})
        events.append({**kept, "name": name[:100], "args": args})
    head = {key: value for key, value in trace.items() if key in _HEAD}
    gpus = [{key: gpu[key] for key in _GPU & gpu.keys()} for gpu in trace.get("deviceProperties", [])[:1]]
    return {**head, "deviceProperties": gpus, "traceEvents": events}


def _first_steps(events: list[dict[str, Any]], num: int) -> list[dict[str, Any]]:
    """What the host does until so many steps are over, and what the GPU does for it. A step is over where the next one begins: its
    mark may be over at once, as `crossfade.record` makes them, or last as long as the step, as torch's own does.
    """
    starts = sorted(
        event["ts"]
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("ProfilerStep#")
    )
    end_us = starts[num] if num < len(starts) else float("inf")
    calls = [event for event in events if event.get("cat") in _CALLS]
    later = {
        event["args"]["correlation"] for event in calls if event["ts"] >= end_us and "correlation" in event["args"]
    }
    return [
        event
        for event in events
        if (
            event.get("args", {}).get("correlation") not in later
            if event.get("cat") in _OF_GPU
            else event["ts"] < end_us
        )
    ]


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    trace = json.loads(gzip.decompress(source.read_bytes()))
    num_steps = int(sys.argv[3]) if len(sys.argv) > 3 else None
    target.write_bytes(gzip.compress(json.dumps(slim(trace, num_steps), separators=(",", ":")).encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
