"""Timelines of four actors on two GPUs, two on each: nothing moves before it was made or is used before it came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import crossfade
from tests.helpers.causal import Worker, check_causal

SIZE = 16 << 20
"""64 MB."""
CLOCKS_US = 30.0


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    crossfade.init(num_gpus=2)
    yield [crossfade.remote(num_gpus=0.5)(Worker).remote() for _ in range(4)]
    crossfade.shutdown()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("transport", ["copy", "staged"])
def test_nothing_is_used_before_it_came(actors: list[Any], transport: str, overlap: bool) -> None:
    for _ in range(3):
        check_causal(actors, transport, overlap=overlap, size=SIZE, clock_us=CLOCKS_US)
