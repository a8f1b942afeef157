"""Training steps of a pipeline of two ranks over crossfade's backend, and over torch's own, in turns.

``python -m benchmarks.p2p_training run OUT.jsonl`` trains a transformer of 1.2 billion parameters (bf16) by every schedule that the
installed torch has: two stages, or four where a rank has several. Both sides begin with the same weights and see the same data,
with deterministic kernels; their losses are compared step by step, bit for bit. Then their steps are timed in turns, each from a
meeting of the ranks until the later one's GPU has done the optimizer's step. It does so with peer access, and switched off for both
sides. Without GPUs it trains something small over gloo, to try the program. ``python -m benchmarks.p2p_training report OUT.jsonl
...`` makes a report.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import statistics
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

import crossfade.p2p.backend
from benchmarks.common import Series, Table, ratio, this_machine, today, write_report
from benchmarks.gpu_steps import machine_in_words
from benchmarks.p2p_devices import Block
from tests.helpers.device_pair import run_workers

NUM_RANKS = 2
NUM_MICROBATCHES = 8
SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
PEERS, NO_PEERS = "peer access", "no peer access"
CROSSFADE, HOSTS_WAIT = "crossfade", "crossfade, hosts wait"
OPTIONS: Mapping[str, Mapping[str, Any]] = {CROSSFADE: {}, HOSTS_WAIT: {"waits": "host"}}
"""Of crossfade's groups: where a receive's send has not begun, by default the stream waits, as NCCL's does."""
ASKED = 1.01
"""Of the step over NCCL, with peer access."""


@dataclass(frozen=True)
class Sizes:
    """Of the model and of a microbatch: tensors of (1, tokens, width) go from stage to stage."""

    width: int
    num_heads: int
    depth: int
    tokens: int
    dtype: torch.dtype


LARGE = Sizes(2048, 16, 24, 2048, torch.bfloat16)
SMALL = Sizes(32, 4, 8, 16, torch.float32)


class Side(NamedTuple):
    """What moves tensors from stage to stage: the backend of a group, and its options."""

    name: str
    backend: str
    options: Mapping[str, Any]


