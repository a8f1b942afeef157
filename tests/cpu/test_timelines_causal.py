"""Timelines of actors that claim GPUs that are not there: nothing moves before it was made, or is used before it came."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from tests.helpers.causal import Worker, check_causal  # noqa: E402
from tests.helpers.sessions import TORCH  # noqa: E402


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    crossfade.init(num_gpus=4, preload=TORCH)
    yield [crossfade.remote(num_gpus=1)(Worker).remote() for _ in range(4)]
    crossfade.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("transport", ["copy", "staged"])
def test_nothing_is_used_before_it_came(actors: list[Any], transport: str, overlap: bool) -> None:
    check_causal(actors, transport, overlap=overlap, size=100_000, clock_us=200.0)
