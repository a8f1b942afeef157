"""Operators of `crossfade.ops` between processes, on CPU tensors: every candidate against products in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="operators take torch tensors")

from tests.helpers.ops_cases import CASES
from tests.helpers.ranks import suite

TestOperators = suite(CASES, 3, limit_s=150)
