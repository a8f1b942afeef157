"""The Triton kernel of `crossfade.ops`, in Triton's interpreter, and compiled."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import partial

import pytest

from tests.helpers.triton_programs import LIMIT_S, needs_triton, run, said
from tests.helpers.two_at_a_time import Ran, two_at_a_time

pytestmark = [needs_triton, pytest.mark.timeout(LIMIT_S + 20)]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    """Both at a time, since neither keeps more than one core busy."""
    cache = str(tmp_path_factory.mktemp("triton"))
    runs = {
        "interpreted": partial(run, "tests.helpers.tile_kernels", interprets=True),
        "compiled": partial(run, "tests.helpers.tile_compile", interprets=False, TRITON_CACHE_DIR=cache),
    }
    with two_at_a_time(runs) as ran:
        yield ran


def test_the_kernel_gives_what_torch_gives_and_counts_its_tiles(programs: Ran) -> None:
    assert "32 products" in said(programs["interpreted"].result())


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler for this machine may be another one")
def test_the_kernel_compiles_for_hopper_with_wide_accesses_and_without_spills(programs: Ran) -> None:
    assert "6 kernels" in said(programs["compiled"].result())
