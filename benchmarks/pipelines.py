"""How well stages are balanced, and how well a training step is predicted: `crossfade.pipelines` on three models, two ranks.

``python -m benchmarks.pipelines --report`` cuts each model into stages, predicts the step of each schedule, and trains by it on
two ranks of this host, over the backend ``crossfade``. CPU ranks have one thread each. ``--device cuda`` gives each rank a GPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import get_schedule_class

import crossfade.p2p.backend
from benchmarks.common import REPORTS, Table, today, write_report
from benchmarks.gpu_steps import machine_in_words
from benchmarks.quiet import Quiet
from crossfade.pipelines import SCHEDULES, Split, split
from crossfade.pipelines.orders import order_of, passes_of
from crossfade.pipelines.predict import host_costs
from tests.helpers.pipeline_models import EncoderDecoder, ResNet, Transformer

NUM_RANKS = 2
ASKED_IMBALANCE, ASKED_ERROR = 0.10, 0.08


@dataclass(frozen=True)
class Model:
    """A model, how to make a batch of that many samples, its loss."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    target: Callable[[int], Tensor]
    loss: Callable[[Any, Tensor], Tensor]
    size: int
    """Of a microbatch."""


def _classes(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, -2), target.flatten())


def _images(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs[0], target) + outputs[1].square().mean()


@dataclass(frozen=True)
class Sizes:
    """Of the models and their microbatches: a microbatch takes a device some tens of milliseconds."""

    words: int
    width: int
    num_heads: int
    length: int
    sequences: int
    resnet_channels: int
    pictures: int
    coder_channels: int
    side: int
    coded: int


SIZES = {
    "cpu": Sizes(4000, 256, 4, 128, 4, 24, 8, 24, 64, 4),
    "cuda": Sizes(16_000, 1024, 8, 1024, 4, 64, 1536, 64, 256, 32),
}
TRANSFORMER, RESNET, CODER = "transformer, tied embeddings", "ResNet", "encoder-decoder, skips"
MODELS = (TRANSFORMER, RESNET, CODER)


def model_of(name: str, sizes: Sizes) -> Model:
    """A model of these sizes."""
    words, length, side = sizes.words, sizes.length, sizes.side
    return {
        TRANSFORMER: Model(
            lambda: Transformer(words, sizes.width, 8, num_heads=sizes.num_heads, length=length),
            lambda num: (torch.randint(words, (num, length)),),
            lambda num: torch.randint(words, (num, length)),
            _classes,
            size=sizes.sequences,
        ),
        RESNET: Model(
            lambda: ResNet(sizes.resnet_channels, (3, 4, 6, 3)),
            lambda num: (torch.randn(num, 3, 32, 32),),
            lambda num: torch.randint(10, (num,)),
            _classes,
            size=sizes.pictures,
        ),
        CODER: Model(
            lambda: EncoderDecoder(sizes.coder_channels, 4),
            lambda num: (torch.randn(num, 3, side, side), torch.rand(num, 1, 1, 1)),
            lambda num: torch.randn(num, 3, side, side),
            _images,
            size=sizes.coded,
        ),
    }[name]


def _steps_us(model: Model, cut: Split, name: str, batch: Any, num_steps: int) -> list[float]:
    """How long training steps take on the slowest rank, the optimizer's left out; after two that do not count."""
    inputs, target = batch
    num_microbatches = len(target) // model.size
    order = passes_of(order_of(name, cut.num_stages, num_microbatches, NUM_RANKS))
    mine = {each.stage for each in order[dist.get_rank()]}
    stages = [cut.build_stage(index, group=dist.group.WORLD) for index in sorted(mine)]
    is_single = name in ("GPipe", "1F1B")
    schedule = get_schedule_class(name)(stages[0] if is_single else stages, num_microbatches, loss_fn=model.loss)
    taken = []
    for _ in range(num_steps + 2):
        dist.barrier()
        start = time.perf_counter()
        schedule.step(*(inputs if 0 in mine else ()), **({"target": target} if stages[-1].is_last else {}))
        if cut.device.type == "cuda":
            torch.cuda.synchronize()
        took = torch.tensor([(time.perf_counter() - start) * 1e6], device=cut.device)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        taken.append(took.item())
    return taken[2:]


def _work(link: Any, rank: int, args: argparse.Namespace, model_name: str, store: str) -> None:
    """One rank: measures a schedule each time it is told its name, until it is told None."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if args.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    meeting = dist.FileStore(store, NUM_RANKS)  # type: ignore[attr-defined,unused-ignore]
    dist.init_process_group(args.backend, store=meeting, rank=rank, world_size=NUM_RANKS)
    while (name := link.recv()) is not None:
        link.send(_measure(args, device, model_name, name))
    dist.destroy_process_group()


def _measure(args: argparse.Namespace, device: torch.device, model_name: str, name: str) -> dict[str, Any]:
    """Cuts a model anew, predicts a schedule's step, and trains by it."""
    torch.manual_seed(1)
    model = model_of(model_name, SIZES[args.device])
    num = model.size * args.microbatches
    batch = tuple(each.to(device) for each in model.inputs(num)), model.target(num).to(device)
    example, target = tuple(each[: model.size] for each in batch[0]), batch[1][: model.size]
    num_stages = NUM_RANKS if name in ("GPipe", "1F1B") else 2 * NUM_RANKS
    module = model.make()
    cut = split(module, example, num_stages, loss_fn=model.loss, target=target, device=device, num_passes=args.passes)
    costs = host_costs(num_cores=os.cpu_count() or 1)
    predicted = cut.predict(name, args.microbatches, NUM_RANKS, costs=costs)
    return {
        "model": model_name,
        "schedule": name,
        "stages": num_stages,
        "imbalance": cut.imbalance,
        "stages_us": [asdict(each.times) for each in cut.stages],
        "bubbles": predicted.bubbles,
        "predicted_us": predicted.step_us,
        "measured_us": _steps_us(model, cut, name, batch, args.steps),
    }


