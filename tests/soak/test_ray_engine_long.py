"""The Ray engine: many random graphs, many kills, nodes that die, and two hosts whose link is cut."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Any

import pytest

from tests.helpers.programs import ray_program
from tests.helpers.ray_cases import LONG
from tests.helpers.two_hosts import NOT_ALLOWED

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install crossfade[ray]"
)

_NUM_KILLS, _NUM_CUTS = int(os.environ.get("KILLS", "100")), int(os.environ.get("CUTS", "20"))


@pytest.mark.parametrize("name", LONG)
def test_long_case(name: str) -> None:
    ran = ray_program("-m", "tests.helpers.ray_cases", name, timeout_s=1800, KILLS=str(_NUM_KILLS))
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"')]
    assert lines, ran.stdout[-3000:] + ran.stderr[-3000:]
    said: dict[str, str] = json.loads(lines[-1])
    assert not said[name], said[name]


def _said_on_two_hosts(module: str, **environment: str) -> dict[str, Any]:
    ran = ray_program("-m", "tests.helpers.ray_two_hosts", module, timeout_s=900, **environment)
    if ran.returncode == NOT_ALLOWED:
        pytest.skip(
            f"no namespaces here: {ran.stderr.strip()}: the cluster of two nodes goes the same way over loopback"
        )
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"')]
    assert lines, ran.stdout[-3000:] + ran.stderr[-3000:]
    said: dict[str, Any] = json.loads(lines[-1])
    return said


@pytest.fixture(scope="module")
def apart() -> dict[str, Any]:
    return _said_on_two_hosts("tests.helpers.ray_apart", CUTS=str(_NUM_CUTS))


def test_a_value_for_three_readers_crosses_the_link_once(apart: dict[str, Any]) -> None:
    """By the interface's own counter."""
    assert apart["values"] == [[k] * 3 for k in range(5)]
    assert 1.0 <= apart["times_crossed"] < 1.1


def test_a_collective_crosses_the_link(apart: dict[str, Any]) -> None:
    """Its two actors are on the two hosts, so all that one brings has to leave it, whatever gloo's algorithm."""
    assert apart["reduced"] == [2_000_000.0] * 2
    assert 1.0 <= apart["times_reduced_crossed"] < 2.2


def test_a_link_that_is_cut_is_an_error_that_names_actor_and_node(apart: dict[str, Any]) -> None:
    assert len(apart["cuts"]) == _NUM_CUTS
    for error, taken_s in apart["cuts"]:
        assert "actor Worker" in error
        assert "10.213.7.2" in error
        assert taken_s < 15
    assert apart["afterwards"] == 7  # an actor of this side in another graph


def test_a_slow_link_that_loses_packets_delays_and_changes_nothing() -> None:
    """20 ms each way, and one packet of a hundred is lost: every value is right, nobody is taken for dead, and a death is told."""
    said = _said_on_two_hosts("tests.helpers.ray_slow_link", SLOW_LINK="20 0.01")
    assert said["taken_s"] > 0.04
    assert said["num_sent_again"] > 0
    assert said["num_right"] == 60
    assert said["reduced"] == [[2.0 * number] * 2 for number in (1, 1000, 100_000)]
    error, taken_s = said["death"]
    assert "actor Worker1" in error
    assert "10.213.7.2" in error
    assert taken_s < 5
