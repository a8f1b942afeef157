"""The random graphs of ``make test``, ten times as many."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.graphs import Bench, GraphDraw, graph_draws, new_key, run_directly


@pytest.fixture(scope="module")
def benches() -> Iterator[tuple[Bench, Bench]]:
    inline, local = Bench("inline"), Bench("local")
    yield inline, local
    inline.session.close()
    local.session.close()


@pytest.mark.timeout(3600)
@settings(settings.get_profile("soak"), max_examples=2_000)
@given(draws=st.lists(graph_draws(transports=("auto", "auto", "gloo")), min_size=1, max_size=3))
def test_pl4_two_thousand_random_graphs(benches: tuple[Bench, Bench], draws: list[GraphDraw]) -> None:
    inline, local = benches
    key = new_key()
    expected = run_directly(draws, key)
    assert inline.run(draws, key) == expected
    assert local.run(draws, key) == expected
