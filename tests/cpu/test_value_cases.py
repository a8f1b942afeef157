"""Values between the driver, actors that would have GPUs and one without, with the CPU in the GPUs' place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from tests.helpers import input_workers as cases  # noqa: E402
from tests.helpers.input_workers import InputWorker  # noqa: E402
from tests.helpers.sessions import TORCH  # noqa: E402

pytestmark = [
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="this machine has GPUs: tests/gpu1 and tests/gpu2 do the same there"
    ),
    pytest.mark.timeout(120),
]


@pytest.fixture(scope="module")
def actors() -> Iterator[list[Any]]:
    """One without a GPU, one that has one, and two that share another one."""
    crossfade.init(num_gpus=2, preload=TORCH)
    yield [crossfade.remote(InputWorker).options(num_gpus=share).remote() for share in (0, 1, 0.5, 0.5)]
    crossfade.shutdown()


@pytest.mark.parametrize("transport", ["copy", "staged"])
def test_several_readers(actors: list[Any], transport: str) -> None:
    off, writer, *readers = actors
    cases.fan_out(writer, readers, off, transport)


@pytest.mark.parametrize("device", ["default", "cpu", "cuda"])
def test_from_an_actor_without_a_gpu_and_back(actors: list[Any], device: str) -> None:
    cases.there_and_back(actors[0], actors[1], device)


@pytest.mark.parametrize("overlap", [False, True])
def test_inputs_that_are_looked_at_late(actors: list[Any], overlap: bool) -> None:
    cases.late_inputs(actors[2:], 40, overlap=overlap)


@pytest.mark.parametrize("transport", ["copy", "staged"])
def test_static_shapes_beside_dynamic_ones(actors: list[Any], transport: str) -> None:
    cases.beside_each_other(actors[1], actors[2], transport)
    cases.aside(actors[1], actors[3], transport, 20)
