"""The Triton kernels of `crossfade.peers`, in Triton's interpreter."""

from __future__ import annotations

import pytest

from tests.helpers.triton_programs import LIMIT_S, needs_triton, run, said


@needs_triton
@pytest.mark.timeout(LIMIT_S + 20)
def test_the_kernels_copy_and_sum_as_torch_does() -> None:
    assert "144 sums" in said(run("tests.helpers.peer_kernels", interprets=True))
