"""A million executions, and a thousand graphs on the same actors, leave nothing behind."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpu.test_edges_leaks import check_cycles, check_executions, workers

__all__ = ["workers"]


@pytest.mark.timeout(3600)
def test_a_million_executions(workers: Any) -> None:
    check_executions(workers, 10_000, 990_000, slack_kib=2048)


@pytest.mark.timeout(3600)
def test_a_thousand_graphs_through_shared_memory(workers: Any) -> None:
    check_cycles(workers, 20, 1_000, "auto", slack_kib=1024)


@pytest.mark.timeout(3600)
def test_two_hundred_graphs_through_gloo(workers: Any) -> None:
    """Fewer, since each opens a TCP connection between every two parties."""
    pytest.importorskip("torch")
    check_cycles(workers, 20, 200, "gloo", slack_kib=4096)
