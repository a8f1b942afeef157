"""Eight threads compile, execute and tear down on shared actors, fifty times each."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpu.test_edges_compiles import check_many_threads, kept, workers

__all__ = ["kept", "workers"]


@pytest.mark.timeout(1200)
def test_fifty_rounds_in_eight_threads(workers: Any) -> None:
    check_many_threads(workers, 50)
