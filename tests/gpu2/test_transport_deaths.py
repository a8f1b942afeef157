"""Two GPUs: an actor is killed while values are under way, by each transport between GPUs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from tests.helpers.transport_checks import get_all  # noqa: E402

pytestmark = pytest.mark.usefixtures("session")

LIMIT_S = 5.0


class Worker:
    def pid(self) -> int:
        return os.getpid()

    def make(self, size: int) -> Any:
        return torch.arange(size, device="cuda")

    def double(self, value: Any) -> Any:
        return value * 2

    def total(self, value: Any) -> int:
        return int(value.sum().item())


Remote = crossfade.remote(Worker)


def there_and_back(first: Any, second: Any, transport: Any) -> crossfade.CompiledGraph:
    with crossfade.InputNode() as given:
        made = first.make.bind(given).with_tensor_transport(transport)
        output = first.total.bind(second.double.bind(made).with_tensor_transport(transport))
    graph: crossfade.CompiledGraph = output.compile()
    return graph


@pytest.mark.timeout(300)
@pytest.mark.parametrize("transport", ["copy", "staged", crossfade.Transport.NCCL], ids=str)
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_actor_is_named_and_the_other_goes_on(transport: Any, victim: int) -> None:
    pair = [Remote.options(num_gpus=1, name=f"w{index}").remote() for index in range(2)]
    graph = there_and_back(pair[0], pair[1], transport)
    assert crossfade.get(graph.execute(1000), timeout=60) == 999_000
    pid = crossfade.get(pair[victim].pid.remote())
    refs = [graph.execute(20_000_000) for _ in range(5)]
    os.kill(pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(crossfade.ActorDiedError, match=f"w{victim}"):
        get_all(graph, refs)
    assert time.monotonic() - begin < LIMIT_S
    graph.teardown(timeout=60)
    again = there_and_back(pair[1 - victim], Remote.options(num_gpus=1).remote(), transport)
    assert crossfade.get(again.execute(1000), timeout=60) == 999_000
    again.teardown(timeout=60)
