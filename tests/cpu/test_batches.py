"""Two batches of an unmodified module, between processes on CPU tensors."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

from tests.helpers.batches_cases import CASES
from tests.helpers.batches_groups import GROUPS
from tests.helpers.ranks import suite

TestTwoRanks = suite(CASES, 2, limit_s=100)
TestThreeRanks = suite(GROUPS, 3, limit_s=100)
