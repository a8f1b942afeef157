"""Calibration gives figures that this machine can have, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator

import pytest

import crossfade
from crossfade.api.calibrate import calibrate
from crossfade.schedule.cost import CostModel


@pytest.fixture(scope="module")
def told() -> list[tuple[str, float]]:
    return []


@pytest.fixture(scope="module")
def costs(told: list[tuple[str, float]]) -> Iterator[CostModel]:
    yield calibrate(lambda stage, done: told.append((stage, done)))
    crossfade.shutdown()


@pytest.mark.timeout(90)
def test_every_figure_of_a_ring_is_measured(costs: CostModel) -> None:
    defaults = CostModel(num_cores=len(os.sched_getaffinity(0)))
    assert costs.num_cores == defaults.num_cores
    assert costs.spin_us == defaults.spin_us
    measured = ("write_us", "write_large_us", "write_us_per_mb", "read_us", "hop_us", "wake_us", "step_us")
    for name in measured:
        assert getattr(costs, name) != getattr(defaults, name), name


def test_the_figures_are_of_the_right_order(costs: CostModel) -> None:
    """A copied MB takes between 5 us (200 GB/s) and 2 ms (0.5 GB/s), a read of 8 MB less than its write: nothing is copied."""
    assert 5 <= costs.write_us_per_mb <= 2_000
    assert 0 < costs.write_us < 1_000
    assert 0 < costs.step_us < 100
    assert costs.read_time_us(8_000_000) < costs.write_time_us(8_000_000)


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="gloo needs torch")
def test_gloo_moves_a_mb_slower_than_a_ring_and_takes_its_sender_s_core(costs: CostModel) -> None:
    defaults = CostModel()
    assert costs.gbs != defaults.gbs
    assert costs.transfer_time_us(8_000_000) > costs.write_time_us(8_000_000)
    assert 0 < costs.send_host_time_us(1_000_000) <= costs.transfer_time_us(1_000_000)


def test_progress_is_told_from_the_first_stage_to_the_end(costs: CostModel, told: list[tuple[str, float]]) -> None:
    assert costs is not None
    parts = [done for _, done in told]
    assert (parts[0], parts[-1]) == (0.0, 1.0)
    assert parts == sorted(parts)
    assert "hops" in [stage for stage, _ in told]


def test_no_session_is_left(costs: CostModel) -> None:
    assert costs is not None
    assert not crossfade.is_initialized()


def test_it_is_refused_while_a_session_is_running_and_leaves_that_alone() -> None:
    crossfade.init(engine="inline")
    try:
        with pytest.raises(crossfade.SessionError, match=r"a session is running(.|\n)*hint: .*crossfade\.shutdown\(\)"):
            calibrate()
        assert crossfade.is_initialized()
    finally:
        crossfade.shutdown()


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="gloo needs torch")
def test_a_collective_takes_longer_than_a_hop_and_is_no_guess(costs: CostModel) -> None:
    """They are measured one after the other, and others may take a core in one of these moments: again then, two times at most."""
    for _ in range(2):
        if costs.hop_us < costs.collective_us:
            break
        costs = calibrate()
    assert costs.hop_us < costs.collective_us < 1e6
    assert costs.collective_us != CostModel().collective_us
