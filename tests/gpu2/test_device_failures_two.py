"""Two GPUs: a kernel's mistake ends all that an actor does on its GPU; whoever would have waited for it is told, and goes on."""

from __future__ import annotations

import time
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch")

import crossfade  # noqa: E402
from crossfade import Transport  # noqa: E402
from crossfade.collective import allreduce  # noqa: E402

pytestmark = pytest.mark.usefixtures("session")

LIMIT_S = 2.0
HOW = (
    r"GPU \d failed: .*; its process was ended",
    r"(GPU \d failed: .*; its process was ended|it was killed by SIGABRT)",
)
"""With NCCL torch looks as well, and ends the process as it does."""


class Worker:
    def make(self, size: int, is_bad: bool) -> Any:
        """With ``is_bad`` indices out of range, of which torch's kernel tells by an assertion on the device."""
        made = torch.arange(size, device="cuda")
        return made[made + size * is_bad]

    def total(self, value: Any) -> int:
        return int(value.sum().item())

    def ping(self) -> bool:
        return True


Remote = crossfade.remote(Worker)


def start(name: str) -> Any:
    return Remote.options(num_gpus=1, name=name).remote()


def edge(first: Any, second: Any, transport: Any) -> crossfade.CompiledGraph:
    with crossfade.InputNode() as given:
        made = first.make.bind(given.size, given.is_bad).with_tensor_transport(transport)
        graph: crossfade.CompiledGraph = second.total.bind(made).compile()
    return graph


def sums(first: Any, second: Any, transport: Any) -> crossfade.CompiledGraph:
    with crossfade.InputNode() as given:
        given_to = (given.is_bad, False)
        made = [each.make.bind(given.size, is_bad) for each, is_bad in zip((first, second), given_to, strict=True)]
        graph: crossfade.CompiledGraph = second.total.bind(allreduce.bind(made, transport=transport)[1]).compile()
    return graph


def out(first: Any, second: Any, transport: Any) -> crossfade.CompiledGraph:
    """The driver is the one who waits."""
    with crossfade.InputNode() as given:
        graph: crossfade.CompiledGraph = first.make.bind(given.size, given.is_bad).compile()
    return graph


def ping_until(actor: Any, deadline: float) -> None:
    while time.monotonic() < deadline:
        crossfade.get(actor.ping.remote(), timeout=30)


@pytest.mark.parametrize(
    ("build", "transport"),
    [
        (edge, "copy"),
        (edge, "staged"),
        (edge, Transport.NCCL),
        (sums, Transport.COPY),
        (sums, Transport.NCCL),
        (out, ""),
    ],
)
def test_a_kernel_s_mistake_is_told_of_and_the_others_go_on(build: Any, transport: Any) -> None:
    bad, other = start("bad"), start("other")
    graph = build(bad, other, transport)
    crossfade.get(graph.execute(size=100, is_bad=False), timeout=60)
    refs = [graph.execute(size=100, is_bad=is_bad) for is_bad in (False, True, False)]
    begin = time.monotonic()
    crossfade.get(refs.pop(0), timeout=30)
    with pytest.raises((crossfade.ActorError, crossfade.TaskError), match=r"\bbad\b") as found:
        crossfade.get(refs, timeout=30)
    taken_s = time.monotonic() - begin
    print(build.__name__, transport, f"{taken_s:.2f} s", type(found.value).__name__, str(found.value)[:400])
    assert taken_s < LIMIT_S
    with pytest.raises(crossfade.ActorDiedError, match=f"bad is dead: {HOW[transport == Transport.NCCL]}"):
        ping_until(bad, begin + 2 * LIMIT_S)
    graph.teardown(timeout=30)
    again = build(start("new"), other, transport)
    crossfade.get(again.execute(size=100, is_bad=False), timeout=60)
    again.teardown(timeout=30)
