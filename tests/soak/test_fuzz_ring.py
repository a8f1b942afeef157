"""Ten minutes of fuzzing the ring's reader (CROSSFADE_FUZZ_S seconds). By hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.helpers.fuzzing import LONG, check_ring, damages, fuzz_for


@LONG
@given(damage=damages())
def _once(damage: tuple[int, list[tuple[int, int]], bytes, object]) -> None:
    check_ring(*damage)


@pytest.mark.timeout(3600)
def test_fuzz_the_rings_reader() -> None:
    fuzz_for(_once, "ring")
