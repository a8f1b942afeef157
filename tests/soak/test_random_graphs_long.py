"""The random graphs of ``make test``, many more: of plain values, over device channels, of tensors, with slow branches."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import crossfade
from tests.cpu.test_at_once import check_path_ends
from tests.cpu.test_random_graphs import tensor_benches
from tests.helpers.graphs import (
    TENSOR_KINDS,
    TENSOR_METHODS,
    Benches,
    GraphDraw,
    check_against_plain_calls,
    check_engines_agree,
    graph_draws,
    kept_session,
    open_benches,
    session_of,
)
from tests.helpers.paths import PathDraw, PathWorker, draws

pytestmark = pytest.mark.timeout(3600)

__all__ = ["tensor_benches"]

LONG = settings(settings.get_profile("soak"), max_examples=2_000)
FEWER = settings(settings.get_profile("soak"), max_examples=600)


@pytest.fixture(scope="module")
def benches() -> Iterator[Benches]:
    with open_benches() as both:
        yield both


@LONG
@given(draws=st.lists(graph_draws(transports=("auto", "auto", "gloo")), min_size=1, max_size=3))
def test_pl4_two_thousand_random_graphs(benches: Benches, draws: list[GraphDraw]) -> None:
    check_against_plain_calls(benches, draws)


@LONG
@given(draw=graph_draws(transports=("copy", "staged")))
def test_pl4_two_thousand_random_graphs_over_device_channels(benches: Benches, draw: GraphDraw) -> None:
    pytest.importorskip("torch", reason="channels between devices need torch")
    check_against_plain_calls(benches, [draw])


@FEWER
@given(draw=graph_draws(kinds=TENSOR_KINDS, methods=TENSOR_METHODS, most_depth=4))
def test_pl4_hundreds_of_random_graphs_of_tensors(tensor_benches: Benches, draw: GraphDraw) -> None:
    check_engines_agree(tensor_benches, [draw])


@pytest.fixture(scope="module")
def path_actors() -> Iterator[list[crossfade.ActorHandle]]:
    with kept_session() as session, session_of(session):
        yield [crossfade.remote(PathWorker).remote() for _ in range(3)]


@settings(settings.get_profile("soak"), max_examples=500)
@given(draw=draws())
def test_five_hundred_graphs_whose_outputs_come_at_the_end_of_their_paths(
    path_actors: list[crossfade.ActorHandle], draw: PathDraw
) -> None:
    check_path_ends(path_actors, draw)
