"""A session with two GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import crossfade


@pytest.fixture
def session() -> Iterator[None]:
    crossfade.init(num_gpus=2)
    yield
    crossfade.shutdown()
