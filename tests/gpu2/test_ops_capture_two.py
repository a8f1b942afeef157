"""`crossfade.ops.prepare` on two GPUs: every candidate is captured by its first call of a shape, and replayed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from tests.helpers import ops_prepare_cases
from tests.helpers.case_runner import run_module

LIMIT_S = 240.0


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """What every rank said of each case; the processes are shared by all of them."""
    folder = tmp_path_factory.mktemp("ranks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CROSSFADE_CACHE_DIR", str(folder))
        yield run_module(ops_prepare_cases.__name__, 2, "cuda", str(folder / "store"), LIMIT_S)


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("name", ops_prepare_cases.CASES)
def test_ranks_prepare_and_capture(said: dict[str, list[str]], name: str) -> None:
    for rank, answer in enumerate(said[name]):
        assert answer == "ok", f"rank {rank}: {answer}"