class Trainer:
    """One rank's part of the model, trained by a schedule over one group or another."""

    def __init__(self, rank: int, schedule: str, sizes: Sizes, device: torch.device) -> None:
        kind = get_schedule_class(schedule)
        self._is_multi = issubclass(kind, PipelineScheduleMulti)
        self._kind: Any = kind
        self._num_stages = 2 * NUM_RANKS if self._is_multi else NUM_RANKS
        is_v = schedule in ("ZBVZeroBubble", "DualPipeV")
        places = [rank, self._num_stages - 1 - rank] if is_v else range(rank, self._num_stages, NUM_RANKS)
        self._places = list(places)
        self._sizes, self._device = sizes, device
        self._parts = [self._make(place) for place in self._places]
        self._first = [p.detach().clone() for part in self._parts for p in part.parameters()]
        self._optimizer = torch.optim.SGD((p for part in self._parts for p in part.parameters()), lr=1e-3)
        self._schedules: dict[str, Any] = {}

    def _make(self, place: int) -> nn.Module:
        sizes = self._sizes
        torch.manual_seed(place)
        with self._device:
            blocks = [
                Block(sizes.width, sizes.num_heads, 4 * sizes.width) for _ in range(sizes.depth // self._num_stages)
            ]
        return nn.Sequential(*blocks).to(sizes.dtype)

    def over(self, name: str, group: Any) -> None:
        """Prepares to train over a group."""
        stages = [
            PipelineStage(part, place, self._num_stages, self._device, group=group)
            for place, part in zip(self._places, self._parts, strict=True)
        ]
        loss = nn.functional.mse_loss
        self._schedules[name] = self._kind(stages if self._is_multi else stages[0], NUM_MICROBATCHES, loss_fn=loss)

    def restart(self) -> None:
        """Puts the first weights back."""
        with torch.no_grad():
            parameters = (p for part in self._parts for p in part.parameters())
            for parameter, first in zip(parameters, self._first, strict=True):
                parameter.copy_(first)

    def step(self, name: str, number: int) -> list[torch.Tensor]:
        """One step; the losses of its microbatches, where the last stage is."""
        sizes = self._sizes
        generator = torch.Generator(self._device).manual_seed(number)
        shape = (NUM_MICROBATCHES, sizes.tokens, sizes.width)
        x, y = (torch.randn(shape, generator=generator, device=self._device, dtype=sizes.dtype) for _ in range(2))
        losses: list[torch.Tensor] = []
        has_last = self._num_stages - 1 in self._places
        more = {"target": y, "losses": losses} if has_last else {}
        self._schedules[name].step(*((x,) if 0 in self._places else ()), **more)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return losses


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _block_ms(trainer: Trainer, side: str, num: int, device: torch.device, everyone: Any) -> list[float]:
    """The steps of one block, each by the slower rank."""
    taken = torch.zeros(num, dtype=torch.float64)
    for number in range(num):
        _synchronize(device)
        dist.barrier(group=everyone)
        begin_s = time.perf_counter()
        trainer.step(side, number)
        _synchronize(device)
        taken[number] = (time.perf_counter() - begin_s) * 1e3
    dist.all_reduce(taken, dist.ReduceOp.MAX, group=everyone)
    return taken.tolist()


def _measure(
    schedule: str, sides: Mapping[str, Any], rank: int, sizes: Sizes, device: torch.device, options: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Losses of every side, then times in turns."""
    everyone = options["everyone"]
    trainer = Trainer(rank, schedule, sizes, device)
    losses: dict[str, list[float]] = {}
    for name, group in sides.items():
        trainer.over(name, group)
        trainer.restart()
        seen = [trainer.step(name, number) for number in range(options["steps"])]
        losses[name] = [loss.item() for each in seen for loss in each]
    told: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(told, losses, group=everyone)
    rows = next(each for each in told if any(each.values()))
    first, *others = rows.values()
    num_params = sum(p.numel() for part in trainer._parts for p in part.parameters())
    yield {
        "losses": len(first),
        "equal": all(each == first for each in others),
        "falls": first[-1] < first[0],
        "parameters": num_params * NUM_RANKS,
    }
    for number in range(options["rounds"]):
        for name in list(sides) if number % 2 == 0 else reversed(list(sides)):
            yield {"side": name, "ms": _block_ms(trainer, name, options["block"], device, everyone)}


def work(peers: Any, rank: int, where: str, sides: Sequence[Side], out: str, options: dict[str, Any]) -> None:
    """One rank; rank 0 writes what is there as it comes."""
    faulthandler.dump_traceback_later(options["stacks_s"])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if where == NO_PEERS:
        os.environ["NCCL_P2P_DISABLE"] = "1"
    is_gpu = torch.cuda.is_available() and torch.cuda.device_count() >= NUM_RANKS
    device = torch.device("cuda", rank) if is_gpu else torch.device("cpu")
    if is_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // NUM_RANKS
    os.sched_setaffinity(0, cores[rank * share : (rank + 1) * share] or cores)  # as launchers bind ranks
    torch.use_deterministic_algorithms(True)
    store = dist.FileStore(f"{out}.store-{where[:2]}", NUM_RANKS)  # type: ignore[attr-defined,unused-ignore]
    backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=NUM_RANKS, timeout=timedelta(seconds=60))
    groups = {side.name: dist.new_group(backend=side.backend, pg_options=side.options or None) for side in sides}
    options["everyone"] = dist.new_group(backend="gloo")
    sizes = replace(LARGE, tokens=options["tokens"]) if is_gpu else SMALL
    for schedule in options["schedules"]:
        rows = _measure(schedule, groups, rank, sizes, device, options)
        for row in rows:
            if rank == 0:
                with Path(out).open("a") as file:
                    head = {"where": where, "schedule": schedule, "tokens": sizes.tokens}
                    file.write(json.dumps({**head, **row}) + "\n")
        if is_gpu:
            torch.cuda.empty_cache()
    dist.barrier(group=options["everyone"])
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()


def run(options: argparse.Namespace) -> None:
    """Measures; a place that fails leaves its error, and the other goes on."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS is deterministic with it
    is_gpu = torch.cuda.device_count() >= NUM_RANKS
    theirs = Side("NCCL", "nccl", {}) if is_gpu else Side("gloo", "gloo", {})
    begin_s = time.monotonic()
    options.out.unlink(missing_ok=True)
    head = {"machine": machine_in_words()[1], "slug": machine_in_words()[0].hardware, "date": today()}
    options.out.write_text(json.dumps(head) + "\n")
    for where, transport in ((PEERS, "auto"), (NO_PEERS, "staged")):
        left_s = options.limit_s - (time.monotonic() - begin_s)
        if where not in options.where or left_s < 20:
            continue
        name = crossfade.p2p.backend.NAME
        ours = [Side(each, name, {"transport": transport, **OPTIONS[each]}) for each in options.sides]
        sides = [theirs, *ours]
        chosen = {key: getattr(options, key) for key in ("steps", "rounds", "block", "schedules", "tokens")}
        chosen["stacks_s"] = left_s - 5  # where each rank is when time is nearly over
        args = [(rank, where, sides, str(options.out), dict(chosen)) for rank in range(NUM_RANKS)]
        try:
            run_workers([work] * NUM_RANKS, args, timeout_s=left_s)
        except Exception:
            with options.out.open("a") as file:
                file.write(json.dumps({"where": where, "failed": traceback.format_exc()[-2000:]}) + "\n")
        for path in options.out.parent.glob(f"{options.out.name}.store*"):
            path.unlink()


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Losses and step times; what was exposed."""
    shown = Table(
        "Steps in turns, ms: median (lowest to highest block)",
        [
            "",
            "schedule",
            "losses compared",
            "equal",
            "torch's own",
            *OPTIONS,
            *(f"{each} / torch's own" for each in OPTIONS),
        ],
    )
    exposed = Table(
        f"Exposed communication: what a step takes more without peer access than over {PEERS}, ms",
        ["schedule", "torch's own", "crossfade", "won, of what was exposed"],
    )
    times: dict[tuple[str, int, str, str], Series] = {}
    for row in rows:
        if "ms" in row:
            side = row["side"] if row["side"] in OPTIONS else "own"
            times.setdefault((row["where"], row["tokens"], row["schedule"], side), Series()).add(row["ms"])
    sizes = sorted({row["tokens"] for row in rows if "tokens" in row})
    for where, tokens, schedule in product((PEERS, NO_PEERS), sizes, SCHEDULES):
        own, *ours = (times.get((where, tokens, schedule, side)) for side in ("own", *OPTIONS))
        said = [
            row
            for row in rows
            if "equal" in row and (row["where"], row["tokens"], row["schedule"]) == (where, tokens, schedule)
        ]
        if said:
            cells = ["-" if each is None else _text(each) for each in (own, *ours)]
            over = [str(ratio(each, own)) if own and each else "-" for each in ours]
            equal = "yes" if all(r["equal"] for r in said) else "NO"
            label = f"{where}, {tokens:,} tokens"
            shown.add(label, schedule, str(sum(r["losses"] for r in said)), equal, *cells, *over)
    for tokens, schedule in product(sizes, SCHEDULES):
        best = [_median(times.get((PEERS, tokens, schedule, side))) for side in ("own", CROSSFADE)]
        without = [_median(times.get((NO_PEERS, tokens, schedule, side))) for side in ("own", CROSSFADE)]
        if None not in (*best, *without):
            least = min(best)  # type: ignore[type-var]
            before, after = (each - least for each in without)  # type: ignore[operator]
            exposed.add(
                f"{schedule}, {tokens:,} tokens",
                f"{before:.2f}",
                f"{after:.2f}",
                f"{1 - after / before:.0%}" if before > 0 else "-",
            )
    return [shown] + [exposed] * bool(exposed.rows)


def _median(series: Series | None) -> float | None:
    return None if series is None else statistics.median(value for block in series.blocks for value in block or ())


def _text(series: Series) -> str:
    low, high = series.spread() or (0.0, 0.0)
    return f"{_median(series):.2f} ({low:.2f} to {high:.2f})"


def report(outs: Sequence[Path], note: Path | None) -> Path:
    """Writes the report of some runs."""
    rows = [json.loads(line) for path in outs for line in path.read_text().splitlines()]
    head = next(row for row in rows if "machine" in row)
    failed = [f"- {row['where']}: `{row['failed'].splitlines()[-1]}`" for row in rows if "failed" in row]
    machine = this_machine(())
    parts = ["# Training steps of pipelines", f"{head['machine']}. {head['date']}.", (__doc__ or "").strip()]
    parts += [note.read_text().strip()] if note else []
    parts += [table.markdown() for table in tables(rows)] + (["Failed:\n\n" + "\n".join(failed)] if failed else [])
    named = machine.__class__(head["slug"], machine.cpu_model, machine.kernel, machine.versions)
    return write_report("p2p_training", named, "\n\n".join(parts) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.p2p_training", description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    measure = commands.add_parser("run", help="measure, and write OUT.jsonl")
    measure.add_argument("out", type=Path)
    measure.add_argument("--where", nargs="+", choices=(PEERS, NO_PEERS), default=[PEERS, NO_PEERS])
    measure.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    measure.add_argument("--sides", nargs="+", choices=list(OPTIONS), default=list(OPTIONS))
    measure.add_argument("--tokens", type=int, default=LARGE.tokens, help="of a microbatch, on GPUs")
    measure.add_argument("--steps", type=int, default=50, help="whose losses are compared")
    measure.add_argument("--rounds", type=int, default=6, help="blocks of each side")
    measure.add_argument("--block", type=int, default=5, help="steps of a block")
    measure.add_argument("--limit-s", type=float, default=600.0, help="of the whole run")
    tell = commands.add_parser("report", help="write a report of files that run has written")
    tell.add_argument("outs", type=Path, nargs="+")
    tell.add_argument("--note", type=Path, help="Markdown that goes to the top of the report")
    options = parser.parse_args(arguments)
    if options.command == "run":
        run(options)
    else:
        print(report(options.outs, options.note))


if __name__ == "__main__":
    main()
