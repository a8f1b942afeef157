"""A GPU of three processes that push into another one: one after the other, in the order in which it uses what comes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

import crossfade
from tests.helpers.turn_gpu_cases import check_one_after_the_other


@pytest.fixture
def session() -> Iterator[None]:
    crossfade.init(num_gpus=2)
    yield
    crossfade.shutdown()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlap", [False, True])
def test_large_tensors_come_one_after_the_other(session: None, overlap: bool) -> None:
    check_one_after_the_other(0.3, overlap=overlap)
