"""The random graphs of ``make test``, ten times as many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.graphs import Benches, GraphDraw, check_against_plain_calls, graph_draws, open_benches


@pytest.fixture(scope="module")
def benches() -> Iterator[Benches]:
    with open_benches() as both:
        yield both


@pytest.mark.timeout(3600)
@settings(settings.get_profile("soak"), max_examples=2_000)
@given(draws=st.lists(graph_draws(transports=("auto", "auto", "gloo")), min_size=1, max_size=3))
def test_pl4_two_thousand_random_graphs(benches: Benches, draws: list[GraphDraw]) -> None:
    check_against_plain_calls(benches, draws)
