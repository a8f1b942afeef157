"""PL-4 and everything else: any graph gives on processes, and in one thread, what calling its methods one by one gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.graphs import Bench, GraphDraw, graph_draws, new_key, run_directly


@pytest.fixture(scope="module")
def benches() -> Iterator[tuple[Bench, Bench]]:
    inline, local = Bench("inline"), Bench("local")
    yield inline, local
    inline.session.close()
    local.session.close()


def _agree(benches: tuple[Bench, Bench], draws: list[GraphDraw]) -> None:
    inline, local = benches
    key = new_key()
    expected = run_directly(draws, key)
    assert inline.run(draws, key) == expected
    assert local.run(draws, key) == expected


@pytest.mark.timeout(600)
@given(draws=st.lists(graph_draws(), min_size=1, max_size=3))
def test_pl4_random_graphs_give_what_plain_calls_give(benches: tuple[Bench, Bench], draws: list[GraphDraw]) -> None:
    _agree(benches, draws)


@pytest.mark.timeout(600)
@given(draw=graph_draws(transports=("gloo",), with_large=False))
def test_pl4_random_graphs_over_gloo_give_what_plain_calls_give(benches: tuple[Bench, Bench], draw: GraphDraw) -> None:
    pytest.importorskip("torch", reason="gloo needs torch")
    _agree(benches, [draw])
