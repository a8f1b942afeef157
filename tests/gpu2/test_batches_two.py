"""Two batches of an unmodified module on two GPUs, by NCCL and by copy engines."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

from tests.helpers.batches_gpu_cases import CASES
from tests.helpers.ranks import suite

TestTwoGpus = suite(CASES, 2, "cuda", limit_s=240)
