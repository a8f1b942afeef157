"""``crossfade bench hops``: how long values take through actors on this machine."""

from __future__ import annotations

import itertools
import os
import platform
from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.console import Console

import crossfade
from crossfade.api import ActorHandle, CompiledGraph, remote
from crossfade.cli.actors import Echo
from crossfade.cli.exits import UsersMistake, WrongResult
from crossfade.cli.measure import alone_us, in_flight_us, median, p99, show_us
from crossfade.cli.shown import new_table

NUM_ACTORS = 4
NUM_INFLIGHT = 8
PAUSE_S = 0.010
ARRAY_BYTES = 1_000_000
BLOCK = 1000
"""Executions for each figure of the throughput."""


def bench_hops(num: int, spin_us: float) -> None:
    """Measures and prints a table, of ``num`` executions for each figure; a tenth for arrays, and at most 200 with a pause."""
    console = Console(highlight=False)
    console.print(
        f"crossfade {crossfade.__version__}, {os.cpu_count()} cores, Python {platform.python_version()}; {num} executions a row"
    )
    try:
        crossfade.init(engine="local", spin_us=spin_us)
    except ValueError as error:
        raise UsersMistake.of(error) from None
    actors = [remote(Echo).remote() for _ in range(NUM_ACTORS)]
    title = f"From execute to the result (spin {spin_us:g} us)"
    table = new_table(title, ("what",), ("executions", "median us", "p99 us"))
    with console.status("measuring"):
        for what, times_us in _rows(actors, num):
            table.add_row(what, f"{len(times_us):,}", show_us(median(times_us)), show_us(p99(times_us)))
        per_second = _throughput(actors[0], num)
    console.print(table)
    console.print(f"{NUM_INFLIGHT} in flight through one actor: {per_second:,.0f} executions a second")
    console.print("all values were checked")


def _rows(actors: list[ActorHandle], num: int) -> Iterator[tuple[str, list[float]]]:
    """What was measured, and its times in microseconds."""
    with _chain(actors[:1]) as graph:
        yield "1 byte, out and back", _bytes_us(graph, num)
        yield f"the same after a pause of {PAUSE_S * 1e3:.0f} ms", _bytes_us(graph, min(num, 200), PAUSE_S)
    for length in (2, 4):
        with _chain(actors[:length]) as graph:
            yield f"1 byte through a chain of {length} actors", _bytes_us(graph, num)
    for width in (2, 4):
        with _fan_out(actors[:width]) as graph:
            yield f"1 byte to {width} actors and back from all", _bytes_us(graph, num, num_results=width)
    with _chain(actors[:1]) as graph:
        yield "array of 1 MB, out and back", _arrays_us(graph, max(10, num // 10))


def _chain(actors: list[ActorHandle]) -> CompiledGraph:
    with crossfade.InputNode() as value:
        node: Any = value
        for actor in actors:
            node = actor.echo.bind(node)
    graph: CompiledGraph = node.compile()
    return graph


def _fan_out(actors: list[ActorHandle]) -> CompiledGraph:
    with crossfade.InputNode() as value:
        dag = crossfade.MultiOutputNode([actor.echo.bind(value) for actor in actors])
    graph: CompiledGraph = dag.compile()
    return graph


def _some_bytes(num: int) -> Iterator[bytes]:
    return (bytes([number % 251]) for number in range(num))


def _bytes_us(graph: CompiledGraph, num: int, pause_s: float = 0.0, num_results: int = 0) -> list[float]:
    def is_right(sent: bytes, got: Any) -> bool:
        return bool(got == ([sent] * num_results if num_results else sent))

    alone_us(graph, _some_bytes(min(num, 200)), is_right)  # nothing is warm at first
    return alone_us(graph, _some_bytes(num), is_right, pause_s=pause_s)


def _arrays_us(graph: CompiledGraph, num: int) -> list[float]:
    arrays = [np.full(ARRAY_BYTES // 8, number, dtype=np.int64) for number in range(3)]
    inputs = itertools.islice(itertools.cycle(arrays), num)
    alone_us(graph, arrays * 4, np.array_equal)  # makes every slot, and touches its memory
    return alone_us(graph, inputs, np.array_equal)


def _throughput(actor: ActorHandle, num: int) -> float:
    """Executions a second with several in flight: the median of blocks."""
    values = list(_some_bytes(min(num, BLOCK)))
    rates = []
    with _chain([actor]) as graph:
        for block in range(max(2, 4 * num // len(values))):
            times_us, results = in_flight_us(graph, values, NUM_INFLIGHT)
            if results != values:
                raise WrongResult(f"what block {block} gave", results, values)
            rates.append(len(values) / times_us[-1] * 1e6)
    return median(rates)
