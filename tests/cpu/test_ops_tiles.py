"""The candidate ``tiles`` between processes, on CPU tensors and in Triton's interpreter, against float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="operators take torch tensors")

from tests.helpers.ops_tile_cases import TILE_CASES
from tests.helpers.ranks import suite
from tests.helpers.triton_programs import needs_triton

_THREE = ("tile_shapes",)

TestTwoRanks = needs_triton(
    suite({name: case for name, case in TILE_CASES.items() if name not in _THREE}, 2, limit_s=120, interprets=True)
)
TestThreeRanks = needs_triton(suite({name: TILE_CASES[name] for name in _THREE}, 3, limit_s=120, interprets=True))
