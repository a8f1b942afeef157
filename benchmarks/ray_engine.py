"""How long a hop takes on the Ray engine, beside the local engine or a bare TCP connection, and on Ray Compiled Graph, in one run.

``python -m benchmarks.ray_engine`` measures on one host: actors and driver at niceness 0, pinned to cores alike after their start.
``python -m tests.helpers.ray_two_hosts benchmarks.ray_engine`` measures between two network namespaces, beside a bare TCP
connection in Python. Both print a Markdown table, the median of the rounds' medians with the lowest and the highest. With PINNED=0
in the environment nothing is pinned. Compiled Graph comes last: each of its graphs leaves a thread in the driver that goes on
looking for work (``worker.channel_``, Ray 2.60), on the core that the next hop would be measured on.
"""

from __future__ import annotations

import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

import crossfade
from benchmarks.quiet import Quiet

if TYPE_CHECKING:
    from tests.helpers.ray_two_hosts import Hosts

ROUNDS = int(os.environ.get("ROUNDS", "10"))
NUM_CALLS, NUM_WARM = 400, 50
NUM_TURNS = 8
NUM_LARGE = 6
IS_PINNED = os.environ.get("PINNED", "1") == "1"
LARGE_BYTES = 64_000_000
ECHO_PORT = 29533

Figures = dict[str, dict[str, list[float]]]
"""Rounds' medians, by row and column."""


class Worker:
    """An actor of each library."""

    def same(self, value: Any) -> Any:
        return value

    def first(self, value: Any) -> int:
        return int(value[0])

    def pin(self, core: int) -> None:
        pin(core)


def pin(core: int | None) -> None:
    """Binds all threads of this process to a core, or to none."""
    if not IS_PINNED:
        return
    cores = range(os.cpu_count() or 1) if core is None else [core]
    for thread in os.listdir("/proc/self/task"):
        with suppress(ProcessLookupError):  # it has just ended
            os.sched_setaffinity(int(thread), cores)


def median_us(call: Callable[[], Any], number: int, num_warm: int) -> float:
    for _ in range(num_warm):
        call()
    taken = []
    for _ in range(number):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return 1e6 * statistics.median(taken)


def _shape(input_node: Any, actors: list[Any], method: str = "same") -> Any:
    with input_node() as inp:
        node = inp
        for actor in actors:
            node = getattr(actor, method).bind(node)
    return node


def _measure(
    figures: Figures,
    column: str,
    compiled: Callable[[list[Any], str], tuple[Any, Callable[[], None]]],
    actors: list[Any],
) -> None:
    rows = {
        "1 B, one actor, us": (actors[:1], "same", b"x", NUM_CALLS),
        "1 B, through two, us": (actors, "same", b"x", NUM_CALLS),
        "1 MB, one actor, us": (actors[:1], "same", np.ones(1_000_000, np.uint8), 100),
    }
    for row, (used, method, value, number) in rows.items():
        call, teardown = compiled(used, method)
        figures[row][column].append(median_us(partial(call, value), number, NUM_WARM))
        teardown()


def _ours(used: list[Any], method: str) -> tuple[Any, Callable[[], None]]:
    graph = _shape(crossfade.InputNode, used, method).compile()
    return lambda value: graph.execute(value).get(), graph.teardown


def _rays(used: list[Any], method: str) -> tuple[Any, Callable[[], None]]:
    import ray
    from ray.dag import InputNode

    graph = _shape(InputNode, used, method).experimental_compile(_buffer_size_bytes=2 * LARGE_BYTES)
    return lambda value: ray.get(graph.execute(value), timeout=60), graph.teardown


def on_one_host() -> None:
    os.environ.update(RAY_worker_niceness="0", RAY_USAGE_STATS_ENABLED="0", RAY_CGRAPH_get_timeout="60")
    import ray

    ray.init(
        num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False, _node_ip_address="127.0.0.1"
    )
    figures: Figures = defaultdict(lambda: defaultdict(list))
    for _ in range(ROUNDS):
        for engine in ("local", "ray"):
            crossfade.init(engine=engine)
            actors = [crossfade.remote(Worker).remote() for _ in range(2)]
            crossfade.get([actor.pin.remote(1 - k) for k, actor in enumerate(actors)])
            pin(0)
            _measure(figures, f"{engine} engine", _ours, actors)
            pin(None)
            crossfade.shutdown()
    for _ in range(ROUNDS):
        plain = [ray.remote(Worker).remote() for _ in range(2)]
        ray.get([actor.pin.remote(1 - k) for k, actor in enumerate(plain)])
        pin(0)
        _measure(figures, "Compiled Graph", _rays, plain)
        pin(None)
        for actor in plain:
            ray.kill(actor)
    show(figures, ("local engine", "ray engine", "Compiled Graph"))
    ray.shutdown()


