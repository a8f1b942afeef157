"""Two ranks recorded: a file for each, collectives of NCCL with their events known, and the doctor's answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

import crossfade
from crossfade.profile.doctor.diagnosis import diagnose
from crossfade.profile.traces.events import ActivityKind
from crossfade.profile.traces.exact import ExactEvents, match
from crossfade.profile.traces.launches import host_order
from crossfade.profile.traces.reader import read_traces
from crossfade.profile.traces.waits import waits_of
from tests.helpers.device_pair import run_workers
from tests.helpers.ranks import join_gpus

_STEPS = 4


def work(peers: dict[int, Any], rank: int, folder: str) -> str:
    """Two sums are under way at once; the second one is waited for first."""
    join_gpus(rank, 2, f"{folder}/store")
    weight = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
    sums = [torch.randn(1 << 22, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    groups = [dist.new_group() for _ in range(2)]

    def step() -> None:
        y = weight
        works = [dist.all_reduce(x, group=group, async_op=True) for x, group in zip(sums, groups, strict=True)]
        for done in reversed(works):
            for _ in range(4):
                y = y @ weight
            done.wait()
            y = y * 1e-3 + sums[0][0]

    step()
    torch.cuda.synchronize()
    with crossfade.record(f"{folder}/traces") as recording:
        for _ in range(_STEPS):
            step()
            recording.step()
    dist.destroy_process_group()
    return str(recording.path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = str(tmp_path_factory.mktemp("record"))
    return [Path(path) for path in run_workers([work, work], [(0, folder), (1, folder)], timeout_s=120)]


def test_a_file_for_each_rank(paths: list[Path]) -> None:
    assert [path.name for path in paths] == ["rank0.json.gz", "rank1.json.gz"]
    assert [(trace.rank, trace.world_size) for trace in read_traces(paths)] == [(0, 2), (1, 2)]


def test_every_entry_has_its_call(paths: list[Path]) -> None:
    for trace in read_traces(paths):
        assert trace.record is not None
        assert len(match(trace)) >= 0.95 * len(trace.record.entries)


def test_the_sum_that_is_waited_for_is_known(paths: list[Path]) -> None:
    for trace in read_traces(paths):
        order = host_order(trace)
        assert ExactEvents(trace, order).edges
        found = waits_of(trace, order)
        sums = [a for a in trace.activities if a.kind is ActivityKind.COMMUNICATION]
        waited = sorted((found.waited_at[one].start_us, one.lane) for one in sums if one in found.waited_at)
        assert len(waited) >= 2 * (_STEPS - 1)
        lanes = [lane for _, lane in waited]
        assert len(set(lanes)) == 2
        assert lanes[::2] == [lanes[0]] * len(lanes[::2]), "of each step the second sum comes first"


def test_the_doctor_replays_it(paths: list[Path]) -> None:
    report = diagnose(read_traces(paths))
    assert report.traced.program.num_steps == _STEPS
    assert report.error < 0.03
