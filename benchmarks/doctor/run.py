"""Times each planted program with and without its cause, in turns, and records traces of both.

::

    python -m benchmarks.doctor.run OUT                 # a process for each GPU, at most two
    python -m benchmarks.doctor.run OUT --ranks 1       # programs of one GPU only

Lines of ``OUT/results.jsonl`` come as programs end; traces lie beside it, ``NAME-SEED-cause-RANK.json.gz`` and ``...-fixed-...``.
A program that takes longer than ``--limit`` seconds, or ends its processes, is written down as failed, and the others go on in new
processes. What ``OUT`` has results of is not run again.

Then all are recorded once more by `crossfade.record`, when nothing is timed any more, since torch goes on reporting events:
``OUT/records.jsonl``, ``NAME-SEED-cause.record-RANK.json.gz``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.doctor.programs import PROGRAMS
from benchmarks.doctor.worker import FILES

_ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}  # no multicast over NVLink
_START_S = 60.0  # for processes to start in
_END_S = 10.0  # for them to end in by themselves


class _Case(NamedTuple):
    what: str  # "time" or "record"
    name: str
    seed: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--only", nargs="*", default=[], help="names of programs; without it, all")
    parser.add_argument("--ranks", type=int, default=min(torch.cuda.device_count(), 2) or 1)
    parser.add_argument("--limit", type=float, default=45.0, help="seconds for a program")
    parser.add_argument("--rounds", type=int, default=7, help="of a program with and without the cause, at most")
    parser.add_argument("--steps", type=int, default=40, help="of a round, at most")
    parser.add_argument("--no-record", action="store_true", help="plain traces only")
    parser.add_argument("--small", action="store_true", help="sizes for a CPU, to try the programs")
    args = parser.parse_args()
    unknown = set(args.only) - {planted.name for planted in PROGRAMS}
    if unknown:
        parser.error(f"no programs {', '.join(sorted(unknown))}; there are {', '.join(p.name for p in PROGRAMS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        _Case(what, planted.name, seed)
        for what in list(FILES)[: 1 if args.no_record else 2]
        for seed in args.seeds
        for planted in PROGRAMS
        if planted.num_ranks <= args.ranks and planted.name in (args.only or [planted.name])
    ]
    while cases := [case for case in wanted if case not in _cases_in(args.out)]:
        with _processes(args, cases) as processes:
            reason = _watch(processes, args.out, len(cases), args.limit)
        left = [case for case in cases if case not in _cases_in(args.out)]
        if left:
            line = json.dumps({"name": left[0].name, "seed": left[0].seed, "error": reason})
            with (args.out / FILES[left[0].what]).open("a") as file:
                print(line, file=file)
            print(line, flush=True)


def _cases_in(out: Path) -> set[_Case]:
    """Those that have results."""
    found = set()
    for what, name in FILES.items():
        if (out / name).exists():
            lines = (out / name).read_text().split("\n")[:-1]  # the last one may be half written
            found |= {_Case(what, line["name"], line["seed"]) for line in map(json.loads, lines)}
    return found


@contextlib.contextmanager
def _processes(args: argparse.Namespace, cases: Sequence[_Case]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """A process for each rank, which all run these cases; they are ended with the block."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.doctor.worker", str(args.out), str(args.rounds), str(args.steps)]
    command += [str(int(args.small)), *(f"{case.what}:{case.name}:{case.seed}" for case in cases)]
    common = {
        **_ENVIRONMENT,
        **os.environ,
        "WORLD_SIZE": str(args.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(args.ranks):
            own = {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(subprocess.Popen(command, env=own, stdin=subprocess.PIPE, start_new_session=True))
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def _watch(processes: Sequence[subprocess.Popen[bytes]], out: Path, num_cases: int, limit_s: float) -> str:
    """Waits until all cases have results, or something goes wrong; returns what."""
    before = num = len(_cases_in(out))
    deadline = time.monotonic() + _START_S + limit_s
    while time.monotonic() < deadline:
        codes = [process.poll() for process in processes]
        if any(codes):
            return f"a process ended with {next(code for code in codes if code)}"
        if all(code == 0 for code in codes):
            return "the processes ended without a result"
        found = len(_cases_in(out))
        if found > num:
            num = found
            deadline = time.monotonic() + (limit_s if num < before + num_cases else _END_S)
        time.sleep(0.1)
    return f"took longer than {limit_s:g} s"


if __name__ == "__main__":
    main()
