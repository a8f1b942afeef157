"""Fixtures that are a session."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

import pytest

import crossfade

TORCH = ("torch",) if find_spec("torch") is not None else ()
"""What actors of tests with tensors have preloaded: to import it takes each of them three seconds."""


def opened(scope: Literal["function", "module"] = "function", **options: Any) -> Any:
    @pytest.fixture(scope=scope)
    def session() -> Iterator[None]:
        crossfade.init(**options)
        yield
        crossfade.shutdown()

    return session
