"""Operators under torch.compile on two GPUs, by inductor, held against the same program without it."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers import ops_compile_cases
from tests.helpers.case_runner import run_module

LIMIT_S = 540.0


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What every rank said of each case; the processes are shared by all of them."""
    store = str(tmp_path_factory.mktemp("ranks") / "store")
    return run_module(ops_compile_cases.__name__, 2, "cuda", store, LIMIT_S)


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("name", ops_compile_cases.CASES)
def test_compiled_programs_give_the_same_bits(said: dict[str, list[str]], name: str) -> None:
    for rank, answer in enumerate(said[name]):
        assert answer == "ok", f"rank {rank}: {answer}"
