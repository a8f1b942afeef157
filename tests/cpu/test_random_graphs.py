"""PL-4 and everything else: any graph gives on processes, and in one thread, what calling its methods one by one gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.graphs import Benches, GraphDraw, check_against_plain_calls, graph_draws, open_benches


@pytest.fixture(scope="module")
def benches() -> Iterator[Benches]:
    with open_benches() as both:
        yield both


@pytest.mark.timeout(600)
@given(draws=st.lists(graph_draws(), min_size=1, max_size=3))
def test_pl4_random_graphs_give_what_plain_calls_give(benches: Benches, draws: list[GraphDraw]) -> None:
    check_against_plain_calls(benches, draws)


@pytest.mark.timeout(600)
@given(draw=graph_draws(transports=("gloo",), with_large=False))
def test_pl4_random_graphs_over_gloo_give_what_plain_calls_give(benches: Benches, draw: GraphDraw) -> None:
    pytest.importorskip("torch", reason="gloo needs torch")
    check_against_plain_calls(benches, [draw])


@pytest.mark.timeout(600)
@given(draw=graph_draws(transports=("copy", "staged")))
def test_pl4_random_graphs_over_device_channels_give_what_plain_calls_give(benches: Benches, draw: GraphDraw) -> None:
    pytest.importorskip("torch", reason="channels between devices need torch")
    check_against_plain_calls(benches, [draw])
