"""Operators of `crossfade.ops` on four GPUs: every candidate against products in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.ops_cases import GPU_CASES
from tests.helpers.ranks import suite

TestOperators = suite(GPU_CASES, 4, "cuda", limit_s=300)
