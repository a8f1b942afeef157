"""What `benchmarks.plan_predictions` runs in a process of its own: ``crossfade plan`` for a graph that the environment names."""

from __future__ import annotations

import json
import os
import resource
import tempfile
from collections.abc import Sequence
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import crossfade
from benchmarks.large_graphs import GRAPHS
from crossfade.cli.plan import show_plan

TIMES_US = {"forward": 2_000.0, "backward": 4_000.0}
ENQUEUING_US = 30.0
GPU_VALUE_BYTES, CPU_VALUE_BYTES = 64_000_000, 1_000_000


def workload(methods: Sequence[str], *, is_on_gpus: bool) -> crossfade.Workload:
    """What the methods of a graph take."""
    times_us = {name: TIMES_US[name] for name in methods}
    if is_on_gpus:
        sizes = dict.fromkeys(methods, GPU_VALUE_BYTES)
        return crossfade.Workload(dict.fromkeys(methods, ENQUEUING_US), sizes, device_us=times_us)
    return crossfade.Workload(times_us, dict.fromkeys(methods, CPU_VALUE_BYTES))


def cluster(num_gpus: int, num_cores: int) -> dict[str, Any]:
    """64 hosts."""
    hosts = {
        "name": "node",
        "num": 64,
        "num_cores": num_cores,
        "num_gpus": num_gpus,
        "gpu_link": {"kind": "nvlink", "gbs": 395, "latency_us": 9},
        "network": {"gbs": 46, "latency_us": 15, "num_nics": 8},
    }
    return {"version": 1, "hosts": hosts}


def graph() -> Any:
    """The graph that was asked for, and what its methods take."""
    name, actors, times, on = os.environ["PLANNED"].split("|")
    is_on_gpus = on == "GPUs"
    made = GRAPHS[name](int(actors) - (name == "fan-out"), int(times), num_gpus=int(is_on_gpus))
    methods = ("forward",) if name == "pipeline" else ("forward", "backward")
    return made, workload(methods, is_on_gpus=is_on_gpus)


def main() -> None:
    """Runs the command, and prints the number of actions and the most memory in KB."""
    is_on_gpus = os.environ["PLANNED"].endswith("GPUs")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.json")
        path.write_text(json.dumps(cluster(8, 96) if is_on_gpus else cluster(0, 8)), encoding="utf-8")
        shown = StringIO()
        with redirect_stdout(shown):
            show_plan(
                "benchmarks.plan_target:graph", max_inflight=10, overlap=True, svg=None, topology=path, is_json=True
            )
    print(json.loads(shown.getvalue())["num_actions"], resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


if __name__ == "__main__":
    main()
