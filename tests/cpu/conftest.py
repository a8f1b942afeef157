"""What tests of faults share: a session on processes, and a pipe to stop an actor at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import crossfade


@pytest.fixture
def local() -> Iterator[None]:
    """A session on the local engine."""
    crossfade.init()
    yield
    crossfade.shutdown()


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """A named pipe."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path
