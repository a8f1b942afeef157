"""The Ray engine on a cluster of this machine, of two or three nodes, in its own process: Ray's teardown has been seen to hang."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.helpers.programs import ray_program
from tests.helpers.ray_cases import CASES, LONG

_LIMIT_S = 300.0  # 45 s alone on two cores, over 200 where two more processes compute there

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install crossfade[ray]"
    ),
    pytest.mark.timeout(_LIMIT_S + 10),
]
SHORT = [name for name in CASES if name not in LONG]  # the others are in tests/soak


@pytest.fixture(scope="module")
def said() -> dict[str, str]:
    """What became of each case."""
    ran = ray_program("-m", "tests.helpers.ray_cases", *SHORT, timeout_s=_LIMIT_S)
    lines = [line for line in ran.stdout.splitlines() if line.startswith('{"')]
    assert lines, ran.stdout[-3000:] + ran.stderr[-3000:]
    told: dict[str, str] = json.loads(lines[-1])
    return told


@pytest.mark.parametrize("name", SHORT)
def test_case(name: str, said: dict[str, str]) -> None:
    assert not said[name], said[name]
