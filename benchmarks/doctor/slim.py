"""Makes a trace small enough for a test: without flows, metadata and fields that the doctor does not read.

::

    python -m benchmarks.doctor.slim TRACE.json.gz OUT.json.gz
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

_KEPT = {
    "kernel",
    "gpu_memcpy",
    "gpu_memset",
    "cuda_runtime",
    "cuda_driver",
    "cuda_sync",
    "cpu_op",
    "user_annotation",
    "python_function",
}
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


def slim(trace: dict[str, Any]) -> dict[str, Any]:
    """The same trace with less in it: times to a tenth of a microsecond, kernels' names up to their arguments."""
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


def main() -> None:
    source, target = map(Path, sys.argv[1:3])
    trace = json.loads(gzip.decompress(source.read_bytes()))
    target.write_bytes(gzip.compress(json.dumps(slim(trace), separators=(",", ":")).encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
