"""Cases that every rank of a torch.distributed group runs, in processes that they share: on CPU tensors, or with a GPU each."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from tests.helpers.device_pair import run_workers

Case: TypeAlias = Callable[[str], None]
"""A function of the kind of device."""


def join_world(rank: int, num_ranks: int, store: str) -> None:
    """Joins a gloo group that listens on loopback only."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    meeting = dist.FileStore(store, num_ranks)  # type: ignore[attr-defined,unused-ignore]
    dist.init_process_group("gloo", store=meeting, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=30))


def join_gpus(rank: int, num_ranks: int, store: str) -> None:
    """Where there are fewer GPUs than ranks, some share one: then gloo stands for NCCL, which refuses that."""
    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", rank % num_gpus)
    torch.cuda.set_device(device)
    options: dict[str, Any] = {"backend": "nccl", "device_id": device}
    if num_ranks > num_gpus:
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"  # before symmetric memory is first used
        options = {"backend": "cpu:gloo,cuda:gloo"}
    dist.init_process_group(init_method=f"file://{store}", rank=rank, world_size=num_ranks, **options)


@contextmanager
def one_rank(folder: Path) -> Iterator[None]:
    """A group of this process alone, whose operators keep their choices in the folder."""
    num_threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        patch.setenv("CROSSFADE_CACHE_DIR", str(folder))
        join_world(0, 1, str(folder / "store"))
        yield
        dist.destroy_process_group()
        torch.set_num_threads(num_threads)


def _work(
    peers: dict[int, Any],
    rank: int,
    num_ranks: int,
    device: str,
    folder: str,
    cases: Mapping[str, Case],
    interprets: bool,
) -> dict[str, str]:
    """What each case said, as far as they went: after a failure the ranks are out of step."""
    os.environ["CROSSFADE_CACHE_DIR"] = folder
    if interprets:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        from tests.helpers.mended_interpreter import mend_the_interpreter

        mend_the_interpreter()
    join = join_world if device == "cpu" else join_gpus
    join(rank, num_ranks, f"{folder}/store")
    return try_cases(cases, device)


def try_cases(cases: Mapping[str, Case], device: str) -> dict[str, str]:
    """What each case says, up to the first that fails; the process leaves its group then."""
    said: dict[str, str] = {}
    name = ""
    try:
        for name, case in cases.items():
            case(device)
            said[name] = "ok"
    except Exception:
        said[name] = traceback.format_exc()
    finally:
        dist.destroy_process_group()
    return said


def run_cases(
    cases: Mapping[str, Case], num_ranks: int, device: str, folder: Path, limit_s: float, *, interprets: bool = False
) -> dict[str, list[str]]:
    """What every rank said of each case. ``interprets``: Triton's kernels are interpreted there."""
    args = [(rank, num_ranks, device, str(folder), cases, interprets) for rank in range(num_ranks)]
    results = run_workers([_work] * num_ranks, args, timeout_s=limit_s)
    return {name: [result.get(name, "did not come to it") for result in results] for name in cases}


def suite(
    cases: Mapping[str, Case], num_ranks: int, device: str = "cpu", *, limit_s: float, interprets: bool = False
) -> type:
    """A class of tests, one for each case; the processes are shared by all of them."""

    class TestRanks:
        @pytest.fixture(scope="class")
        @classmethod
        def said(cls, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
            folder = tmp_path_factory.mktemp("ranks")
            return run_cases(cases, num_ranks, device, folder, limit_s, interprets=interprets)

        @pytest.mark.timeout(limit_s + 20)
        @pytest.mark.parametrize("name", cases)
        def test_every_rank(self, said: dict[str, list[str]], name: str) -> None:
            for rank, answer in enumerate(said[name]):
                assert answer == "ok", f"rank {rank}: {answer}"

    return TestRanks
