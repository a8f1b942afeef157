"""Two batches of an unmodified module on two ranks that share one GPU, by gloo, and on one rank, by NCCL."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

from tests.helpers.batches_gpu_cases import BY_NCCL, SHARED
from tests.helpers.ranks import suite

TestTwoRanks = suite(SHARED, 2, "cuda", limit_s=240)
TestOneRank = suite(BY_NCCL, 1, "cuda", limit_s=240)
