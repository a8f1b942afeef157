"""Processes that measure together: each request goes to all of them, and when one fails or is late, all are ended."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol

from benchmarks.tile_worker import PROGRESS, STACK
from benchmarks.workers import Worker, WorkerFailed, without_folders

__all__ = ["Crew", "Ranks"]

START_LIMIT_S = 120.0
NUM_FRAMES = 14


class Ranks(Protocol):
    """Who measures rows."""

    def ask(self, request: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
        """What all ranks answer.

        Raises:
            WorkerFailed: one failed, or was late; all were ended.
        """

    def doing(self) -> str:
        """What rank 0 did last."""

    def stacks(self) -> str:
        """Where ranks were shortly before the limit; empty where none came to it."""

    def close(self) -> None:
        """Ends them. Idempotent."""


class Crew:
    """Workers of ``benchmarks.tile_worker`` (or of another module with the same arguments), started when they are first asked.

    Args:
        num_ranks: how many.
        device_type: ``cuda`` or ``cpu``.
        first: what they are asked before anything else; each time they were started they get another ``store``.
        module: what they run.
    """

    def __init__(
        self, num_ranks: int, device_type: str, first: Mapping[str, Any], module: str = "benchmarks.tile_worker"
    ) -> None:
        self._num_ranks = num_ranks
        self._device_type = device_type
        self._first = dict(first)
        self._module = module
        self._folder = Path(tempfile.mkdtemp(prefix="tiles-"))
        self._workers: list[Worker] = []
        self._num_starts = 0
        self.joined: list[dict[str, Any]] = []

    def ask(self, request: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
        """See `Ranks`."""
        if not self._workers:
            self._start()
        return self._all(request, limit_s)

    def doing(self) -> str:
        """See `Ranks`."""
        path = self._folder / PROGRESS
        return path.read_text() if path.exists() else "starting"

    def stacks(self) -> str:
        """See `Ranks`."""
        found = []
        for path in sorted(self._folder.glob(f"{STACK}*")):
            main = path.read_text().rpartition("Thread ")[2].splitlines()
            found += [f"{path.name}: {without_folders(line.strip())}" for line in main[1:NUM_FRAMES]]
            path.unlink()
        return "\n".join(found)

    def _start(self) -> None:
        self._num_starts += 1
        starts: list[Callable[[], Worker]] = []
        for rank in range(self._num_ranks):
            arguments = (str(rank), str(self._num_ranks), self._device_type, str(self._folder))
            starts.append(lambda arguments=arguments: Worker(self._module, *arguments, start_limit_s=START_LIMIT_S))  # type: ignore[misc]
        with ThreadPoolExecutor(self._num_ranks) as pool:
            futures = [pool.submit(each) for each in starts]
        self._workers = [each.result() for each in futures if each.exception() is None]
        failed = [error for each in futures if (error := each.exception()) is not None]
        if failed:
            self._end()
            raise failed[0]
        self.joined = self._all({**self._first, "store": f"store{self._num_starts}"}, START_LIMIT_S)

    def _all(self, request: Mapping[str, Any], limit_s: float) -> list[dict[str, Any]]:
        def one(worker: Worker) -> dict[str, Any]:
            result = worker.begin(request, limit_s=limit_s)
            worker.finish(limit_s=limit_s)
            return result

        with ThreadPoolExecutor(self._num_ranks) as pool:
            futures = [pool.submit(one, worker) for worker in self._workers]
            _, late = wait(futures, return_when=FIRST_EXCEPTION)
            first = _first_failure(futures)
            if first is not None:
                for worker in self._workers:
                    worker.kill()
        if first is None:
            return [each.result() for each in futures]
        others = [str(error) for each in late if (error := each.exception()) is not None and error is not first]
        self._end()
        if not isinstance(first, WorkerFailed):
            raise first
        raise WorkerFailed("; ".join([str(first), *others[:1]]))

    def _end(self) -> None:
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.kill()
            worker.close(limit_s=1)

    def close(self) -> None:
        """See `Ranks`."""
        workers, self._workers = self._workers, []
        with ThreadPoolExecutor(self._num_ranks) as pool:
            list(pool.map(lambda worker: worker.close(limit_s=20), workers))
        shutil.rmtree(self._folder, ignore_errors=True)


def _first_failure(futures: Sequence[Future[dict[str, Any]]]) -> BaseException | None:
    return next((error for each in futures if each.done() and (error := each.exception()) is not None), None)