def _run(args: argparse.Namespace, model_name: str, quiet: Quiet) -> list[dict[str, Any]]:
    """All schedules of one model, each as often as asked, while the machine is quiet."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        links, workers = [], []
        for rank in range(NUM_RANKS):
            mine, theirs = context.Pipe()
            given = (theirs, rank, args, model_name, f"{folder}/store")
            workers.append(context.Process(target=_work, args=given, daemon=True))
            workers[-1].start()
            links.append(mine)

        def ask(name: str) -> dict[str, Any]:
            for link in links:
                link.send(name)
            answers: list[dict[str, Any]] = [link.recv() for link in links]
            print(json.dumps(answers[0]), flush=True)  # so that it is not lost if what follows hangs
            return answers[0]

        rows = [quiet.run(partial(ask, name)) for _ in range(args.repetitions) for name in args.schedules]
        for link in links:
            link.send(None)
        for worker in workers:
            worker.join()
    return rows


def _percent(values: list[float]) -> str:
    middle = f"{statistics.median(values):.1%}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.1%} to {max(values):.1%})"


def _table(rows: list[dict[str, Any]]) -> Table:
    title = "Slowest stage over the mean; predicted step over the measured, less 1"
    table = Table(title, ["model", "schedule", "stages", "slowest over mean", "predicted ms", "measured ms", "error"])
    for model in MODELS:
        for name in SCHEDULES:
            found = [row for row in rows if (row["model"], row["schedule"]) == (model, name)]
            if not found:
                continue
            steps_us = [us for row in found for us in row["measured_us"]]
            errors = [row["predicted_us"] / statistics.median(row["measured_us"]) - 1 for row in found]
            table.add(
                model,
                name,
                str(found[0]["stages"]),
                _percent([row["imbalance"] for row in found]),
                f"{statistics.median(row['predicted_us'] for row in found) / 1e3:.1f}",
                f"{statistics.median(steps_us) / 1e3:.1f} ({min(steps_us) / 1e3:.1f} to {max(steps_us) / 1e3:.1f})",
                _percent(errors),
            )
    return table


def _summary(rows: list[dict[str, Any]]) -> str:
    errors = [abs(row["predicted_us"] / statistics.median(row["measured_us"]) - 1) for row in rows]
    balanced = sum(row["imbalance"] <= ASKED_IMBALANCE for row in rows)
    near = sum(error <= ASKED_ERROR for error in errors)
    return (
        f"The slowest stage is within {ASKED_IMBALANCE:.0%} of the mean in {balanced} of {len(rows)} splits. The predicted step is "
        f"within {ASKED_ERROR:.0%} of the measured in {near} of {len(rows)}; the median error is {statistics.median(errors):.1%}, "
        f"the largest {max(errors):.1%}."
    )


def main() -> None:
    """Runs all models, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--backend", default=crossfade.p2p.backend.NAME, help="of the ranks; nccl or gloo to compare")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--schedules", nargs="*", default=list(SCHEDULES), choices=list(SCHEDULES))
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--passes", type=int, default=7)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--patience", type=float, default=300, help="seconds to wait, in all, for a quiet machine")
    args = parser.parse_args()
    quiet = Quiet(args.patience)
    rows = [row for name in args.models for row in _run(args, name, quiet)]
    table = _table(rows)
    table.show()
    print(_summary(rows), quiet.summary())
    if args.report:
        named, machine = machine_in_words()
        how = f"--microbatches {args.microbatches} --steps {args.steps} --passes {args.passes} --repetitions {args.repetitions}"
        text = (
            f"# Stages of equal time, and predicted training steps\n\n{machine}; {today()}; "
            f"`python -m benchmarks.pipelines --device {args.device} {how} --report`\n\n{_summary(rows)}\n\n"
            f"Two ranks, one torch thread each on CPUs, over the backend `{args.backend}`. Each repetition cuts the model "
            f"anew, measures its stages, predicts, and then trains {args.steps} steps (the slowest rank's time, without the "
            f"optimizer's step) after two that do not count. Medians, with the lowest and the highest. "
            f"{quiet.summary()}\n\n{table.markdown()}\n"
        )
        path = write_report("pipelines", named, text)
        (REPORTS / f"{path.stem}.json").write_text(json.dumps(rows, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
