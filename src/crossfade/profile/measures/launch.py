"""What enqueuing costs a host: its own time, call after call, while the device works them off."""

from __future__ import annotations

from collections.abc import Callable, Generator
from statistics import median
from typing import Any

from crossfade.device.capture import capture
from crossfade.profile.context import Context, Told
from crossfade.profile.steps import Step

__all__ = ["launch"]

NUM_CALLS, NUM_ROUNDS = 100, 7
"""Calls are few enough that a stream holds all of them."""
COPY_BYTES = 4096


def launch(context: Context, step: Step) -> Generator[Any, Told, dict[str, float]]:
    """Microseconds of the host for each operation."""
    driver, bench = context.driver, context.bench
    stream = context.lane(0)
    source, target = context.buffer("source"), context.buffer("target")
    counter, event = context.counter(context.rank, context.rank), driver.create_event()
    replay = capture(driver, stream, lambda: driver.copy(target, source, COPY_BYTES, stream))
    operations: dict[str, Callable[[], None]] = {
        "copy": lambda: driver.copy(target, source, COPY_BYTES, stream),
        "write": lambda: counter.set(stream, 1),
        "wait": lambda: counter.wait(stream, 1),
        "record": lambda: driver.record_event(event, stream),
        "wait event": lambda: driver.wait_event(stream, event),
        "kernel": lambda: bench.kernel(stream),
        "graph": lambda: replay.launch(stream),
    }
    costs: dict[str, float] = {}
    for name, call in operations.items():
        call()  # nothing is loaded later
        rounds = []
        for _ in range(NUM_ROUNDS):
            while not driver.is_idle(stream):
                bench.pause()
            begin_us = bench.now_us()
            for _ in range(NUM_CALLS):
                call()
            rounds.append((bench.now_us() - begin_us) / NUM_CALLS)
        costs[name] = median(rounds)
    while not driver.is_idle(stream):
        bench.pause()
    replay.close()
    driver.destroy_event(event)
    yield None
    return costs
