"""An actor's device does nothing more, and nobody is told: the actor ends, and whoever would have waited hears why.

CPU tensors stand for device ones; what the device is given from then on is lost.
"""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade.api import session as sessions  # noqa: E402
from crossfade.collective import allreduce  # noqa: E402
from crossfade.device.host_driver import HostDriver  # noqa: E402
from tests.helpers.calm import calm_s  # noqa: E402
from tests.helpers.sessions import TORCH  # noqa: E402

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs: see tests/gpu2"),
]
torch.set_num_threads(1)

_LIMIT_S = 2.0
_WORDS = r"failing-?\d* is dead: GPU -1 failed: an illegal address; its process was ended"


class Worker:
    """Makes tensors on a device, until that is lost."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._is_lost = False
        for name in ("copy", "write_value", "write_values"):
            setattr(HostDriver, name, self._unless_lost(getattr(HostDriver, name)))

    def _unless_lost(self, done: Callable[..., None]) -> Callable[..., None]:
        def do(*args: Any) -> None:
            if not self._is_lost:
                done(*args)

        return do

    def make(self, size: int) -> Any:
        return torch.arange(size)

    def total(self, value: Any) -> int:
        return int(value.sum())

    def lose_device(self) -> None:
        self._is_lost = True
        HostDriver.failure = lambda self: "an illegal address"  # type: ignore[method-assign]

    def raise_when_asked(self) -> None:
        def asked(self: HostDriver) -> str:
            raise RuntimeError("nobody foresaw this")

        HostDriver.failure = asked  # type: ignore[method-assign]


Remote = crossfade.remote(Worker)


def start(name: str) -> Any:
    return Remote.options(num_gpus=1, name=name).remote()


@pytest.fixture(scope="module")
def healthy() -> Iterator[list[Any]]:
    """Two whose devices work, in a session of all tests here."""
    crossfade.init(num_gpus=3, preload=TORCH)
    yield [start(name) for name in ("other", "third")]
    crossfade.shutdown()


@pytest.fixture
def actors(healthy: list[Any]) -> Iterator[list[Any]]:
    """One that a test may break, and the two."""
    failing = start("failing")
    yield [failing, *healthy]
    for graph in list(sessions.require().graphs):
        graph.teardown(timeout=30)
    crossfade.kill(failing)


def edge(writer: Any, reader: Any, transport: Any) -> crossfade.CompiledGraph:
    with crossfade.InputNode() as size:
        made = writer.make.bind(size).with_tensor_transport(transport)
        graph: crossfade.CompiledGraph = reader.total.bind(made).compile()
    return graph


def sums(first: Any, second: Any) -> crossfade.CompiledGraph:
    with crossfade.InputNode() as size:
        made = allreduce.bind([each.make.bind(size) for each in (first, second)], transport=crossfade.Transport.COPY)
        graph: crossfade.CompiledGraph = second.total.bind(made[1]).compile()
    return graph


@pytest.mark.parametrize(
    ("make", "size", "wanted"),
    [
        (partial(edge, transport="copy"), 100, 4950),
        (partial(edge, transport="staged"), 5 << 20, 4950),
        (sums, 100, 9900),
    ],
    ids=["copy", "staged", "collective"],
)
def test_who_waits_for_its_values_is_told(actors: list[Any], make: Any, size: int, wanted: int) -> None:
    failing, other, third = actors
    graph = make(failing, other)
    assert graph.execute(100).get(timeout=30) == wanted
    crossfade.get(failing.lose_device.remote())
    begin = calm_s()
    with pytest.raises(crossfade.ActorDiedError, match=_WORDS):
        graph.execute(size).get(timeout=30)
    assert calm_s() - begin < _LIMIT_S
    graph.teardown(timeout=30)
    assert make(third, other).execute(100).get(timeout=30) == wanted


def test_an_actor_without_graphs_between_devices_is_not_asked(actors: list[Any]) -> None:
    failing, *_ = actors
    crossfade.get(failing.lose_device.remote())
    time.sleep(3 * 0.2)  # of a sentinel that has nothing to ask no event can come
    assert crossfade.get(failing.total.remote(torch.arange(100))) == 4950


def test_an_exception_in_asking_is_printed_and_ends_nothing(actors: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    failing, other, _ = actors
    graph = edge(failing, other, "copy")
    said = io.StringIO()  # pytest's capture may drop what is written while it is being read
    monkeypatch.setattr(sys, "stderr", said)
    crossfade.get(failing.raise_when_asked.remote())
    while "nobody foresaw this" not in said.getvalue():
        assert graph.execute(100).get(timeout=30) == 4950
    assert re.search(r"failing-?\d* \(pid \d+\) waits", crossfade.dump(io.StringIO()))
