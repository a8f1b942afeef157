"""Operators of `crossfade.ops`: thousands of random calls of several ranks, and of random worlds on the fake machine."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="operators take torch tensors")

from crossfade.testing.fake import sample
from tests.helpers.ops_cases import LONG_CASES
from tests.helpers.ops_gradient_cases import CASES as GRADIENT_CASES
from tests.helpers.ops_modules import CASES as MODULE_CASES
from tests.helpers.ops_worlds import OpsWorld, ops_worlds
from tests.helpers.ranks import suite

TestOf2, TestOf3, TestOf4, TestOf5 = (suite(LONG_CASES, num_ranks, limit_s=1700) for num_ranks in (2, 3, 4, 5))
TestGradientsOf2, TestGradientsOf4, TestGradientsOf5 = (suite(GRADIENT_CASES, num, limit_s=380) for num in (2, 4, 5))
TestModulesOf2, TestModulesOf4, TestModulesOf6 = (suite(MODULE_CASES, num, limit_s=380) for num in (2, 4, 6))
"""48 features are shared out."""


@pytest.mark.timeout(3600)
@settings(settings.get_profile("soak"), max_examples=2_000)
@given(world=ops_worlds(), first=st.integers(0, 1 << 32))
def test_pr1_pr2_two_thousand_random_worlds_have_no_fault(world: OpsWorld, first: int) -> None:
    verdict = sample(world, range(first, first + 20), is_strict=False)
    assert verdict.is_ok, verdict
