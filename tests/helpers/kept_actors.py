"""A few actors in each of several sessions, which a file's tests share; a session is the program's only while a test has it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

from crossfade.api.session import Session
from tests.helpers.graphs import kept_session, session_of

Kept = tuple[Session, tuple[Any, ...]]

ENGINES: Mapping[str, Mapping[str, Any]] = {"local": {}, "inline": {"engine": "inline"}}
"""One session on each engine."""


def open_crews(
    sessions: Mapping[str, Mapping[str, Any]], make: Callable[[], tuple[Any, ...]]
) -> Iterator[dict[str, Kept]]:
    """Sessions by their name, each with what ``make`` made in it, until the generator goes on."""
    with ExitStack() as stack:
        made: dict[str, Kept] = {}
        for name, options in sessions.items():
            session = stack.enter_context(kept_session(**options))
            with session_of(session):
                made[name] = session, make()
        yield made


def crew_of(kept: Kept) -> Iterator[tuple[Any, ...]]:
    """The actors, whose session is the program's until the generator goes on."""
    session, actors = kept
    with session_of(session):
        yield actors
