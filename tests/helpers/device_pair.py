"""Processes for tests and benchmarks of `crossfade.device`: each has a GPU, all are linked to each other."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from crossfade.device.records import Record, pack, unpack
from crossfade.host.memory import Memory

LIMIT_S = 30.0


class Peer:
    """What a worker has of one other worker: records in order, and Python objects beside them."""

    def __init__(self, name: str, pid: int, records: Connection, objects: Connection) -> None:
        self.name = name
        self.pid = pid
        self._records = records
        self._objects = objects

    def tell(self, record: Record) -> None:
        self._records.send_bytes(pack(record))

    def has_record(self, timeout_s: float = 0.0) -> bool:
        return self._records.poll(timeout_s)

    def take(self, timeout_s: float = LIMIT_S) -> Record:
        if not self._records.poll(timeout_s):
            raise TimeoutError(f"no record of {self.name} in {timeout_s} s")
        return unpack(self._records.recv_bytes())

    def drain(self, on_record: Callable[[Record], None]) -> None:
        while self._records.poll(0):
            on_record(unpack(self._records.recv_bytes()))

    def put(self, value: Any) -> None:
        self._objects.send(value)

    def get(self, timeout_s: float = LIMIT_S) -> Any:
        if not self._objects.poll(timeout_s):
            raise TimeoutError(f"nothing of {self.name} in {timeout_s} s")
        return self._objects.recv()

    def meet(self) -> None:
        """Both go on when both are here."""
        self.put("here")
        self.get()

    def share(self, size_bytes: int) -> Memory:
        """New shared memory; the other side calls `shared`."""
        memory = Memory.create("test", size_bytes)
        self.put((os.getpid(), memory.fd))
        self.get()
        return memory

    def shared(self) -> Memory:
        pid, fd = self.get()
        memory = Memory(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        self.put("opened")
        return memory


def _work(
    function: Callable[..., Any],
    links: dict[int, tuple[Connection, Connection]],
    result: Connection,
    args: tuple[Any, ...],
) -> None:
    try:
        peers = {}
        for other, (_, objects) in links.items():
            objects.send(os.getpid())
        for other, (records, objects) in links.items():
            peers[other] = Peer(f"worker {other}", objects.recv(), records, objects)
        result.send(("ok", function(peers, *args)))
    except BaseException:
        result.send(("failed", traceback.format_exc()))
    finally:
        result.close()


def run_workers(
    functions: Sequence[Callable[..., Any]],
    args: Sequence[tuple[Any, ...]],
    *,
    timeout_s: float = 60.0,
    dying: frozenset[int] | set[int] = frozenset(),
) -> list[Any]:
    """Runs each function in a process of its own, as ``function(peers, *args)``, and returns what they return.

    Args:
        functions: importable functions, one for each worker.
        args: of each worker.
        timeout_s: afterwards all are killed, and this raises.
        dying: workers that are expected to be killed; they return None.
    """
    context = multiprocessing.get_context("spawn")
    num = len(functions)
    links: list[dict[int, tuple[Connection, Connection]]] = [{} for _ in range(num)]
    for i in range(num):
        for j in range(i):
            records, objects = context.Pipe(), context.Pipe()
            links[i][j] = (records[0], objects[0])
            links[j][i] = (records[1], objects[1])
    workers, results = [], []
    for i, function in enumerate(functions):
        mine, theirs = context.Pipe(duplex=False)
        worker = context.Process(target=_work, args=(function, links[i], theirs, args[i]))
        worker.start()
        theirs.close()
        workers.append(worker)
        results.append(mine)
    for row in links:
        for pair in row.values():
            for end in pair:
                end.close()
    try:
        return _collect(results, time.monotonic() + timeout_s, dying)
    finally:
        for worker in workers:
            if worker.is_alive():
                worker.join(5)
            if worker.is_alive():
                worker.kill()
            worker.join(10)


def _collect(results: list[Connection], deadline: float, dying: frozenset[int] | set[int]) -> list[Any]:
    values: list[Any] = [None] * len(results)
    left = dict(enumerate(results))
    while left:
        ready = wait(list(left.values()), max(deadline - time.monotonic(), 0))
        if not ready:
            raise TimeoutError(f"workers {sorted(left)} have not finished in time")
        for i in [i for i, result in left.items() if result in ready]:
            try:
                kind, value = left.pop(i).recv()
            except EOFError:
                kind, value = ("ok", None) if i in dying else ("failed", "it died")
            if kind == "failed":
                raise RuntimeError(f"worker {i}: {value}")
            values[i] = value
    return values


def die() -> None:
    """Ends this process as a crash would."""
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGKILL)
