"""PL-4 and everything else: any graph gives on processes what it gives in one thread."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.graphs import Bench, GraphDraw, graph_draws, new_key


@pytest.fixture(scope="module")
def benches() -> Iterator[tuple[Bench, Bench]]:
    inline, local = Bench("inline"), Bench("local")
    yield inline, local
    inline.session.close()
    local.session.close()


def _agree(benches: tuple[Bench, Bench], draws: list[GraphDraw]) -> None:
    inline, local = benches
    key = new_key()
    assert local.run(draws, key) == inline.run(draws, key)


@pytest.mark.timeout(600)
@given(draws=st.lists(graph_draws(), min_size=1, max_size=3))
def test_pl4_random_graphs_agree_with_the_inline_engine(benches: tuple[Bench, Bench], draws: list[GraphDraw]) -> None:
    _agree(benches, draws)


@pytest.mark.timeout(600)
@given(draw=graph_draws(transports=("gloo",), with_large=False))
def test_pl4_random_graphs_over_gloo_agree_with_the_inline_engine(
    benches: tuple[Bench, Bench], draw: GraphDraw
) -> None:
    pytest.importorskip("torch", reason="gloo needs torch")
    _agree(benches, [draw])
