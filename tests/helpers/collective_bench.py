"""Sessions whose actors do collectives: in one thread, or processes, by gloo or by copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

import crossfade
from crossfade.api import session as sessions
from crossfade.types import Transport
from tests.helpers.collective_makers import NUM_ACTORS, Maker
from tests.helpers.graphs import session_of
from tests.helpers.sessions import TORCH


@dataclass
class Bench:
    """A session with actors.

    Attributes:
        session: the session.
        actors: the actors.
        is_by_copy: whether collectives go the way of GPU tensors, with CPU tensors in their place.
    """

    session: sessions.Session
    actors: list[Any]
    is_by_copy: bool = False

    @classmethod
    @contextmanager
    def open(cls, engine: str) -> Iterator[Bench]:
        session = sessions.Session(sessions._make_engine(engine, 60.0, preload=TORCH))
        with session_of(session):
            actors = [crossfade.remote(Maker).remote(rank) for rank in range(NUM_ACTORS)]
        try:
            yield cls(session, actors)
        finally:
            session.close()

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Graphs that are compiled here belong to it."""
        with pytest.MonkeyPatch.context() as patch, session_of(self.session):
            if self.is_by_copy:
                patch.setattr("crossfade.schedule.lower.transport_of_collective", lambda *_: Transport.COPY)
            yield

    def run(
        self, build: Callable[[list[Any], Any], list[Any]], inputs: Sequence[Any], **options: Any
    ) -> list[list[Any]]:
        """What a graph gives for each of several inputs, all under way at once: values, or errors."""
        with self.compiling():
            inp = crossfade.InputNode()
            with crossfade.MultiOutputNode(build(self.actors, inp)).compile(**options) as graph:
                return [[outcome(ref) for ref in refs] for refs in [graph.execute(each) for each in inputs]]


def outcome(ref: crossfade.CompiledRef) -> Any:
    try:
        return ref.get(timeout=60)
    except crossfade.TaskError as error:
        return error


@pytest.fixture(scope="module")
def both_benches() -> Iterator[tuple[Bench, Bench]]:
    """One thread, and processes, whose collectives go by gloo or by copies."""
    with Bench.open("inline") as inline, Bench.open("local") as local:
        yield inline, local


def bench_of(both: tuple[Bench, Bench], name: str) -> Bench:
    """One thread (``inline``), or the processes; with ``copy`` their collectives are by copies."""
    return both[0] if name == "inline" else replace(both[1], is_by_copy=name == "copy")
