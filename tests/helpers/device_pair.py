"""Processes for tests and benchmarks of `crossfade.device`: each has a GPU, all are linked to each other."""

from __future__ import annotations

import faulthandler
import mmap
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from crossfade.device.records import Record, pack, unpack
from crossfade.host.memory import Memory, address_of
from crossfade.host.semaphore import init_semaphore, open_semaphore
from tests.helpers.gpus import num_gpus
from tests.helpers.warm import TORCH_AND_COMPILERS

LIMIT_S = 30.0


PRELOADED = ("peer_cases", "ops_cases", "host_copy_cases", "collective_cases", "chain_kills", "frozen")
"""Modules of this folder that workers take their functions from, and what these need of crossfade; the last one is last."""

NUM_CELLS, CELL_BYTES, SPIN_S = 256, 128, 0.0005


class Mailbox:
    """Records one way, through shared memory: cells in turn, a semaphore that counts those with something in them.

    (Nobody overwrites a cell that was not read: at most a few tens of records are ever under way.)
    """

    def __init__(self, mapping: mmap.mmap, offset: int, *, is_new: bool) -> None:
        self._mapping = mapping
        self._cells = offset + 64
        self._next = 0
        address = address_of(mapping, offset)
        if is_new:
            init_semaphore(address, 0)
        self._semaphore = open_semaphore(address)
        self._taken = False

    def put(self, data: bytes) -> None:
        at = self._cells + self._next % NUM_CELLS * CELL_BYTES
        self._next += 1
        self._mapping[at : at + 1 + len(data)] = bytes((len(data),)) + data
        self._semaphore.release()

    def poll(self, timeout_s: float) -> bool:
        end = time.monotonic() + min(timeout_s, SPIN_S)
        while not self._taken:
            self._taken = self._semaphore.acquire(False)
            if time.monotonic() >= end:
                break
        if not self._taken and timeout_s > SPIN_S:
            self._taken = self._semaphore.acquire(True, timeout_s)
        return self._taken

    def take(self, timeout_s: float) -> bytes:
        if not self.poll(timeout_s):
            raise TimeoutError(f"no record in {timeout_s} s")
        self._taken = False
        at = self._cells + self._next % NUM_CELLS * CELL_BYTES
        self._next += 1
        return self._mapping[at + 1 : at + 1 + self._mapping[at]]

    @staticmethod
    def size_bytes() -> int:
        return 64 + NUM_CELLS * CELL_BYTES


class Peer:
    """What a worker has of one other worker: records in order, and Python objects beside them."""

    def __init__(self, name: str, pid: int, objects: Connection, *, is_first: bool) -> None:
        self.name = name
        self.pid = pid
        self._objects = objects
        length = Mailbox.size_bytes()
        memory = self.share(2 * length) if is_first else self.shared()
        mapping = memory.map(2 * length)
        memory.close()
        boxes = [Mailbox(mapping, half * length, is_new=is_first) for half in range(2)]
        self.meet()
        self._out, self._in = boxes if is_first else boxes[::-1]

    def tell(self, record: Record) -> None:
        self._out.put(pack(record))

    def has_record(self, timeout_s: float = 0.0) -> bool:
        return self._in.poll(timeout_s)

    def take(self, timeout_s: float = LIMIT_S) -> Record:
        return unpack(self._in.take(timeout_s))

    def drain(self, on_record: Callable[[Record], None]) -> None:
        while self._in.poll(0):
            on_record(unpack(self._in.take(0)))

    def put(self, value: Any) -> None:
        self._objects.send(value)

    def get(self, timeout_s: float = LIMIT_S) -> Any:
        if not self._objects.poll(timeout_s):
            raise TimeoutError(f"nothing of {self.name} in {timeout_s} s")
        return self._objects.recv()

    def has_object(self, timeout_s: float = 0.0) -> bool:
        return self._objects.poll(timeout_s)

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
    own: int,
    links: dict[int, Connection],
    result: Connection,
    args: tuple[Any, ...],
    stacks: str,
) -> None:
    faulthandler.register(signal.SIGUSR1, open(stacks, "w"))  # noqa: SIM115 - as long as the process
    try:
        peers = {}
        for objects in links.values():
            objects.send(os.getpid())
        for other, objects in sorted(links.items()):
            peers[other] = Peer(f"worker {other}", objects.recv(), objects, is_first=own < other)
        result.send(("ok", function(peers, *args)))
    except BaseException:
        result.send(("failed", traceback.format_exc()))
    finally:
        result.close()


@cache
def context() -> ForkServerContext | SpawnContext:
    """Where there is no GPU, workers are forked off a process that has imported what they need: with torch it takes seconds."""
    if num_gpus():
        return multiprocessing.get_context("spawn")  # CUDA is not to be forked
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["numpy", *TORCH_AND_COMPILERS, *(f"{__package__}.{name}" for name in PRELOADED)])
    return made


class Workers:
    """Processes, linked to each other, that run a function each as ``function(peers, *args)``; it has to be importable.

    Attributes:
        results: where each one's result comes, with ``"ok"`` or ``"failed"`` in front.
    """

    def __init__(self, functions: Sequence[Callable[..., Any]], args: Sequence[tuple[Any, ...]]) -> None:
        num = len(functions)
        links: list[dict[int, Connection]] = [{} for _ in range(num)]
        for i in range(num):
            for j in range(i):
                links[i][j], links[j][i] = context().Pipe()
        self.results: list[Connection] = []
        self._processes: list[BaseProcess] = []
        self._folder = tempfile.TemporaryDirectory(prefix="workers-")
        for i, function in enumerate(functions):
            mine, theirs = context().Pipe(duplex=False)
            stacks = os.path.join(self._folder.name, str(i))
            process = context().Process(target=_work, args=(function, i, links[i], theirs, args[i], stacks))
            process.start()
            theirs.close()
            self._processes.append(process)
            self.results.append(mine)
        for row in links:
            for end in row.values():
                end.close()

    def stacks(self) -> str:
        """Where each worker that has begun stands."""
        said = []
        for number, process in enumerate(self._processes):
            path = Path(self._folder.name) / str(number)
            if process.pid is None or not process.is_alive() or not path.exists():
                said.append(f"worker {number} has not begun, or has ended")
                continue
            with suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGUSR1)
            process.join(1)  # which it does not: time to write
            said.append(f"worker {number}: {path.read_text()}")
        return "\n".join(said)

    def end(self, grace_s: float = 5) -> list[int | None]:
        """Kills those that have not ended by themselves after the grace. Their exit codes."""
        for process in self._processes:
            if process.is_alive():
                process.join(grace_s)
            if process.is_alive():
                process.kill()
            process.join(10)
        self._folder.cleanup()
        return [process.exitcode for process in self._processes]


def run_workers(
    functions: Sequence[Callable[..., Any]],
    args: Sequence[tuple[Any, ...]],
    *,
    timeout_s: float = 60.0,
    dying: frozenset[int] | set[int] = frozenset(),
) -> list[Any]:
    """Runs each function in a process of its own (see `Workers`), and returns what they return. After ``timeout_s`` all are killed,
    and this raises. ``dying`` workers are expected to be killed, and return None.
    """
    workers = Workers(functions, args)
    try:
        return _collect(workers.results, time.monotonic() + timeout_s, dying)
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{workers.stacks()}") from None
    finally:
        workers.end()


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


def die_after(seed: int) -> None:
    """Kills this process at some moment of the next 0.05 s, whatever its main thread does then."""
    timer = threading.Timer(random.Random(seed).uniform(0, 0.05), die)
    timer.daemon = True
    timer.start()
