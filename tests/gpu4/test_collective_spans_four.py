"""Four GPUs: collectives between actors in measured timelines, beside predicted ones."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.collective_graphs import suite

TestSpans = suite(4)
