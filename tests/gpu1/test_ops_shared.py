"""Operators of `crossfade.ops` between four ranks on one GPU, or as many as there are: several peers, which two ranks lack."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.ops_cases import GPU_CASES
from tests.helpers.ranks import suite

TestOperators = suite(GPU_CASES, 4, "cuda", limit_s=400)
