"""The Ray engine on two nodes with a GPU each: edges and collectives between them by NCCL."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from tests.helpers.programs import ray_program

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install crossfade[ray]"
)


def test_tensors_and_a_collective_go_between_two_nodes_by_nccl() -> None:
    ran = ray_program("-m", "tests.helpers.ray_gpus_two", timeout_s=240)
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"')]
    assert lines, ran.stdout[-3000:] + ran.stderr[-3000:]
    said: dict[str, Any] = json.loads(lines[-1])
    assert said["devices"] == [[0], [1]]
    assert said["transports"] == ["nccl"]
    assert said["collective"] == "nccl"
    for size, told in zip((1, 1000, 1_000_000, 3), said["results"], strict=True):
        total = size * (size - 1) / 2
        assert told == [["cuda", total], ["cuda", 3 * total], ["cuda", 3 * total]]
