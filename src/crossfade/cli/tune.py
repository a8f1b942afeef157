"""``crossfade tune``: measures the ways to do products with their collectives, and keeps what is best for each shape."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

from rich.console import Console
from rich.table import Table

from crossfade.cli.exits import UsersMistake
from crossfade.cli.measure import show_us
from crossfade.cli.shown import new_progress, new_table
from crossfade.errors import DeviceError, MissingDependency
from crossfade.ops.calls.job import Layout, Operator, Shape
from crossfade.ops.choice.cache import Decision
from crossfade.ops.choice.candidate import PLAIN
from crossfade.ops.choice.tune import Tuner
from crossfade.ops.tuning import open_tuner
from crossfade.peers.group import PeerGroup
from crossfade.peers.opening import open_group

COMMAND = "torchrun --nproc-per-node 4 -m crossfade tune 8192,8192,7168"


def tune_here(
    texts: Sequence[str], operators: Sequence[str], dtype: str, layout: str, *, again: bool, is_eager: bool = False
) -> None:
    """Tunes shapes (``M,N,K`` each) on the ranks that torchrun started; rank 0 shows how far it is, and prints what was decided.

    Without ``operators`` all are tuned. ``again``: measure what was measured before too. ``is_eager``: for groups whose calls are
    enqueued one by one, and not replayed.
    """
    wanted = parse_shapes(texts, dtype, layout)
    if find_spec("torch") is None:
        raise MissingDependency("torch", extra="gpu", needed_for="tuning")
    import torch

    num_gpus = torch.cuda.device_count()
    if not num_gpus:
        raise UsersMistake("there is no GPU here to tune for", hint=f"on a machine with GPUs: {COMMAND}")
    names = _known(operators)
    buffer_bytes = max(shape.m * max(shape.n, shape.k) * shape.item_bytes for shape in wanted("", 1))
    with _ranks(num_gpus, buffer_bytes, is_replayable=not is_eager) as group:
        tuner = open_tuner(group, is_measuring=True)
        console = Console(highlight=False, quiet=group.rank > 0)
        fill(console, tuner, [shape for name in names for shape in wanted(name, group.num_ranks)], again=again)


def _known(names: Sequence[str]) -> list[str]:
    for name in names:
        if name not in list(Operator):
            raise UsersMistake(f"there is no operator {name!r} to tune", hint=f"there are: {', '.join(Operator)}")
    return list(dict.fromkeys(names or Operator))


def parse_shapes(texts: Sequence[str], dtype: str, layout: str) -> Callable[[str, int], list[Shape]]:
    """A function that gives the shapes for an operator and a number of ranks. A `UsersMistake` for a text that is no shape."""
    rows: list[tuple[int, int, int]] = []
    for text in texts:
        parts = text.split(",")
        if len(parts) != 3 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
            raise UsersMistake(f"{text!r} is no shape", hint="M,N,K of each GPU's product, such as 8192,8192,7168")
        rows.append((int(parts[0]), int(parts[1]), int(parts[2])))
    if layout not in list(Layout):
        raise UsersMistake(f"{layout!r} is no layout", hint="nn, or nt where b is the transpose of a row-major matrix")

    def shapes(operator: str, num_ranks: int) -> list[Shape]:
        return [Shape(operator, *row, dtype, layout, num_ranks) for row in rows]

    try:
        shapes("", 1)
    except ValueError as error:
        raise UsersMistake.of(error) from None
    return shapes


@contextmanager
def _ranks(num_gpus: int, buffer_bytes: int, *, is_replayable: bool) -> Iterator[PeerGroup]:
    """The group of the ranks that torchrun started, each on its GPU."""
    import torch
    import torch.distributed as dist

    local_rank = local_rank_of(os.environ)
    if local_rank is None:
        raise UsersMistake("torchrun did not start this process", hint=COMMAND)
    if local_rank >= num_gpus:
        raise UsersMistake(f"there are more ranks than GPUs, which are {num_gpus}", hint=f"--nproc-per-node {num_gpus}")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    try:
        group = open_group(device=device, buffer_bytes=max(buffer_bytes, 1 << 20), is_replayable=is_replayable)
        try:
            yield group
        finally:
            group.close()
    finally:
        dist.destroy_process_group()


def local_rank_of(environment: Mapping[str, str]) -> int | None:
    """This process's number on its host, if torchrun started it."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return int(environment["LOCAL_RANK"]) if all(name in environment for name in names) else None


def fill(console: Console, tuner: Tuner, shapes: Sequence[Shape], *, again: bool = False) -> None:
    """Tunes shapes, with a progress bar, and prints what was decided. What is done is kept at once, so it outlives Ctrl-C."""
    decided: list[tuple[Shape, Decision]] = []
    problems: list[str] = []
    with new_progress(console, "tuning") as bars:
        task = bars.add_task("starting", total=len(shapes))
        for shape in shapes:
            bars.update(task, description=str(shape))
            try:
                decided.append((shape, tuner.tune(shape, again=again)))
            except DeviceError as error:
                problems.append(str(error))
            bars.advance(task)
    for shape, decision in decided:
        for note in decision.notes:
            console.print(f"{shape}: {note}", markup=False, soft_wrap=True)
    for problem in problems:
        console.print(f"not tuned: {problem}", markup=False, soft_wrap=True)
    if not decided:
        raise DeviceError("no shape could be tuned", hint="the lines above say why")
    console.print(_table(decided, tuner))


def _table(decided: Sequence[tuple[Shape, Decision]], tuner: Tuner) -> Table:
    headings = ("measured", "predicted", "plain", "x")
    table = new_table("Choices: us, median, the slowest rank", ("shape", "by"), headings)
    for shape, decision in decided:
        chosen = decision.order[0]
        predicted = tuner.predict(shape, chosen)
        time_us, plain_us = decision.time_us(chosen), decision.time_us(PLAIN)
        table.add_row(
            str(shape),
            str(chosen),
            "" if time_us is None else show_us(time_us),
            "" if predicted is None else show_us(predicted.total_us),
            "" if plain_us is None else show_us(plain_us),
            f"{plain_us / time_us:.2f}" if time_us and plain_us else "",
        )
    return table
