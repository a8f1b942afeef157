"""Processes that are killed at any moment, many times (CH-3)."""

from __future__ import annotations

import importlib.util

import pytest

from tests.helpers.kills import kill_once


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", range(10_000, 10_240))
def test_a_killed_process_is_named_and_nothing_stays(seed: int) -> None:
    kill_once(seed)


@pytest.mark.timeout(120)
@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="gloo is torch's")
@pytest.mark.parametrize("seed", range(11_000, 11_030))
def test_a_killed_process_is_named_and_nothing_stays_over_gloo(seed: int) -> None:
    kill_once(seed, transport="gloo")
