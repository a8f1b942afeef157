"""A few actors in each of several sessions, which a file's tests share; a session is the program's only while a test has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from crossfade.api.session import Session
from tests.helpers.graphs import kept_session, session_of

Kept = tuple[Session, tuple[Any, ...]]

ENGINES: Mapping[str, Mapping[str, Any]] = {"local": {}, "inline": {"engine": "inline"}}
"""One session on each engine."""


def kept_crews(sessions: Mapping[str, Mapping[str, Any]], make: Callable[[], tuple[Any, ...]]) -> Any:
    """The fixture ``kept``, of a file: sessions by their name, each with what ``make`` made in it."""

    @pytest.fixture(scope="module")
    def kept() -> Iterator[dict[str, Kept]]:
        with ExitStack() as stack:
            made: dict[str, Kept] = {}
            for name, options in sessions.items():
                session = stack.enter_context(kept_session(**options))
                with session_of(session):
                    made[name] = session, make()
            yield made

    return kept


def crew_of(*names: str, ids: Sequence[str] | None = None) -> Any:
    """A fixture: the actors of each of these sessions of ``kept`` in turn; it is the program's session while a test has them."""

    @pytest.fixture(params=names, ids=ids)
    def crew(request: pytest.FixtureRequest, kept: dict[str, Kept]) -> Iterator[tuple[Any, ...]]:
        session, actors = kept[request.param]
        with session_of(session):
            yield actors

    return crew
