"""Fixtures that are a session."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

import pytest

import crossfade

TORCH = ("torch",) if find_spec("torch") is not None else ()
"""What actors of tests with tensors have preloaded: to import it takes each of them three seconds."""


NUMPY = ("numpy",)
"""What actors of files that start hundreds have preloaded: they are forked, which takes a tenth of a new interpreter's time."""


def opened(scope: Literal["function", "module"] = "function", **options: Any) -> Any:
    @pytest.fixture(scope=scope)
    def session() -> Iterator[None]:
        crossfade.init(**options)
        yield
        crossfade.shutdown()

    return session


def on_each_engine(**options: Any) -> Any:
    """A session on each engine that needs nothing else; its name."""

    @pytest.fixture(params=["inline", "local"])
    def engine(request: pytest.FixtureRequest) -> Iterator[str]:
        crossfade.init(engine=request.param, **options)
        yield request.param
        crossfade.shutdown()

    return engine
