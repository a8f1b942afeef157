"""Cases that every rank of a torch.distributed group runs, in processes that they share: on CPU tensors, or with a GPU each."""

from __future__ import annotations

import itertools
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist

from tests.helpers.device_pair import Workers, context

Case: TypeAlias = Callable[[str], None]
"""A function of the kind of device."""
GRACE_S, LEAVE_S = 5.0, 30.0


def needs(*modules: str) -> Callable[[Case], Case]:
    """A case that takes packages which may not be installed."""

    def decorate(case: Case) -> Case:
        case.needs = modules  # type: ignore[attr-defined]
        return case

    return decorate


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
    asked: Connection,
) -> None:
    """Runs the cases that it is asked for, and answers each; leaves its group when nothing more is asked."""
    os.environ["CROSSFADE_CACHE_DIR"] = folder
    if interprets:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        from tests.helpers.mended_interpreter import mend_the_interpreter

        mend_the_interpreter()
    join = join_world if device == "cpu" else join_gpus
    join(rank, num_ranks, f"{folder}/store")
    while (name := asked.recv()) is not None:
        try:
            cases[name](device)
            asked.send("ok")
        except (Exception, pytest.fail.Exception):
            asked.send(traceback.format_exc())
    dist.destroy_process_group()


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


class Team:
    """The ranks of a group, in processes that are kept from case to case. After a failure new ones take their place.

    Args:
        cases: what they may be asked for.
        new_folder: gives an empty folder for each group.
        interprets: Triton's kernels are interpreted.
    """

    def __init__(
        self,
        cases: Mapping[str, Case],
        num_ranks: int,
        device: str,
        new_folder: Callable[[], Path],
        *,
        interprets: bool = False,
    ) -> None:
        self._cases = cases
        self._num_ranks = num_ranks
        self._device = device
        self._new_folder = new_folder
        self._interprets = interprets
        self._workers: Workers | None = None
        self._ends: list[Connection] = []

    def run(self, name: str, limit_s: float) -> list[str]:
        """What every rank says of a case. When one has failed, the others have little time left."""
        if self._workers is None:
            self._start()
        deadline = time.monotonic() + limit_s
        for end in self._ends:
            with suppress(OSError):
                end.send(name)
        answers = ["did not answer in time"] * self._num_ranks
        left = dict(enumerate(self._ends))
        while left and (ready := wait(list(left.values()), max(deadline - time.monotonic(), 0))):
            for rank in [rank for rank, end in left.items() if end in ready]:
                answers[rank] = self._answer(rank)
                del left[rank]
                if answers[rank] != "ok":
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        if any(answer != "ok" for answer in answers):
            assert self._workers is not None
            stacks = self._workers.stacks() if left else ""
            answers = [f"{answer}\n{stacks}" if rank in left else answer for rank, answer in enumerate(answers)]
            self._end(0)
        return answers

    def leave(self) -> None:
        """The ranks leave their group, and end."""
        if self._workers is None:
            return
        for end in self._ends:
            end.send(None)
        try:
            for rank, result in enumerate(self._workers.results):
                assert result.poll(LEAVE_S), f"rank {rank} did not end:\n{self._workers.stacks()}"
                assert result.recv()[0] == "ok", f"rank {rank} failed at its end"
        except BaseException:
            self._end(5)
            raise
        codes = self._end(LEAVE_S)
        assert not any(codes), f"the ranks' processes ended with {codes}"

    def _start(self) -> None:
        pipes = [context().Pipe() for _ in range(self._num_ranks)]
        folder = str(self._new_folder())
        args = [
            (rank, self._num_ranks, self._device, folder, self._cases, self._interprets, theirs)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        self._workers = Workers([_work] * self._num_ranks, args)
        self._ends = [mine for mine, _ in pipes]
        for _, theirs in pipes:
            theirs.close()

    def _answer(self, rank: int) -> str:
        try:
            return str(self._ends[rank].recv())
        except EOFError:  # it has ended: why, is in its result
            assert self._workers is not None
            result = self._workers.results[rank]
            try:
                return str(result.recv()[1]) if result.poll(GRACE_S) else "ended"
            except EOFError:
                return "died"

    def _end(self, grace_s: float) -> list[int | None]:
        assert self._workers is not None
        codes = self._workers.end(grace_s)
        self._workers = None
        return codes


def run_cases(
    cases: Mapping[str, Case], num_ranks: int, device: str, folder: Path, limit_s: float
) -> dict[str, list[str]]:
    """What every rank says of each case, one after the other, in processes that they share; and they end as they should."""
    numbers = itertools.count()

    def new_folder() -> Path:
        made = folder / str(next(numbers))
        made.mkdir()
        return made

    team = Team(cases, num_ranks, device, new_folder)
    said = {name: team.run(name, limit_s) for name in cases}
    team.leave()
    return said


def missing(case: Case) -> str:
    """A package that a case `needs` and that is not installed, if there is one."""
    return next((module for module in getattr(case, "needs", ()) if find_spec(module) is None), "")


def suite(
    cases: Mapping[str, Case], num_ranks: int, device: str = "cpu", *, limit_s: float, interprets: bool = False
) -> type:
    """A class of tests, one for each case; the processes are shared by all of them. ``limit_s``: of each case. A case that `needs`
    packages is skipped where they are missing.
    """

    class TestRanks:
        @pytest.fixture(scope="class")
        @classmethod
        def team(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Team]:
            made = Team(cases, num_ranks, device, partial(tmp_path_factory.mktemp, "ranks"), interprets=interprets)
            yield made
            made.leave()

        @pytest.mark.timeout(limit_s + 20)
        @pytest.mark.parametrize("name", cases)
        def test_every_rank(self, team: Team, name: str) -> None:
            if module := missing(cases[name]):
                pytest.skip(f"pip install {module}")
            for rank, answer in enumerate(team.run(name, limit_s)):
                assert answer == "ok", f"rank {rank}: {answer}"

    return TestRanks
