"""Which values debug mode compares right behind the method that used them last."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from crossfade.plan.actions import Action, Verb
from crossfade.runtime.guard import _released_behind

PLAN: Any = SimpleNamespace(channel={"c": SimpleNamespace(value="x"), "d": SimpleNamespace(value="y")})


def test_a_value_that_is_let_go_of_behind_a_method_is_compared_there() -> None:
    program = [Action(Verb.RUN, "n"), Action(Verb.WRITE, "d"), Action(Verb.FREE, "x")]
    assert _released_behind(PLAN, program) == {"n": {"x"}}


def test_a_value_that_is_still_to_be_written_is_not() -> None:
    """Its readers hear of the change, once."""
    program = [Action(Verb.RUN, "n"), Action(Verb.WRITE, "c"), Action(Verb.FREE, "x"), Action(Verb.FREE, "y")]
    assert _released_behind(PLAN, program) == {"n": {"y"}}


def test_a_value_that_others_may_use_in_between_is_not() -> None:
    for verb in (Verb.READ, Verb.SEND, Verb.RECV, Verb.COLL):
        assert _released_behind(PLAN, [Action(Verb.RUN, "n"), Action(verb, "c"), Action(Verb.FREE, "x")]) == {}
