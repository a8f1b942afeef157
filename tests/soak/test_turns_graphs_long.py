"""The random graphs with turns of ``make test``, thirty times as many."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

pytest.importorskip("torch", reason="turns are those of pushes between devices, which need torch")

from tests.cpu.test_turns_graphs import DRAWS, SHORT_DRAWS, benches
from tests.helpers.graphs import Benches, GraphDraw, check_engines_agree

__all__ = ["benches"]


@pytest.mark.timeout(3600)
@settings(settings.get_profile("soak"), max_examples=600)
@given(draw=DRAWS)
def test_random_graphs_give_the_same_with_turns_as_inline(benches: Benches, draw: GraphDraw) -> None:
    check_engines_agree(benches, [draw])


@pytest.mark.timeout(3600)
@settings(settings.get_profile("soak"), max_examples=300)
@given(one=SHORT_DRAWS, other=SHORT_DRAWS)
def test_two_random_graphs_on_the_same_actors(benches: Benches, one: GraphDraw, other: GraphDraw) -> None:
    check_engines_agree(benches, [one, other])
