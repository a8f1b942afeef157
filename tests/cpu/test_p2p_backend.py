"""The backend ``crossfade`` of torch.distributed, on CPU tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="a backend of torch.distributed")

from tests.helpers.p2p_backend_cases import CASES
from tests.helpers.ranks import suite

TestTwoRanks = suite(CASES, 2, limit_s=150)
TestThreeRanks = suite({name: case for name, case in CASES.items() if name != "pipelines"}, 3, limit_s=60)
