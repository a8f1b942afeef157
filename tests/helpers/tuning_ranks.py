"""What each of two ranks does in the tests of a tuner that decides for several, and what it tells of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from crossfade.errors import ChannelBroken, ChannelTimeout, DeviceError
from crossfade.ops.calls.job import Given, Operator, Shape
from crossfade.ops.choice.cache import Cache
from crossfade.ops.choice.candidate import Candidate
from crossfade.ops.choice.choose import choose
from crossfade.ops.choice.model import Prediction
from crossfade.ops.choice.ranks import GroupRanks
from crossfade.ops.choice.tune import Tuner
from crossfade.ops.tuning import open_tuner, tuner_of
from crossfade.peers.opening import open_group
from tests.helpers.device_pair import run_workers
from tests.helpers.ops_inputs import Inputs, call
from tests.helpers.ranks import join_world
from tests.helpers.tuning import SHAPE, Bench, rows, ways

PREDICTED = {"rounds(rounds=1)": 80.0, "rounds(rounds=2)": 90.0, "plain": 100.0}


def _ranks(timeout_s: float = 20.0) -> GroupRanks:
    group = dist.group.WORLD
    assert group is not None
    return GroupRanks(group, torch.device("cpu"), timeout_s)


def _told(tuner: Tuner) -> Any:
    decision = tuner.tune(SHAPE)
    times_us = {str(each): time_us for each, time_us in decision.times_us}
    return [str(each) for each in decision.order], times_us, decision.notes, str(tuner.choose(rows(7000)))


def _models_that_differ(rank: int, folder: Path) -> Any:
    predicted: Mapping[str, float] = PREDICTED if rank == 0 else {"plain": 1.0, "rounds(rounds=1)": 80.0}
    tuner = Bench({}, predicted).tuner(_ranks())
    return str(tuner.choose(SHAPE))


def _the_slowest_counts(rank: int, folder: Path) -> Any:
    mine: tuple[dict[str, Any], ...] = (
        {"rounds(rounds=1)": 10.0, "rounds(rounds=2)": [30.0, 40.0, 50.0]},
        {"rounds(rounds=1)": 90.0, "rounds(rounds=2)": 40},
    )
    bench = Bench({**mine[rank], "plain": 60.0}, PREDICTED)
    return _told(bench.tuner(_ranks(), num_repeats=3))


def _one_fails(rank: int, folder: Path) -> Any:
    mine: tuple[dict[str, Any], ...] = (
        {"rounds(rounds=1)": 1.0, "rounds(rounds=2)": ValueError("no")},
        {"rounds(rounds=2)": 1.0},
    )
    bench = Bench({**mine[rank], "plain": 60.0}, PREDICTED)
    return _told(bench.tuner(_ranks())), "rounds(rounds=1)" in bench.log


def _kept(rank: int, folder: Path) -> Any:
    """Only rank 0 has the folder with the files: the other one hears what is in them."""
    cache = Cache("device", 2, "v1", folder / f"rank{rank}")
    first = _told(Bench({"plain": 60.0, "rounds(rounds=2)": 20.0 + rank}, PREDICTED).tuner(_ranks(), cache))
    later = Bench({}, PREDICTED)
    second = _told(later.tuner(_ranks(), Cache("device", 2, "v1", folder / f"rank{rank}")))
    return first[:2], second[:2], later.log, (folder / f"rank{rank}").exists()


def _asked_in_another_order(rank: int, folder: Path) -> Any:
    bench = Bench({}, PREDICTED, needs={"rounds(rounds=1)": 4096})
    tuner = bench.tuner(_ranks())
    found = {m: str(tuner.choose(rows(m))) for m in ([512, 8192, 64] if rank == 0 else [64, 8192, 512])}
    return sorted(found.items())


def _other_shapes(rank: int, folder: Path) -> Any:
    tuner = Bench({}, PREDICTED).tuner(_ranks(timeout_s=0.3))
    if rank == 0:
        return str(tuner.choose(rows(512)))
    try:
        tuner.choose(rows(1024))
    except ChannelTimeout as error:
        return str(error)
    return "no error"


def _no_model(shape: Shape, candidate: Candidate) -> Prediction | None:
    raise ZeroDivisionError("a wave of no tiles")


def _rank_0_raises(rank: int, folder: Path) -> Any:
    bench = Bench({}, PREDICTED)
    tuner = bench.tuner(_ranks())
    if rank == 0:
        tuner.chooser.predict = _no_model
    try:
        tuner.choose(SHAPE)
    except (DeviceError, ZeroDivisionError) as error:
        return repr(error)
    return "no error"


def _a_group_of_its_own(rank: int, folder: Path) -> Any:
    groups = [dist.new_group([each]) for each in range(2)]
    own = GroupRanks(groups[rank], torch.device("cpu"))
    predicted = {"plain": 1.0} if rank else {"rounds(rounds=1)": 1.0}
    times_us = {"plain": 3.0, "rounds(rounds=1)": 5.0}
    return own.num_ranks, own.gather([rank]), _told(Bench(times_us, predicted).tuner(own))[0]


class Products:
    """An operator: a product and torch's all-reduce, whole or in two parts."""

    def __init__(self, device: str = "cpu") -> None:
        self._device = device
        self.num_runs: dict[str, int] = {}

    def candidates(self, shape: Shape) -> list[Candidate]:
        return ways("rounds(rounds=2)", "plain", "fused")

    def runner(self, shape: Shape, candidate: Candidate) -> Callable[[], object]:
        if candidate.name == "fused":
            raise ValueError("no copy engines here")
        with torch.device(self._device):
            kind = getattr(torch, shape.dtype)
            a, b = torch.ones(shape.m, shape.k, dtype=kind), torch.ones(shape.k, shape.n, dtype=kind)
            out = torch.empty(shape.m, shape.n, dtype=kind)

        def run() -> None:
            self.num_runs[str(candidate)] = self.num_runs.get(str(candidate), 0) + 1
            for part, into in zip(a.chunk(2), out.chunk(2), strict=True) if candidate.parameters else [(a, out)]:
                torch.mm(part, b, out=into)
                dist.all_reduce(into)

        return run


