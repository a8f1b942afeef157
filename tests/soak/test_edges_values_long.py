"""Values of several gigabytes."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cpu.test_edges_values import TRANSPORTS, actors, check_large

__all__ = ["actors"]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("size_bytes", [(1 << 31) + 1, 3_000_000_000, (1 << 32) - 1, 1 << 32, (1 << 32) + 1])
def test_several_gigabytes(actors: Any, transport: str, size_bytes: int) -> None:
    check_large(actors, transport, size_bytes)
