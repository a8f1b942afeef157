"""The Triton kernel of `crossfade.ops`, in Triton's interpreter, and compiled."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator

import pytest

from tests.helpers.triton_programs import LIMIT_S, needs_triton, said, start

pytestmark = [needs_triton, pytest.mark.timeout(LIMIT_S + 20)]
Programs = dict[str, subprocess.Popen[str]]


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    """Both at a time, since neither keeps more than one core busy."""
    cache = str(tmp_path_factory.mktemp("triton"))
    started = {
        "interpreted": start("tests.helpers.tile_kernels", interprets=True),
        "compiled": start("tests.helpers.tile_compile", interprets=False, TRITON_CACHE_DIR=cache),
    }
    yield started
    for program in started.values():
        program.kill()
        program.communicate()


def test_the_kernel_gives_what_torch_gives_and_counts_its_tiles(programs: Programs) -> None:
    assert "32 products" in said(programs["interpreted"])


@pytest.mark.skipif(platform.machine() != "x86_64", reason="Triton's assembler for this machine may be another one")
def test_the_kernel_compiles_for_hopper_with_wide_accesses_and_without_spills(programs: Programs) -> None:
    assert "6 kernels" in said(programs["compiled"])
