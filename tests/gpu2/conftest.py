"""Tests in this folder need 2 GPU(s)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import crossfade
from tests.helpers.gpus import skip_without


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without(2, "gpu2", items)


@pytest.fixture
def session() -> Iterator[None]:
    crossfade.init(num_gpus=2)
    yield
    crossfade.shutdown()
