"""Tests in this folder need 4 GPU(s)."""

from __future__ import annotations

import pytest

from tests.helpers.gpus import skip_without


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without(4, "gpu4", items)
