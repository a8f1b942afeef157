"""Ten minutes of fuzzing the plan parser and the validator (CROSSFADE_FUZZ_S seconds). By hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.helpers.fuzzing import LONG, check_plan, fuzz_for, plan_texts


@LONG
@given(text=plan_texts())
def _once(text: str) -> None:
    check_plan(text)


@pytest.mark.timeout(3600)
def test_fuzz_plans() -> None:
    fuzz_for(_once, "plans")
