"""A rank of ``benchmarks.tile_ops``: ``python -m benchmarks.tile_worker RANK NUM_RANKS DEVICE FOLDER``, one GPU (or CPU process)
each.

It joins torch.distributed and opens its groups when it is asked to, then measures row by row. ``FOLDER/progress`` says what rank
0 does at the moment, so that whoever has to end a rank that hangs knows what hung.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps import own_replies, serve

ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_RAS_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
TUNING = "tuning"
PROGRESS, STACK = "progress", "stack"


@dataclass
class Rank:
    """What this process is, and has opened.

    Attributes:
        rank, num_ranks: which, of how many.
        device_type: ``cuda`` or ``cpu``.
        folder: of this run; the ranks meet there, and rank 0 says there what it does.
    """

    rank: int
    num_ranks: int
    device_type: str
    folder: Path
    ranks: Any = None

    def note(self, what: str) -> None:
        """Says what begins now."""
        if self.rank == 0:
            (self.folder / PROGRESS).write_text(what)


def join(own: Rank, request: Any) -> dict[str, Any]:
    """Opens everything. Collective."""
    import torch
    import torch.distributed as dist

    from benchmarks.tile_sides import CAPTURED, EAGER, Ranks
    from crossfade.ops.tuning import open_tuner
    from crossfade.peers import open_group

    own.note("joining")
    store = dist.FileStore(str(own.folder / request["store"]), own.num_ranks)  # type: ignore[attr-defined,unused-ignore]
    more: dict[str, Any] = {}
    if own.device_type == "cuda":
        torch.cuda.set_device(own.rank)
        more["device_id"] = torch.device("cuda", own.rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if own.device_type == "cuda" else "gloo", store=store, rank=own.rank, world_size=own.num_ranks,
        timeout=timedelta(seconds=600), **more,
    )  # fmt: skip
    device = torch.device(own.device_type, own.rank) if own.device_type == "cuda" else torch.device("cpu")
    groups, heaps = {}, {}
    for mode in (EAGER, CAPTURED):
        groups[mode] = open_group(
            device=device,
            buffer_bytes=max(request["buffer_bytes"], 4096 * own.num_ranks),
            heap_bytes=request["heap_bytes"],
            is_replayable=True,
        )
        numel = request["heap_bytes"] // 2
        heaps[mode] = groups[mode].empty(numel, dtype=torch.bfloat16) if numel else None
    # It leaves the time of waves on the disk, where the groups' own tuners find it.
    open_tuner(groups[EAGER], is_measuring=True)
    own.ranks = Ranks(own.rank, own.num_ranks, device, groups, heaps)
    return {"machine": machine_in_words() if own.rank == 0 else ""}


def machine_in_words() -> str:
    """Devices and versions, for the report's head."""
    import torch

    from benchmarks.common import this_machine
    from benchmarks.device_copies import _gpus

    words = str(this_machine(("torch", "triton", "cuda-bindings")))
    if not torch.cuda.is_available():
        return words
    found = _gpus()
    return f"{len(found['gpus'])} x {found['gpus'][0]}; {words}; {found['driver']}"


def in_time(measure: Callable[[Rank, Any], dict[str, Any]], own: Rank, request: Any) -> dict[str, Any]:
    """What a measure gives. A rank that is still at it shortly before the limit leaves a note where it is."""
    path = own.folder / f"{STACK}{own.rank}"
    with path.open("w") as file:
        faulthandler.dump_traceback_later(0.9 * request["limit_s"], file=file)
        try:
            found = measure(own, request)
        finally:
            faulthandler.cancel_dump_traceback_later()
    path.unlink()
    return found


