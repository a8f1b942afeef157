"""Several threads that do the same at a time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def together(do: Callable[[Item], Result], each: Iterable[Item]) -> list[Result]:
    """What ``do`` returned for each, in a thread of its own; all start at once. What one of them raises, this raises."""
    items = list(each)
    barrier = threading.Barrier(len(items))

    def begin(item: Item) -> Result:
        barrier.wait(30)
        return do(item)

    with ThreadPoolExecutor(len(items)) as pool:
        return list(pool.map(begin, items))
