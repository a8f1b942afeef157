"""Hugging Face's models, sharded by their own tensor parallelism, as two interleaved batches."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")
pytest.importorskip("transformers", reason="models are those of transformers: pip install transformers")
pytest.importorskip("accelerate", reason="transformers shards by it: pip install accelerate")

from tests.helpers.batches_transformers import CASES
from tests.helpers.ranks import suite

TestTwoRanks = suite(CASES, 2, limit_s=100)
