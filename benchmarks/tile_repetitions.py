"""Tile operators again and again, with random delays on every rank: whether an element is ever wrong, or a bit ever another one.

``python -m benchmarks.tile_repetitions [--num 20000] [--ranks 4]`` on all GPUs; ``--quick`` a few on CPU processes.

Calls come again with the same tensors. So on GPUs all but the first ones are replays; with ``--eager`` the lanes cannot be
replayed, and each call is enqueued by itself, without the empty exchanges that replays need.

Two operators are in flight at a time, on two streams and two lanes. Which ones, and by which candidates, is drawn alike on all
ranks; delays are drawn by each rank for itself: its GPU sleeps for up to 200 us before a call, or its host does. Outputs are
poisoned before each call. Each operator has whole numbers, whose sums bfloat16 has, so that there is one right result, and real
ones, whose bits have to be those of the first call by that candidate.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT_S = 400.0
MOST_DELAY_US = 200
CYCLES_PER_US = 1_700
NUM_BETWEEN_CHECKS = 400
SIZES = (1024, 1024, 256)
QUICK_SIZES = (48, 24, 16)
SUMS = (
    "rounds",
    "rounds(rounds=2)",
    "rounds(rounds=2, lag=1, taper=3)",
    "rounds(rounds=4, lag=1)",
)
MOVES = ("rounds", "rounds(rounds=2)")


@dataclass
class Case:
    """One operator by one candidate, on one lane.

    Attributes:
        call: does it, into ``out``.
        out: poisoned before.
        wanted: its right bits.
    """

    name: str
    call: Any
    out: Any
    wanted: Any


def _cases(group: Any, rank: int, lane: int, *, is_quick: bool) -> list[Case]:
    import torch

    from crossfade.ops.operators import all_gather_matmul, matmul_all_reduce, matmul_all_to_all, matmul_reduce_scatter

    m, n, k = QUICK_SIZES if is_quick else SIZES
    ways: list[tuple[Any, Sequence[str]]] = [
        (matmul_reduce_scatter, SUMS), (matmul_all_reduce, SUMS), (all_gather_matmul, MOVES), (matmul_all_to_all, MOVES)
    ]  # fmt: skip
    draw = torch.Generator().manual_seed(1000 * lane + rank)
    found = []
    for is_exact in (True, False):
        for function, candidates in ways:
            operands = []
            for shape in ((m, k), (n, k)):
                value = torch.randint(-1, 2, shape, generator=draw) * (torch.rand(shape, generator=draw) < 0.2)
                real = torch.randn(shape, generator=draw)
                operands.append((value if is_exact else real).to(torch.bfloat16).to(group.device))
            a, b = operands[0], operands[1].t()
            right = function(a, b, group, lane=lane, candidate="plain") if is_exact else None
            for candidate in candidates:
                out = torch.empty_like(function(a, b, group, lane=lane, candidate=candidate))

                def call(
                    function: Any = function, a: Any = a, b: Any = b, out: Any = out, candidate: str = candidate
                ) -> None:
                    function(a, b, group, out=out, lane=lane, candidate=candidate)

                wanted = right
                if wanted is None:
                    call()
                    wanted = out.clone()
                kind = "whole" if is_exact else "real"
                found.append(Case(f"{function.__name__}, {candidate}, {kind} numbers", call, out, wanted))
    return found


def _rank(rank: int, num_ranks: int, store: str, num: int, is_quick: bool, is_eager: bool, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    from crossfade.peers import open_group

    device = "cpu" if is_quick else "cuda"
    if not is_quick:
        torch.cuda.set_device(rank)
    meeting = dist.FileStore(store, num_ranks)  # type: ignore[attr-defined,unused-ignore]
    dist.init_process_group(
        "gloo" if is_quick else "nccl", store=meeting, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
    )
    group = open_group(
        device=device if is_quick else None, buffer_bytes=16 << 20, num_lanes=2, is_replayable=not is_eager
    )
    cases = [_cases(group, rank, lane, is_quick=is_quick) for lane in range(2)]
    streams: list[Any] = [None, None] if is_quick else [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
    wrong = torch.zeros(2, max(map(len, cases)), dtype=torch.int64, device=group.device)
    alike, own = random.Random(7), random.Random(100 + rank)
    if not is_quick:
        torch.cuda.synchronize()
    begin = time.monotonic()
    for number in range(num):
        lane = number % 2
        at = alike.randrange(len(cases[lane]))
        _once(cases[lane][at], streams[lane], own, wrong[lane, at])
        if number % NUM_BETWEEN_CHECKS == 0 or number == num - 1:
            if not is_quick:
                torch.cuda.synchronize()
            group.check()
    taken_s = time.monotonic() - begin
    names = [[case.name for case in each] for each in cases]
    counts = wrong.tolist()
    found = {f"lane {lane}, {name}": counts[lane][k] for lane in range(2) for k, name in enumerate(names[lane])}
    group.close()
    dist.destroy_process_group()
    answers.put((rank, {"taken_s": taken_s, "wrong": {name: each for name, each in found.items() if each}}))


def _once(case: Case, stream: Any, own: random.Random, wrong: Any) -> None:
    """One call, at some moment."""
    import torch

    if own.random() < 0.1:
        time.sleep(own.random() * MOST_DELAY_US / 1e6)
    if stream is None:
        case.out.fill_(torch.nan)
        case.call()
        wrong += (case.out != case.wanted).any()
        return
    with torch.cuda.stream(stream):
        case.out.fill_(torch.nan)
        if own.random() < 0.5:
            torch.cuda._sleep(int(own.random() * MOST_DELAY_US * CYCLES_PER_US))  # type: ignore[no-untyped-call]
        case.call()
        wrong += (case.out != case.wanted).any()


def run(num: int, num_ranks: int, *, is_quick: bool, is_eager: bool = False) -> list[dict[str, Any]]:
    """What every rank found.

    Raises:
        RuntimeError: a rank failed, or they took too long.
    """
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        rest = num_ranks, os.path.join(folder, "store"), num, is_quick, is_eager, answers
        ranks = [context.Process(target=_rank, args=(rank, *rest), daemon=True) for rank in range(num_ranks)]
        for each in ranks:
            each.start()
        end = time.monotonic() + LIMIT_S
        found: dict[int, dict[str, Any]] = {}
        while len(found) < num_ranks:
            died = [k for k, each in enumerate(ranks) if each.exitcode not in (None, 0)]
            if died or time.monotonic() > end:
                for each in ranks:
                    each.kill()
                raise RuntimeError(f"ranks {died} failed" if died else f"only {len(found)} ranks were done in time")
            while not answers.empty():
                rank, answer = answers.get()
                found[rank] = answer
            time.sleep(0.05)
        for each in ranks:
            each.join(30)
    return [found[rank] for rank in sorted(found)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Repeats and reports: 1 when anything was wrong."""
    parser = argparse.ArgumentParser("benchmarks.tile_repetitions", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num", type=int, default=20_000, help="calls of each rank")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--out", type=Path, help="a file for what was found, as JSON")
    parser.add_argument("--eager", action="store_true", help="lanes that cannot be replayed")
    parser.add_argument("--quick", action="store_true", help="on CPU processes, in small")
    options = parser.parse_args(arguments)
    found = run(options.num, options.ranks, is_quick=options.quick, is_eager=options.eager)
    result = {"num": options.num, "num_ranks": options.ranks, "is_eager": options.eager, "ranks": found}
    if options.out is not None:
        options.out.write_text(json.dumps(result))
    sys.stdout.write(json.dumps(result) + "\n")
    return int(any(each["wrong"] for each in found))


if __name__ == "__main__":
    sys.exit(main())
