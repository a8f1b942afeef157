"""Ten minutes of fuzzing frames and the control socket (CROSSFADE_FUZZ_S seconds). By hypothesis."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.fuzzing import LONG, check_frames, check_socket, fuzz_for, streams


@LONG
@given(stream=streams(), fd_counts=st.lists(st.integers(0, 3), max_size=3))
def _once(stream: tuple[list[bytes], bytes, list[int]], fd_counts: list[int]) -> None:
    check_frames(*stream)
    check_socket(*stream, fd_counts)


@pytest.mark.timeout(3600)
def test_fuzz_frames() -> None:
    fuzz_for(_once, "frames")
