"""Two batches of an unmodified module on two ranks that share one GPU, or have one each."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

from tests.helpers.batches_gpu_cases import SHARED
from tests.helpers.ranks import suite

TestTwoRanks = suite(SHARED, 2, "cuda", limit_s=240)
