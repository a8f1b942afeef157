"""Two hosts on one: two namespaces of the network and of processes, joined by a pair of virtual interfaces.

``python -m tests.helpers.two_hosts NUM_RANKS`` runs the cases of `crossfade.p2p` on them, half of the ranks on each, and prints
what every rank said as JSON; it exits with 77 where the system does not allow namespaces.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

NOT_ALLOWED = 77
LIMIT_S = 150
_ADDRESSES = ("10.213.7.1", "10.213.7.2")
_LINKS = ("crossfade0", "crossfade1")
_PORT = 29431
_UNSHARE = ("unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=20)


def _configure(host: int) -> None:
    _ip("link", "set", "lo", "up")
    _ip("addr", "add", f"{_ADDRESSES[host]}/24", "dev", _LINKS[host])
    _ip("link", "set", _LINKS[host], "up")


def _run_rank(rank: int, num_ranks: int, host: int) -> dict[str, str]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from tests.helpers.p2p_backend_cases import CASES as BACKEND_CASES
    from tests.helpers.p2p_cases import CASES, RANDOM
    from tests.helpers.ranks import try_cases

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = _LINKS[host]
    where, limit = f"tcp://{_ADDRESSES[0]}:{_PORT}", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=where, rank=rank, world_size=num_ranks, timeout=limit)
    cases = {**CASES, **dict(list(RANDOM.items())[:2]), **BACKEND_CASES}
    del cases["each_way"]  # which of the ways on one host is taken
    return try_cases(cases, "cpu")


def _run_host(host: int, num_ranks: int) -> dict[int, Any]:
    """Runs this host's ranks, each in a process of its own."""
    _configure(host)
    own = [rank for rank in range(num_ranks) if rank * 2 // num_ranks == host]
    command = [sys.executable, "-m", "tests.helpers.two_hosts", str(num_ranks)]
    with tempfile.TemporaryDirectory() as folder:
        files = {rank: os.path.join(folder, str(rank)) for rank in own}
        ranks = [subprocess.Popen([*command, "rank", str(rank), str(host), file]) for rank, file in files.items()]
        for each in ranks:
            each.wait(LIMIT_S)
        return {rank: _load(file) for rank, file in files.items()}


def _load(path: str) -> Any:
    try:
        with open(path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {"all": "it died"}


def _run_both(num_ranks: int) -> dict[int, Any]:
    """In the first host's namespaces: makes the second host, and the link to it."""
    command = [*_UNSHARE, sys.executable, "-m", "tests.helpers.two_hosts", str(num_ranks), "host"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as second:
        assert second.stdin is not None
        assert second.stdout is not None
        assert second.stdout.readline() == "here\n"
        _ip("link", "add", _LINKS[0], "type", "veth", "peer", "name", _LINKS[1], "netns", str(second.pid))
        second.stdin.write("go\n")
        second.stdin.flush()
        said = _run_host(0, num_ranks)
        others = json.loads(second.communicate(timeout=LIMIT_S)[0])
    return {**said, **others}


def main(num_ranks: int, what: str = "", *args: str) -> None:
    if what == "rank":
        said = _run_rank(int(args[0]), num_ranks, int(args[1]))
        with open(args[2], "w") as file:
            json.dump(said, file)
    elif what == "host":
        print("here", flush=True)
        sys.stdin.readline()
        print(json.dumps(_run_host(1, num_ranks)), flush=True)
    elif what == "both":
        print(json.dumps(_run_both(num_ranks)), flush=True)
    else:
        allowed = subprocess.run([*_UNSHARE, "ip", "link", "add", "crossfade2", "type", "veth"], capture_output=True)
        if allowed.returncode:
            print(allowed.stderr.decode(), file=sys.stderr)
            raise SystemExit(NOT_ALLOWED)
        command = [*_UNSHARE, sys.executable, "-m", "tests.helpers.two_hosts", str(num_ranks), "both"]
        raise SystemExit(subprocess.run(command, check=False).returncode)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
