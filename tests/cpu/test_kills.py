"""Processes that are killed at any moment (CH-3). ``make soak`` has fifteen times as many."""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.kills import kill_once

SEEDS = (*range(15), 18)
"""With them the driver and each actor is a victim, three of them while the program starts."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_killed_process_is_named_and_nothing_stays(seed: int) -> None:
    kill_once(seed)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="gloo is torch's")
@pytest.mark.parametrize("seed", [1000])
def test_a_killed_process_is_named_and_nothing_stays_over_gloo(seed: int) -> None:
    kill_once(seed, transport="gloo")
