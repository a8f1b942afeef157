"""Processes that are killed at any moment (CH-3)."""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.counts import num
from tests.helpers.kills import kill_once

SEEDS = (*range(15), 18, *range(20, num(20, 260)))
"""With them the driver and each actor is a victim, three of them while the program starts."""


@pytest.mark.soak
@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_process_is_named_and_nothing_stays(seed: int) -> None:
    kill_once(seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(2000, num(2004, 2100)))
def test_a_killed_process_is_named_and_nothing_stays_where_actors_are_forked(seed: int) -> None:
    kill_once(seed, preload=("numpy",))


@pytest.mark.soak
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="gloo is torch's")
@pytest.mark.parametrize("seed", range(1000, num(1001, 1030)))
def test_a_killed_process_is_named_and_nothing_stays_over_gloo(seed: int) -> None:
    kill_once(seed, transport="gloo")
