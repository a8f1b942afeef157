"""Split layers and models between processes, on CPU tensors: trained beside the unsplit ones."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="layers take torch tensors")

from tests.helpers.ops_modules import CASES
from tests.helpers.ranks import suite

TestModules = suite(CASES, 2, limit_s=150)
