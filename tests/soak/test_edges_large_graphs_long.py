"""The time to compile, run, predict and print a graph grows as the number of its nodes does, not faster."""

from __future__ import annotations

import pytest

from tests.cpu.test_edges_compiles import LARGE, SHAPES, SMALL, actors_of, check_all

MAX_RATIO = 30.0
"""Between ten times the nodes: 10 if the time is linear, 100 if it is quadratic."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("engine", "num_actors", "shape"),
    [
        *(("inline", 1, shape) for shape in SHAPES),
        *(("inline", 1_000, shape) for shape in SHAPES),
        ("local", 8, "layers"),
    ],
)
def test_time_grows_with_the_number_of_nodes(engine: str, num_actors: int, shape: str) -> None:
    make, expected = SHAPES[shape]
    with actors_of(engine, num_actors) as actors:
        check_all(make(actors, 100), expected(100))
        small_s = min(check_all(make(actors, SMALL), expected(SMALL)) for _ in range(2))
        large_s = check_all(make(actors, LARGE), expected(LARGE))
    assert large_s < MAX_RATIO * max(small_s, 0.1)
