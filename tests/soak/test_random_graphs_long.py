"""The random graphs of ``make test``, twenty times as many: of plain values, over device channels, of tensors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cpu.test_random_graphs import tensor_benches
from tests.helpers.graphs import (
    TENSOR_KINDS,
    TENSOR_METHODS,
    Benches,
    GraphDraw,
    check_against_plain_calls,
    check_engines_agree,
    graph_draws,
    open_benches,
)

__all__ = ["tensor_benches"]

LONG = settings(settings.get_profile("soak"), max_examples=2_000)
FEWER = settings(settings.get_profile("soak"), max_examples=600)


@pytest.fixture(scope="module")
def benches() -> Iterator[Benches]:
    with open_benches() as both:
        yield both


@pytest.mark.timeout(3600)
@LONG
@given(draws=st.lists(graph_draws(transports=("auto", "auto", "gloo")), min_size=1, max_size=3))
def test_pl4_two_thousand_random_graphs(benches: Benches, draws: list[GraphDraw]) -> None:
    check_against_plain_calls(benches, draws)


@pytest.mark.timeout(3600)
@LONG
@given(draw=graph_draws(transports=("copy", "staged")))
def test_pl4_two_thousand_random_graphs_over_device_channels(benches: Benches, draw: GraphDraw) -> None:
    pytest.importorskip("torch", reason="channels between devices need torch")
    check_against_plain_calls(benches, [draw])


@pytest.mark.timeout(3600)
@FEWER
@given(draw=graph_draws(kinds=TENSOR_KINDS, methods=TENSOR_METHODS, most_depth=4))
def test_pl4_hundreds_of_random_graphs_of_tensors(tensor_benches: Benches, draw: GraphDraw) -> None:
    check_engines_agree(tensor_benches, [draw])
