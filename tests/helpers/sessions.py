"""Fixtures that are a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pytest

import crossfade


def opened(scope: Literal["function", "module"] = "function", **options: Any) -> Any:
    @pytest.fixture(scope=scope)
    def session() -> Iterator[None]:
        crossfade.init(**options)
        yield
        crossfade.shutdown()

    return session