def echo() -> None:
    """On the second host: gives one byte back for one byte, and one for each large block."""
    pin(1)
    with socket.create_server(("0.0.0.0", ECHO_PORT)) as listening:
        connected, _ = listening.accept()
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    kept = memoryview(bytearray(LARGE_BYTES))
    while kind := connected.recv(1):
        if kind == b"L":
            left = kept
            while left:
                left = left[connected.recv_into(left) :]
        connected.sendall(b"x")


def main(hosts: Hosts) -> None:
    """Between two hosts (`tests.helpers.ray_two_hosts`)."""
    os.environ.update(RAY_worker_niceness="0", RAY_CGRAPH_get_timeout="60")
    from tests.helpers.ray_two_hosts import place
    from tests.helpers.two_hosts import ADDRESSES

    with hosts.ray() as ray:
        assert hosts.tell("run benchmarks.ray_engine_echo") == "runs"
        apart = _Apart(_connected(ADDRESSES[1]))
        for _ in range(ROUNDS):
            crossfade.init(engine="ray")
            far = crossfade.remote(Worker).options(scheduling_strategy=place(ray, 1)).remote()
            crossfade.get(far.pin.remote(1))
            apart.measure("bare TCP", "ray engine", _ours, far)
            crossfade.shutdown()
        for _ in range(ROUNDS):
            theirs = ray.remote(Worker).options(scheduling_strategy=place(ray, 1)).remote()
            ray.get(theirs.pin.remote(1))
            apart.measure("bare TCP, last rounds", "Compiled Graph", _rays, theirs)
            ray.kill(theirs)
        show(apart.figures, ("bare TCP", "ray engine", "bare TCP, last rounds", "Compiled Graph"))
        print(f"{apart.num_loud} of {2 * ROUNDS} rounds began before the machine was quiet.")


def _connected(address: str) -> socket.socket:
    for _ in range(100):
        try:
            connected = socket.create_connection((address, ECHO_PORT))
        except OSError:
            time.sleep(0.1)
        else:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connected
    raise TimeoutError("the echo does not answer")


def _ping(bare: socket.socket) -> None:
    bare.sendall(b"s")
    bare.recv(1)


def _block(bare: socket.socket, large: Any) -> None:
    bare.sendall(b"L")
    bare.sendall(large)
    bare.recv(1)


def _rate(call: Callable[[], Any]) -> float:
    return LARGE_BYTES / median_us(call, NUM_LARGE, 2) / 1e3


class _Apart:
    """Rounds between two hosts. A library and the bare connection take turns: cores become quick and slow within seconds."""

    def __init__(self, bare: socket.socket) -> None:
        self.figures: Figures = defaultdict(lambda: defaultdict(list))
        self.num_loud = 0
        self._bare = bare
        self._large = np.ones(LARGE_BYTES, np.uint8)
        self._quiet = Quiet(patience_s=10.0 * ROUNDS)

    def measure(self, bare_column: str, column: str, compiled: Any, actor: Any) -> None:
        pin(0)
        call, teardown = compiled([actor], "same")
        self.num_loud += not self._quiet.wait()  # Ray starts a worker in the place of each that was taken or killed
        turns = []
        for _ in range(NUM_TURNS):
            bare_us = median_us(lambda: _ping(self._bare), NUM_CALLS // NUM_TURNS, NUM_WARM)
            turns.append((bare_us, median_us(lambda: call(b"x"), NUM_CALLS // NUM_TURNS, NUM_WARM)))
        teardown()
        hop = self.figures["1 B there and back, us"]
        hop[bare_column].append(statistics.median(bare_us for bare_us, _ in turns))
        hop[column].append(statistics.median(own_us for _, own_us in turns))
        ratio = statistics.median(own_us / bare_us for bare_us, own_us in turns)
        self.figures["1 B, of bare TCP beside it"][column].append(ratio)
        call, teardown = compiled([actor], "first")
        rates = self.figures["64 MB one way, GB/s"]
        rates[bare_column].append(_rate(lambda: _block(self._bare, self._large)))
        rates[column].append(_rate(lambda: call(self._large)))
        teardown()
        pin(None)


def show(figures: Figures, columns: tuple[str, ...]) -> None:
    print(f"| median of {ROUNDS} rounds (lowest to highest) | {' | '.join(columns)} |")
    print(f"| --- |{' --- |' * len(columns)}")
    for row, cells in figures.items():
        texts = [
            f"{statistics.median(cells[column]):.2f} ({min(cells[column]):.2f} to {max(cells[column]):.2f})"
            if cells[column]
            else "-"
            for column in columns
        ]
        print(f"| {row} | {' | '.join(texts)} |")
    sys.stdout.flush()


if __name__ == "__main__":
    on_one_host()
