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


@pytest.fixture(scope="module")
def apart() -> dict[str, Any]:
    ran = ray_program(
        "-m", "tests.helpers.ray_two_hosts", "tests.helpers.ray_apart", timeout_s=900, CUTS=str(_NUM_CUTS)
    )
    if ran.returncode == NOT_ALLOWED:
        pytest.skip(
            f"no namespaces here: {ran.stderr.strip()}: the cluster of two nodes goes the same way over loopback"
        )
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"')]
    assert lines, ran.stdout[-3000:] + ran.stderr[-3000:]
    said: dict[str, Any] = json.loads(lines[-1])
    return said


def test_a_value_for_three_readers_crosses_the_link_once(apart: dict[str, Any]) -> None:
    """By the interface's own counter."""
    assert apart["values"] == [[k] * 3 for k in range(5)]
    assert 1.0 <= apart["times_crossed"] < 1.1


def test_a_link_that_is_cut_is_an_error_that_names_actor_and_node(apart: dict[str, Any]) -> None:
    assert len(apart["cuts"]) == _NUM_CUTS
    for error, taken_s in apart["cuts"]:
        assert "actor Worker" in error
        assert "10.213.7.2" in error
        assert taken_s < 15
    assert apart["afterwards"] == 7  # an actor of this side in another graph
