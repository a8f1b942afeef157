"""Operators of `crossfade.ops`: thousands of random calls of several ranks, and of random worlds on the fake machine."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="operators take torch tensors")

from crossfade.testing.fake import sample
from tests.helpers.ops_cases import LONG_CASES, run_cases
from tests.helpers.ops_gradient_cases import CASES as GRADIENT_CASES
from tests.helpers.ops_modules import CASES as MODULE_CASES
from tests.helpers.ops_worlds import OpsWorld, ops_worlds


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("num_ranks", [2, 3, 4, 5])
def test_ranks_get_what_one_process_computes(num_ranks: int, tmp_path: Path) -> None:
    said = run_cases(num_ranks, "cpu", str(tmp_path / "store"), list(LONG_CASES), 1700)
    assert all(answer == "ok" for answers in said.values() for answer in answers), said


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("cases", "num_ranks"),
    [*product([GRADIENT_CASES], [2, 4, 5]), *product([MODULE_CASES], [2, 4, 6])],  # 48 features are shared out
    ids=lambda each: str(each) if isinstance(each, int) else "modules" if each is MODULE_CASES else "gradients",
)
def test_gradients_and_layers_of_more_ranks(cases: Any, num_ranks: int, tmp_path: Path) -> None:
    said = run_cases(num_ranks, "cpu", str(tmp_path / "store"), list(cases), 380, cases)
    assert all(answer == "ok" for answers in said.values() for answer in answers), said


@pytest.mark.timeout(3600)
@settings(settings.get_profile("soak"), max_examples=2_000)
@given(world=ops_worlds(), first=st.integers(0, 1 << 32))
def test_pr1_pr2_two_thousand_random_worlds_have_no_fault(world: OpsWorld, first: int) -> None:
    verdict = sample(world, range(first, first + 20), is_strict=False)
    assert verdict.is_ok, verdict
