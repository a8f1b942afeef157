"""A trace of a gigabyte, made by repeating a recorded one, and how long the doctor takes for it.

::

    python -m benchmarks.doctor.large TRACE.json.gz [GIGABYTES]
"""

from __future__ import annotations

import gzip
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def repeat(source: Path, target: Path, num_bytes: int) -> int:
    """Writes the trace's events again and again, each time later and with other correlations; returns how many there are."""
    trace = json.loads(gzip.decompress(source.read_bytes()))
    events = [event for event in trace.pop("traceEvents") if event.get("ph") in ("X", "s", "f")]
    begin, end = min(event["ts"] for event in events), max(event["ts"] + event.get("dur", 0) for event in events)
    num_correlations = 1 + max(int(event.get("args", {}).get("correlation", 0)) for event in events)
    num = repeats = 0
    with target.open("w") as file:
        file.write(json.dumps(trace)[:-1] + ', "traceEvents": [\n')
        while file.tell() < num_bytes:
            for event in events:
                moved = {**event, "ts": event["ts"] + repeats * (end - begin + 100)}
                args = event.get("args", {})
                if "correlation" in args:
                    moved["args"] = {**args, "correlation": args["correlation"] + repeats * num_correlations}
                file.write((",\n  " if num else "  ") + json.dumps(moved, indent=4))
                num += 1
            repeats += 1
        file.write("\n]}\n")
    return num


def main() -> None:
    gigabytes = float(sys.argv[2]) if len(sys.argv) > 2 else 1.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        num = repeat(Path(sys.argv[1]), path, int(gigabytes * 1e9))
        print(f"{path.stat().st_size / 1e9:.2f} GB, {num:,} events", flush=True)
        begin = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "crossfade", "doctor", str(path)], check=False)
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
        print(f"exit {done.returncode}; {time.perf_counter() - begin:.1f} s, at most {peak:.2f} GB of memory")


if __name__ == "__main__":
    main()
