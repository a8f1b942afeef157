"""CUDA graphs of copies, signal writes and waits.

A replay repeats addresses and values, so only signals that reset themselves (signals.py) may be captured. PL-5 holds for replays
as it does for single operations: launch a graph that waits only after the record says that what it waits for was launched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from crossfade.device.driver import Driver


class Replay:
    """A captured program."""

    def __init__(self, driver: Driver, graph: int) -> None:
        self._driver = driver
        self._graph: int | None = graph
        self.num_launches = 0

    def launch(self, stream: int) -> None:
        """Enqueues all of it, in one call."""
        if self._graph is None:
            raise ValueError("this graph is closed")
        self._driver.launch(self._graph, stream)
        self.num_launches += 1

    def close(self) -> None:
        """Gives it back; launches must have finished. Idempotent."""
        if self._graph is not None:
            self._driver.destroy_graph(self._graph)
            self._graph = None


def capture(driver: Driver, stream: int, body: Callable[[], None], sides: Sequence[int] = ()) -> Replay:
    """Collects what ``body`` enqueues on ``stream`` and on ``sides``, and runs none of it. It may not allocate, load kernels or
    wait for the device. The sides begin behind ``stream`` and end before it continues.
    """
    events = [driver.create_event() for _ in range(len(sides) + 1)]
    try:
        return Replay(driver, _capture(driver, stream, body, sides, events))
    finally:
        for event in events:
            driver.destroy_event(event)


def _capture(driver: Driver, stream: int, body: Callable[[], None], sides: Sequence[int], events: Sequence[int]) -> int:
    driver.begin_capture(stream)
    try:
        driver.record_event(events[-1], stream)
        for side in sides:
            driver.wait_event(side, events[-1])
        body()
        for event, side in zip(events, sides, strict=False):
            driver.record_event(event, side)
            driver.wait_event(stream, event)
    except BaseException:
        with suppress(Exception):  # that this fails as well is no news
            driver.destroy_graph(driver.end_capture(stream))
        raise
    return driver.end_capture(stream)
