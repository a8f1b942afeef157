"""Two hosts on one: two namespaces of the network and of processes, joined by a pair of virtual interfaces.

``python -m tests.helpers.two_hosts PROGRAM NUM_RANKS`` runs a program on them, half of the ranks on each, and prints what every
rank said as JSON: ``cases``, those of `crossfade.p2p`, or ``cut``, what a receive says after the link has gone down, and when. It
exits with 77 where the system does not allow namespaces.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from crossfade.host.memory import libc
from tests.helpers.programs import environment
from tests.helpers.warm import TORCH_AND_COMPILERS, warm_python

NOT_ALLOWED = 77
LIMIT_S = 150
ADDRESSES = ("10.213.7.1", "10.213.7.2")
LINKS = ("crossfade0", "crossfade1")
_PORT = 29431
UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
_NEW_NAMESPACES = 0x40000000 | 0x20000000 | 0x00020000  # CLONE_NEWNET, CLONE_NEWPID, CLONE_NEWNS
_SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def said_on_two_hosts(program: str, num_ranks: int) -> dict[str, Any]:
    """What the ranks said, by rank; skips the test where there can be no namespaces."""
    command, folder = ("-m", "tests.helpers.two_hosts", program, str(num_ranks)), Path(__file__).parents[2]
    ran = warm_python(TORCH_AND_COMPILERS, *command, cwd=folder, env=environment(), timeout_s=LIMIT_S + 20)
    if ran.returncode == NOT_ALLOWED:
        pytest.skip(f"no namespaces here: {ran.stderr.strip()}: TestSomeFar goes the same way over loopback")
    assert ran.returncode == 0, ran.stderr
    said: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    assert len(said) == num_ranks
    return said


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def configure(host: int) -> None:
    ip("link", "set", "lo", "up")
    ip("addr", "add", f"{ADDRESSES[host]}/24", "dev", LINKS[host])
    ip("link", "set", LINKS[host], "up")


def _run_rank(program: str, rank: int, num_ranks: int, host: int) -> dict[str, Any]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from tests.helpers.p2p_backend_cases import CASES as BACKEND_CASES
    from tests.helpers.p2p_cases import CASES, RANDOM
    from tests.helpers.ranks import try_cases

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = LINKS[host]
    where, limit = f"tcp://{ADDRESSES[0]}:{_PORT}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=num_ranks, timeout=limit)
    if program == "cut":
        return _cut(host)
    cases = {**CASES, **dict(list(RANDOM.items())[:2]), **BACKEND_CASES}
    for name in ("each_way", "options"):  # which of the ways on one host is taken
        del cases[name]
    return try_cases(cases, "cpu")


def _cut(host: int) -> dict[str, Any]:
    """What a receive says after the link has gone down, and after how long."""
    import torch

    from crossfade.errors import ChannelBroken
    from crossfade.p2p import P2P

    p2p = P2P(device="cpu", timeout_s=60.0)
    p2p.isend(torch.ones(4), 1 - p2p.rank)
    assert p2p.recv_any(1 - p2p.rank).eq(1).all()
    said, begin = "", time.monotonic()
    if host == 0:
        ip("link", "set", LINKS[0], "down")
    try:
        p2p.recv_any(1 - p2p.rank)
    except ChannelBroken as error:
        said = str(error)
    taken_s = time.monotonic() - begin
    p2p.close()
    return {"said": said, "taken_s": taken_s}


def _run_host(program: str, host: int, num_ranks: int) -> dict[int, Any]:
    """Runs this host's ranks, each in a process of its own."""
    configure(host)
    own = [rank for rank in range(num_ranks) if rank * 2 // num_ranks == host]
    with tempfile.TemporaryDirectory() as folder:
        files = {rank: os.path.join(folder, str(rank)) for rank in own}
        ranks = [_begun(_tell_of_rank, file, program, rank, num_ranks, host) for rank, file in files.items()]
        for each in ranks:
            each.join(LIMIT_S)
        return {rank: _load(file) for rank, file in files.items()}


def _tell_of_rank(file: str, *args: Any) -> None:
    said = _run_rank(*args)
    with open(file, "w") as opened:
        json.dump(said, opened)
    sys.stdout.flush()
    os._exit(0)  # torch's own group may wait for the other host


def _load(path: str) -> Any:
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {"all": "it died"}


def _begun(function: Callable[..., None], *args: Any) -> BaseProcess:
    """A process that is forked off this one, so that torch is imported once."""
    process = multiprocessing.get_context("fork").Process(target=function, args=args)
    process.start()
    return process


def _end_with_parent() -> None:
    libc().prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)


def _unshare(function: Callable[..., None], *args: Any) -> None:
    """What the command does for another one: calls a function in namespaces of its own, as their first process."""
    _end_with_parent()
    if libc().unshare(_NEW_NAMESPACES):
        raise OSError(ctypes.get_errno(), "unshare")
    first = _begun(_be_first, function, *args)
    first.join()
    sys.exit(first.exitcode)


def _be_first(function: Callable[..., None], *args: Any) -> None:
    _end_with_parent()
    for arguments in (("--make-rprivate", "/"), ("-t", "proc", "proc", "/proc")):
        subprocess.run(["mount", *arguments], check=True, timeout=20)
    function(*args)


def _run_both(program: str, num_ranks: int) -> None:
    """In the first host's namespaces: makes the second host, and the link to it."""
    mine, theirs = multiprocessing.Pipe()
    second = _begun(_unshare, _run_second, theirs, program, num_ranks)
    theirs.close()
    assert mine.recv() == "here"
    ip("link", "add", LINKS[0], "type", "veth", "peer", "name", LINKS[1], "netns", str(second.pid))
    mine.send("go")
    said = _run_host(program, 0, num_ranks)
    assert mine.poll(LIMIT_S), "the second host says nothing"
    print(json.dumps({**said, **mine.recv()}), flush=True)


def _run_second(first: Connection, program: str, num_ranks: int) -> None:
    first.send("here")
    first.recv()
    first.send(_run_host(program, 1, num_ranks))


def main(program: str, num_ranks: int) -> None:
    if not (shutil.which("unshare") and shutil.which("ip")):
        print("the commands unshare and ip are not installed", file=sys.stderr)
        raise SystemExit(NOT_ALLOWED)
    allowed = subprocess.run([*UNSHARE, "ip", "link", "add", "crossfade2", "type", "veth"], capture_output=True)
    if allowed.returncode:
        print(allowed.stderr.decode(), file=sys.stderr)
        raise SystemExit(NOT_ALLOWED)
    for module in ("p2p_backend_cases", "p2p_cases", "ranks"):
        import_module(f"tests.helpers.{module}")
    both = _begun(_unshare, _run_both, program, num_ranks)
    both.join()
    raise SystemExit(both.exitcode)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
