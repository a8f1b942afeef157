"""Gradients of the operators between processes, on CPU tensors: every candidate against torch, unsplit, in float64."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="operators take torch tensors")

from tests.helpers.ops_gradient_cases import CASES
from tests.helpers.ranks import suite

TestGradients = suite(CASES, 3, limit_s=150)
