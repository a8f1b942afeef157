"""Tests in this folder need 2 GPU(s)."""

from __future__ import annotations

import pytest

from tests.helpers.gpus import skip_without


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    skip_without(2, "gpu2", items)
