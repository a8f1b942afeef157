"""Kills one rank of a CPU group at some moment, many times, each time with new ranks; says what became of the others.

``python -m tests.helpers.peer_kills WHAT FIRST_SEED NUM_KILLS`` prints a line of JSON a kill; WHAT is what the ranks have open.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from crossfade.errors import ChannelBroken
from crossfade.p2p import P2P
from crossfade.peers.collectives import all_gather, all_reduce
from crossfade.peers.group import PeerGroup
from crossfade.peers.opening import open_group
from tests.helpers.calm import calm_s
from tests.helpers.footprint import footprint, held_more
from tests.helpers.peer_cases import random_calls
from tests.helpers.programs import environment
from tests.helpers.ranks import join_world
from tests.helpers.warm import warm_python

NOTICE_S = 2.0
ROOT = Path(__file__).parents[2]


def judge(row: dict[str, Any]) -> None:
    """Every other rank has heard who died, in time, and has what it had before."""
    for rank, answer in row["answers"].items():
        what = f"seed {row['seed']}, {row['moment']}, rank {rank}: {answer}"
        assert "failed" not in answer, f"{what}\n{answer.get('failed')}"
        assert f"{row['victim']} died" in answer["text"], what
        assert answer["noticed"] - row["killed"] < NOTICE_S, what
        grown = answer["grown"]
        assert not {"num_descriptors", "num_threads", "num_ring_mappings"} & set(grown), what
        assert grown.get("private_bytes", 0) < 16 << 20, what


def kill_many(first_seed: int, num_kills: int, timeout_s: float, what: str = "collectives") -> Counter[str]:
    """So many kills; how many there were at each kind of moment."""
    arguments = what, str(first_seed), str(num_kills)
    program = "-m", "tests.helpers.peer_kills", *arguments
    ran = warm_python(("torch",), *program, cwd=ROOT, env=environment(), timeout_s=timeout_s)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        judge(row)
    assert len(rows) == num_kills
    return Counter(row["moment"] for row in rows)


MOMENTS = ("before a call", "in a wait", "in a copy", "any")
LIMIT_S = 30.0
FAR = "p2p_far"


def _run_collectives(group: PeerGroup, moment: str, seed: int, is_victim: bool, ready: int) -> None:
    """Calls until a rank dies; every result that is given is right."""
    all_reduce(torch.ones(4), group)
    if moment == "in a copy":
        own = torch.full((1 << 21,), float(group.rank))
        os.write(ready, b"x")
        while True:
            rows = all_gather(own, group).view(group.num_ranks, -1)
            for k, row in enumerate(rows):
                assert row[0] == k, "a wrong result was given"
                assert row[-1] == k, "a wrong result was given"
    _stop(moment, is_victim, ready)
    os.write(ready, b"x")
    while True:
        random_calls(group, seed, 50)


def _stop(moment: str, is_victim: bool, ready: int) -> None:
    """The victim's part where it is to be killed in a wait, or before a call."""
    if moment == "in a wait" and is_victim:
        os.write(ready, b"x")
        signal.pause()
    if moment == "before a call" and is_victim:
        os.write(ready, b"x")
        os.kill(os.getpid(), signal.SIGKILL)


def _run_p2p(p2p: P2P, moment: str, seed: int, is_victim: bool, ready: int) -> None:
    """Sends to all ranks and receives from all until one dies; every value that is given is right."""
    ranks = [rank for rank in range(p2p.num_ranks) if rank != p2p.rank]
    draw = random.Random(seed)
    length, is_shared = (1 << 20 if moment == "in a copy" else 100), draw.random() < 0.5
    for step in count():
        if step == 1:
            _stop(moment, is_victim, ready)
            os.write(ready, b"x")
        value = torch.full((length,), float(p2p.rank + step), device=p2p.empty(0, dtype=torch.float32).device)
        if is_shared:
            value = p2p.empty(length, dtype=torch.float32).copy_(value)
        targets = {rank: p2p.empty(length, dtype=torch.float32) for rank in ranks}
        try:
            works = [p2p.irecv(target, rank, tag=step) for rank, target in targets.items()]
            for work in (*works, p2p.isend(value, ranks, tag=step)):
                work.wait()
            firsts = {rank: (float(target[0]), float(target[-1])) for rank, target in targets.items()}
            p2p.check()  # on a GPU, what was copied is not known to be valid before
        except ChannelBroken:
            p2p.check()  # another one may have heard of it first, and have closed its side
            raise
        for rank, ends in firsts.items():
            assert ends == (rank + step, rank + step), "a wrong value was given"


def _open_collectives(seed: int, num_ranks: int) -> PeerGroup:
    replayable = bool(seed % 2)
    return open_group(device="cpu", buffer_bytes=(1 << 16) * num_ranks, num_lanes=2, is_replayable=replayable)


