"""Tagged transfers, and the backend of torch.distributed, between two GPUs."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.p2p_ahead_cases import CASES as AHEAD
from tests.helpers.p2p_ahead_cases import STAGED as AHEAD_STAGED
from tests.helpers.p2p_ahead_cases import USUAL
from tests.helpers.p2p_backend_cases import CASES as BACKEND_CASES
from tests.helpers.p2p_cases import CASES, FAR, RANDOM, STAGED
from tests.helpers.ranks import suite

TestTransfers = suite({**CASES, **RANDOM}, 2, "cuda", limit_s=200)
TestAhead = suite({**AHEAD, **USUAL}, 2, "cuda", limit_s=200)
TestAheadStaged = suite(AHEAD_STAGED, 2, "cuda", limit_s=200)
TestStaged = suite(STAGED, 2, "cuda", limit_s=200)
TestFar = suite(FAR, 2, "cuda", limit_s=200)
TestBackend = suite(BACKEND_CASES, 2, "cuda", limit_s=200)
