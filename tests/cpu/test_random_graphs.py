"""PL-4 and everything else: any graph gives on processes, and in one thread, what calling its methods one by one gives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.counts import num
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
from tests.helpers.sessions import TORCH

pytestmark = pytest.mark.timeout(num(600, 3600))

TRANSPORTS = ("auto", "auto", "gloo")[: num(1, 3)]
FEWER = settings(max_examples=num(30, 2_000))


@pytest.fixture(scope="module")
def benches() -> Iterator[Benches]:
    with open_benches() as both:
        yield both


@FEWER
@given(draws=st.lists(graph_draws(transports=TRANSPORTS), min_size=1, max_size=3))
def test_pl4_random_graphs_give_what_plain_calls_give(benches: Benches, draws: list[GraphDraw]) -> None:
    check_against_plain_calls(benches, draws)


@FEWER
@given(draw=graph_draws(transports=("gloo",), with_large=False))
def test_pl4_random_graphs_over_gloo_give_what_plain_calls_give(benches: Benches, draw: GraphDraw) -> None:
    pytest.importorskip("torch", reason="gloo needs torch")
    check_against_plain_calls(benches, [draw])


@pytest.fixture(scope="module")
def tensor_benches() -> Iterator[Benches]:
    pytest.importorskip("torch")
    from tests.helpers.tensor_workers import TensorWorker

    with open_benches(TensorWorker, TORCH) as both:
        yield both


@settings(max_examples=num(20, 600))
@given(draw=graph_draws(kinds=TENSOR_KINDS, methods=TENSOR_METHODS, most_depth=4))
def test_pl4_random_graphs_of_tensors_give_the_same_on_both_engines(tensor_benches: Benches, draw: GraphDraw) -> None:
    check_engines_agree(tensor_benches, [draw])


@FEWER
@given(draw=graph_draws(transports=("copy", "staged")))
def test_pl4_random_graphs_over_device_channels_give_what_plain_calls_give(benches: Benches, draw: GraphDraw) -> None:
    pytest.importorskip("torch", reason="channels between devices need torch")
    check_against_plain_calls(benches, [draw])
