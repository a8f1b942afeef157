"""What tests with processes share: how their classes travel, a session on each engine, and a pipe to stop an actor at."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from crossfade.api.session import require
from crossfade.engines import forked
from tests.helpers.late_driver import LateDriver
from tests.helpers.sessions import TORCH, on_each_engine, opened


@pytest.fixture(autouse=True, scope="module")
def classes_travel_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """As those of a user's script do: actors need not import pytest, hypothesis and all else that a module of tests imports."""
    cloudpickle.register_pickle_by_value(request.module)
    yield
    cloudpickle.unregister_pickle_by_value(request.module)


local = opened()


inline = opened(engine="inline")


engine = on_each_engine()


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


@pytest.fixture
def late() -> LateDriver:
    return LateDriver()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A torch.distributed group of this process alone."""
    pytest.importorskip("torch", reason="groups are torch's")
    from tests.helpers.ranks import one_rank

    with one_rank(tmp_path_factory.mktemp("world")):
        yield


@pytest.fixture
def group(world: None) -> Iterator[Any]:
    """A group of crossfade's in that one."""
    from crossfade.peers.opening import open_group

    group = open_group(device="cpu", buffer_bytes=4096)
    yield group
    group.close()


session = opened("module", num_gpus=16, preload=TORCH)
"""One that claims GPUs, for all tests of a file."""


@pytest.fixture
def torn_down(session: None) -> Iterator[None]:
    """No graph outlives its test in that session."""
    yield
    for graph in list(require().graphs):
        graph.teardown(timeout=30)


@pytest.fixture
def no_templates() -> Iterator[None]:
    """A test starts the templates that it needs, and leaves none."""
    forked.end_templates()
    yield
    forked.end_templates()


@pytest.fixture
def module_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where modules are looked for."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path
