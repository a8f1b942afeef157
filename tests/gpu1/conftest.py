"""Tests in this folder need 1 GPU(s)."""

from __future__ import annotations

import pytest

from tests.helpers.gpus import skip_without


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without(1, "gpu1", items)
