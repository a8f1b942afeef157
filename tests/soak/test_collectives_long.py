"""The random graphs with collectives of ``make test``, twenty times as many."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

pytest.importorskip("torch", reason="collectives need torch")

from tests.cpu.test_collectives_random import Draw, both, check_random, draws
from tests.helpers.collective_bench import Bench

__all__ = ["both"]


@pytest.mark.timeout(3600)
@settings(settings.get_profile("soak"), max_examples=1_200)
@given(drawn=draws())
def test_pl4_random_graphs_with_collectives_give_the_same_in_one_thread(both: tuple[Bench, Bench], drawn: Draw) -> None:
    check_random(both, drawn)
