"""Programs of their own that tests look at, run two at a time: on a machine with two cores that takes half as long."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from subprocess import CompletedProcess

Ran = Mapping[str, Future[CompletedProcess[str]]]
"""What becomes of each program, by its name."""


@contextmanager
def two_at_a_time(programs: Mapping[str, Callable[[], CompletedProcess[str]]]) -> Iterator[Ran]:
    """Runs each, in order. Those that have not begun at the end are left out."""
    pool = ThreadPoolExecutor(2)
    try:
        yield {name: pool.submit(run) for name, run in programs.items()}
    finally:
        pool.shutdown(cancel_futures=True)
