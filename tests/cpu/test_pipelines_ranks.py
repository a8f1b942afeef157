"""Stages from `crossfade.pipelines.split` train by torch's schedules as the model in one piece does."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="pipelines of torch modules")

from tests.helpers.pipeline_cases import CASES
from tests.helpers.ranks import suite

TestTwoRanks = suite(CASES, 2, limit_s=100)