def _real_products(rank: int, folder: Path) -> Any:
    group, operator = open_group(device="cpu", buffer_bytes=4096), Products()
    cache = Cache("CPU", 2, "v1", folder / f"products{rank}")
    try:
        tuner = open_tuner(group, {"matmul_all_reduce": operator}, cache=cache)
        shape = Shape("matmul_all_reduce", 64, 32, 16, "float32", "nn", 2)
        untuned = str(tuner.choose(shape))
        decision = tuner.tune(shape)
        names = {str(each) for each, time_us in decision.times_us if time_us > 0}
        return (
            untuned,
            decision.order,
            decision.times_us,
            names,
            operator.num_runs,
            decision.notes[0][-20:],
            str(cache.load(shape)),
        )
    finally:
        group.close()


def _operators(rank: int, folder: Path) -> Any:
    """All operators follow the model, then what was measured; and so they do on another group, by what rank 0 has on its disk."""
    told: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSFADE_CACHE_DIR", str(folder / f"choices{rank}"))
        group, other = (open_group(device="cpu", buffer_bytes=1 << 16) for _ in range(2))
        for operator in Operator:
            shape = Shape(operator, 64, 32, 16, "float32", "nt", 2)
            given = Given(torch.ones(shape.rows_of_a, 16), torch.ones(32, 16).t(), None)
            tuner = tuner_of(group)
            untuned = choose(operator, group, given, 64)
            decision = tuner.tune(shape)
            tuned = [choose(operator, each, given, 64) for each in (group, other)]
            assert tuned == [decision.order[0]] * 2
            assert call(operator, group, Inputs([given.a] * 2, [given.b] * 2, None), None).unique().tolist() in (
                [16],
                [32],
            )
            names = {str(each) for each, _ in decision.times_us}
            told[str(operator)] = str(untuned), [str(each) for each in decision.order], names, decision.notes
        for each in (group, other):
            each.close()
    return told


def _rank_0_is_dead(rank: int, folder: Path) -> Any:
    """Who waits for its word hears of it."""

    def check() -> None:
        raise ChannelBroken("rank 0 died")

    group = dist.group.WORLD
    assert group is not None
    ranks = GroupRanks(group, torch.device("cpu"), name="of its own", check=check)
    if rank:
        with pytest.raises(ChannelBroken, match="rank 0 died"):
            ranks.tell("nothing", str)
    return "heard"


CASES = {
    "products": _real_products,
    "operators": _operators,
    "dead": _rank_0_is_dead,
    "models": _models_that_differ,
    "slowest": _the_slowest_counts,
    "fails": _one_fails,
    "kept": _kept,
    "order": _asked_in_another_order,
    "shapes": _other_shapes,
    "raises": _rank_0_raises,
    "group": _a_group_of_its_own,
}


def _work(peers: dict[int, Any], rank: int, folder: str) -> dict[str, Any]:
    join_world(rank, 2, f"{folder}/store")
    try:
        return {name: case(rank, Path(folder)) for name, case in CASES.items()}
    finally:
        dist.destroy_process_group()


def run_two(folder: Path) -> list[dict[str, Any]]:
    """Runs all cases, in a process for each rank; what each tells of each."""
    return run_workers([_work] * 2, [(rank, str(folder)) for rank in range(2)], timeout_s=60.0)