def _open_p2p(device: str, transport: str, seed: int, num_ranks: int) -> P2P:
    return P2P(device=device, transport=transport, buffer_bytes=(1 << 16) * (seed % 3))


def _open_ahead(transport: str, seed: int, num_ranks: int) -> P2P:
    return P2P(device="cuda", transport=transport, waits="stream")


SUBJECTS: dict[str, tuple[Callable[[int, int], Any], Callable[..., None]]] = {
    "collectives": (_open_collectives, _run_collectives),
    "p2p": (partial(_open_p2p, "cpu", "auto"), _run_p2p),
    "p2p_staged": (partial(_open_p2p, "cpu", "staged"), _run_p2p),
    FAR: (partial(_open_p2p, "cpu", "tcp"), _run_p2p),
    "p2p_gpu": (partial(_open_p2p, "cuda", "auto"), _run_p2p),  # all ranks share one GPU
    "p2p_gpu_ahead": (partial(_open_ahead, "auto"), _run_p2p),
    "p2p_gpu_ahead_staged": (partial(_open_ahead, "staged"), _run_p2p),
    "p2p_gpu_staged": (partial(_open_p2p, "cuda", "staged"), _run_p2p),
}


def _rank(
    rank: int, what: str, num_ranks: int, victim: int, store: str, moment: str, seed: int, ready: int
) -> dict[str, Any]:
    join_world(rank, num_ranks, store)
    dist.barrier()
    if what.startswith("p2p_gpu"):
        torch.zeros(1 << 20, device="cuda").add_(1).sum().item()  # what CUDA takes for itself
    before = footprint(os.getpid())
    begin, run = SUBJECTS[what]
    opened = begin(seed, num_ranks)
    noticed, text = 0.0, ""
    try:
        run(opened, moment, seed, rank == victim, ready)
    except ChannelBroken as error:
        noticed, text = calm_s(), str(error)
    opened.close()
    opened.close()
    grown = held_more(before)
    left = [k for k in range(num_ranks) if k != victim]
    if len(left) > 1:
        part = dist.new_group(left, use_local_synchronization=True)
        smaller = open_group(part, device="cpu", buffer_bytes=4096)
        total = all_reduce(torch.full((3,), float(rank)), smaller)
        assert total.tolist() == [float(sum(left))] * 3
        smaller.close()
    return {"noticed": noticed, "text": text, "grown": grown}


def _child(rank: int, said: int, *args: Any) -> None:
    try:
        answer = _rank(rank, *args)
    except BaseException:
        answer = {"failed": traceback.format_exc()}
    os.write(said, json.dumps(answer).encode())
    os._exit(0)


def kill_once(what: str, seed: int, folder: Path) -> dict[str, Any]:
    """One kill: what was done, and what each of the other ranks says."""
    draw = random.Random(seed)
    num_ranks, moment = draw.choice((2, 3, 4)), MOMENTS[seed % len(MOMENTS)]
    victim = draw.randrange(num_ranks)
    ready_read, ready = os.pipe()
    pids, ends = [], []
    for rank in range(num_ranks):
        mine, said = os.pipe()
        pid = os.fork()
        if not pid:
            signal.alarm(int(LIMIT_S))  # nothing stays, whatever happens
            faulthandler.dump_traceback_later(LIMIT_S - 2.0)
            faulthandler.enable()
            _child(rank, said, what, num_ranks, victim, str(folder / f"store{seed}"), moment, seed, ready)
        os.close(said)
        pids.append(pid)
        ends.append(mine)
    os.close(ready)
    for _ in range(num_ranks):
        os.read(ready_read, 1)
    os.close(ready_read)
    time.sleep(draw.uniform(0, 0.02 if moment == "in a wait" else 0.1))  # a random moment
    killed = calm_s()
    os.kill(pids[victim], signal.SIGKILL)
    answers: dict[int, Any] = {}
    for rank, (pid, end) in enumerate(zip(pids, ends, strict=True)):
        with os.fdopen(end, "rb") as file:
            said_bytes = file.read()
        _, status = os.waitpid(pid, 0)
        if rank != victim:
            died = {"failed": f"it ended with {os.waitstatus_to_exitcode(status)}"}
            answers[rank] = json.loads(said_bytes) if said_bytes else died
    return {
        "seed": seed,
        "moment": moment,
        "victim": f"rank {victim} ({'of another host' if what == FAR else f'process {pids[victim]}'})",
        "killed": killed,
        "answers": answers,
    }


def main() -> None:
    what, (first, num) = sys.argv[1], map(int, sys.argv[2:])
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + num):
            print(json.dumps(kill_once(what, seed, Path(folder))), flush=True)


if __name__ == "__main__":
    main()
