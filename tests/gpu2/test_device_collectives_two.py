"""Two GPUs: collectives between the processes of actors."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from tests.helpers.collective_gpu_cases import suite

TestCollectives = suite(2)
