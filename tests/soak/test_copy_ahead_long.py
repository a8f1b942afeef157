"""The interleavings of ``make test``, twenty times as many."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="tensors by themselves need torch")

from tests.cpu.test_copy_ahead_proof import test_values_are_whole_and_in_order_whoever_comes_first

__all__ = ["test_values_are_whole_and_in_order_whoever_comes_first"]
