"""What tests of preloading share: sessions that preload modules, what actors find there, and the templates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import crossfade
from crossfade.engines import forked
from tests.helpers.facts import Facts

LIMIT_S = 30.0
MODULE = "colorsys"  # which nothing else imports

Actor = crossfade.remote(Facts)


def ask(method: str, *args: Any) -> Any:
    return getattr(Actor.remote(), method).remote(*args).get(timeout=LIMIT_S)


def end_of(method: str, *args: Any) -> str:
    """How an actor ends that has done this, in words without its name."""
    actor = Actor.remote()
    with pytest.raises(crossfade.ActorDiedError) as caught:
        getattr(actor, method).remote(*args).get(timeout=LIMIT_S)
    return str(caught.value).partition(" is dead: ")[2]


@contextmanager
def preloading(*modules: str, **options: Any) -> Iterator[None]:
    crossfade.init(preload=modules, **options)
    try:
        yield
    finally:
        crossfade.shutdown()


def template_pid() -> int:
    """Of the only one."""
    (template,) = forked._Templates.by_kind.values()
    return template._process.pid
