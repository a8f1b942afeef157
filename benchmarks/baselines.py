"""What the machine itself can do: ping-pongs between two processes, and memcpys.

``python -m benchmarks.baselines spin NUM`` prints NUM round trips in microseconds, as a JSON list; ``copies NUM`` those of 1 MB,
which each side copies once.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SOURCE = Path(__file__).with_name("futex_pingpong.c")
NUM_WARM_UPS = 200
LIMIT_S = 40
COPIED_BYTES = 1 << 20

_THERE, _BACK = 0, 64  # one cache line each


def build_futex_pingpong(folder: Path) -> Path | None:
    """Compiles the C ping-pong into ``folder``; None on a machine without a C compiler or without its headers."""
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        return None
    program = folder / "futex_pingpong"
    built = subprocess.run(
        [compiler, "-std=gnu11", "-O2", "-o", str(program), str(SOURCE)], capture_output=True, timeout=60, check=False
    )
    return program if built.returncode == 0 else None


def futex_round_trips_us(program: Path, num: int, *, apart: bool) -> list[float]:
    """Round trips of two C processes that wake each other by futex, in microseconds.

    ``apart`` keeps each on a core of its own, so that each hop wakes an idle core; else the scheduler may keep both on one.
    """
    command = [str(program), str(NUM_WARM_UPS), str(num), *(["apart"] if apart else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return [int(line) / 1_000 for line in done.stdout.split()]


def spin_round_trips_us(num: int) -> list[float]:
    """Round trips of one byte between two Python processes that both spin on shared memory, in microseconds."""
    command = [sys.executable, "-m", "benchmarks.baselines", "spin", str(num)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=SOURCE.parent.parent
    )
    return [float(value) for value in json.loads(done.stdout)]


def copies_out_and_back_us(num: int) -> list[float]:
    """Round trips of 1 MB between two Python processes that spin on shared memory, in microseconds: one copies it into memory that
    the other one has read, and that one copies what it finds there back into other such memory.
    """
    command = [sys.executable, "-m", "benchmarks.baselines", "copies", str(num)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=True, cwd=SOURCE.parent.parent
    )
    return [float(value) for value in json.loads(done.stdout)]


def copy_us(num_bytes: int, *, num_copies: int = 9) -> list[float]:
    """``np.copyto`` of ``num_bytes`` between two arrays that were both touched before, in microseconds."""
    import numpy as np

    source = np.full(num_bytes, 7, np.uint8)
    target = np.full(num_bytes, 3, np.uint8)
    taken = []
    for _ in range(num_copies):
        start = time.perf_counter_ns()
        np.copyto(target, source)
        taken.append((time.perf_counter_ns() - start) / 1_000)
    if target[0] != 7 or target[-1] != 7:
        raise RuntimeError("np.copyto did not copy")
    return taken


def _echo(shared: mmap.mmap, num: int) -> None:
    for i in range(1, num + 1):
        value = i & 0xFF
        while shared[_THERE] != value:
            pass
        shared[_BACK] = value


def _spin(num: int) -> list[float]:
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    signal.alarm(LIMIT_S)
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        _echo(shared, num + NUM_WARM_UPS)
        os._exit(0)
    taken = []
    for i in range(1, num + NUM_WARM_UPS + 1):
        value = i & 0xFF
        start = time.perf_counter_ns()
        shared[_THERE] = value
        while shared[_BACK] != value:
            pass
        taken.append((time.perf_counter_ns() - start) / 1_000)
    os.waitpid(child, 0)
    return taken[NUM_WARM_UPS:]


def _copies(num: int) -> list[float]:
    """Two pieces of memory each way, in turns, as a ring would have."""
    import numpy as np

    flags = mmap.mmap(-1, mmap.PAGESIZE)
    shared = np.frombuffer(mmap.mmap(-1, 4 * COPIED_BYTES), np.uint8).reshape(4, COPIED_BYTES)
    shared[:] = 1
    source = np.random.default_rng(0).integers(0, 256, COPIED_BYTES, np.uint8)
    signal.alarm(LIMIT_S)
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        for i in range(1, num + NUM_WARM_UPS + 1):
            while flags[_THERE] != i & 0xFF:
                pass
            np.copyto(shared[2 + i % 2], shared[i % 2])
            flags[_BACK] = i & 0xFF
        os._exit(0)
    taken = []
    for i in range(1, num + NUM_WARM_UPS + 1):
        source[0] = source[-1] = i & 0xFF
        start = time.perf_counter_ns()
        np.copyto(shared[i % 2], source)
        flags[_THERE] = i & 0xFF
        while flags[_BACK] != i & 0xFF:
            pass
        taken.append((time.perf_counter_ns() - start) / 1_000)
        if shared[2 + i % 2, 0] != i & 0xFF or shared[2 + i % 2, -1] != i & 0xFF:
            raise RuntimeError("the copies are not there")
    os.waitpid(child, 0)
    return taken[NUM_WARM_UPS:]


if __name__ == "__main__":
    print(json.dumps({"spin": _spin, "copies": _copies}[sys.argv[1]](int(sys.argv[2]))))