def measure_row(own: Rank, request: Any) -> dict[str, Any]:
    """The choice, and the blocks of all sides on this rank."""
    import torch

    from benchmarks import tile_sides, tile_timing
    from benchmarks.tile_rows import BASELINE_WAYS, Row
    from crossfade.ops.choice.candidate import Candidate, candidates_for

    own.note("operands")
    row, left_out = Row(**request["row"]), set(request["left_out"])
    group = own.ranks.groups[tile_sides.EAGER]
    offered = candidates_for(row.shape, group)
    candidates = [Candidate.parse(each) for each in request["candidates"] or []] or offered
    if request["only_baselines"]:
        candidates = [each for each in candidates if each.name in BASELINE_WAYS]
    work = tile_sides.Work.of(row, own.ranks)
    own.note(TUNING)
    has_choice = not (request["only_baselines"] or request["only_candidates"])
    choice = _choice(row, group, offered, is_tuning=has_choice and TUNING not in left_out)
    sides = tile_sides.sides_of(work, own.ranks, candidates, only_baselines=not has_choice)
    for side in sides:
        side.errors |= {mode: "left out: it hung" for mode in tile_sides.MODES if f"{side.name}|{mode}" in left_out}
    plan = tile_timing.Plan(
        tuple(request["modes"]), *(request[key] for key in ("num_rounds", "num_batches", "num_calls", "seed"))
    )
    tile_timing.measure(work, own.ranks, sides, plan, own.note)
    own.note("the end of a row")
    found = {side.name: side.to_data() for side in sides}
    del work, sides
    num_sms = 0
    if own.device_type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        num_sms = torch.cuda.get_device_properties(own.rank).multi_processor_count
    return {"sides": found, "choice": choice, "num_sms": num_sms}


def _choice(row: Any, group: Any, offered: Sequence[Any], *, is_tuning: bool) -> dict[str, Any]:
    """What the model predicts and would choose, and what measuring chose. Collective where it tunes."""
    from benchmarks.tile_sides import CAPTURED, EAGER
    from crossfade.ops.choice.choose import Chooser
    from crossfade.ops.choice.model import Model
    from crossfade.ops.choice.ranks import Alone
    from crossfade.ops.tuning import tuner_of

    tuner = tuner_of(group)
    model: Any = tuner.predict.__self__  # type: ignore[attr-defined]
    models = {EAGER: model, CAPTURED: Model(model.figures.captured())}
    predicted: dict[str, dict[str, float]] = {}
    for candidate in offered:
        times = {mode: each.predict(row.shape, candidate) for mode, each in models.items()}
        predicted[str(candidate)] = {mode: each.total_us for mode, each in times.items() if each is not None}
    untuned = Chooser(tuner.predict, lambda _: offered, Alone()).choose(row.shape)
    found: dict[str, Any] = {
        "predicted_us": predicted,
        "untuned": str(untuned),
        "chosen": str(untuned),
        "is_tuned": False,
    }
    if is_tuning:
        decision = tuner.tune(row.shape)
        found |= {"chosen": str(tuner.choose(row.shape)), "is_tuned": True, "notes": list(decision.notes)}
        found["tuned_us"] = {str(candidate): time_us for candidate, time_us in decision.times_us}
    return found


def measure_mlp(own: Rank, request: Any) -> dict[str, Any]:
    """A block of ``benchmarks.tile_mlp``."""
    from benchmarks.tile_mlp_sides import measure

    return measure(own, request)


MEASURES: dict[str, Callable[[Any, Any], dict[str, Any]]] = {
    "join": join,
    "row": partial(in_time, measure_row),
    "mlp": partial(in_time, measure_mlp),
}


def main() -> None:
    """Answers until stdin ends. Ranks that end by themselves say goodbye to each other."""
    replies = own_replies()
    own = Rank(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
    os.environ.update(ENVIRONMENT, CROSSFADE_CACHE_DIR=str(own.folder / "cache"))
    serve(own, MEASURES, replies)
    if own.ranks is not None:
        import torch.distributed as dist

        try:
            for group in own.ranks.groups.values():
                group.close()
            dist.destroy_process_group()
        except Exception:
            traceback.print_exc()


if __name__ == "__main__":
    main()
