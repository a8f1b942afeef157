"""500 random models as two or three interleaved batches, and all cases again and again: a crash at the end of a process counts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

from tests.helpers.batches_cases import CASES, meet, random_models
from tests.helpers.ranks import Case, missing, run_cases

BLOCK, NUM_MODELS = 50, 500
INSTALLED = {name: case for name, case in CASES.items() if not missing(case)}


@pytest.mark.parametrize("first", range(0, NUM_MODELS, BLOCK))
def test_random_models(first: int, tmp_path: Path) -> None:
    cases: dict[str, Case] = {"models": partial(random_models, first=first, number=BLOCK), "meet": meet}
    assert run_cases(cases, 2, "cpu", tmp_path, 300) == {name: ["ok", "ok"] for name in cases}


@pytest.mark.parametrize("number", range(20))
def test_all_cases_again(number: int, tmp_path: Path) -> None:
    assert run_cases(INSTALLED, 2, "cpu", tmp_path, 300) == {name: ["ok", "ok"] for name in INSTALLED}
