"""The backend ``crossfade`` of torch.distributed between two ranks that share one GPU, which NCCL's collectives refuse."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.p2p_backend_cases import CASES
from tests.helpers.ranks import suite

TestTransfers = suite(
    {name: CASES[name] for name in ("tags_in_reverse", "a_batch", "from_any_rank", "pipelines", "options")},
    2,
    "cuda",
    limit_s=200,
)
