"""What graphs of tensors do over any transport between devices, with GPUs and with the CPU in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

import crossfade


def check_lengths(
    graph: crossfade.CompiledGraph, sizes: Sequence[int], expected: Callable[[int], Any], timeout_s: float = 30.0
) -> None:
    """Tensors of changing lengths arrive: one by one, and as many at a time as may be in flight."""
    for size in sizes:
        assert crossfade.get(graph.execute(size), timeout=timeout_s) == expected(size)
    ahead = sizes[: graph.plan.max_inflight]
    refs = [graph.execute(size) for size in ahead]
    assert [crossfade.get(ref, timeout=timeout_s) for ref in refs] == [expected(size) for size in ahead]


def check_odd_ones_fail(
    graph: crossfade.CompiledGraph, expected: Callable[[int], Any], timeout_s: float = 30.0
) -> None:
    """A method that raises for odd sizes, before it sends, costs these executions and no other one."""
    for size in range(10):
        ref = graph.execute(size)
        if size % 2:
            with pytest.raises(KeyError):
                crossfade.get(ref, timeout=timeout_s)
        else:
            assert crossfade.get(ref, timeout=timeout_s) == expected(size)


def get_all(graph: crossfade.CompiledGraph, refs: Sequence[Any]) -> None:
    """The results of these executions, and of one more."""
    for ref in [*refs, graph.execute(1)]:
        crossfade.get(ref, timeout=30)
