"""What comes out of a collective and is only written to others is written inside of what the collective gives for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="collectives need torch")

import crossfade  # noqa: E402
from crossfade.collective import allreduce  # noqa: E402
from crossfade.collectives.local import LocalCollective  # noqa: E402


class Trainer:
    def grad(self, x: int) -> Any:
        return torch.tensor([x])

    def step(self, tensor: Any, more: int = 0) -> Any:
        return tensor + more


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the ends are asked, and what is done around writes."""
    lines: list[str] = []

    def pass_on(self: LocalCollective) -> Any:
        @contextmanager
        def around() -> Iterator[None]:
            lines.append("(")
            yield
            lines.append(")")

        lines.append("asked")
        return around

    monkeypatch.setattr(LocalCollective, "pass_on", pass_on)
    return lines


@pytest.fixture
def trainers() -> Iterator[list[Any]]:
    crossfade.init(engine="inline")
    yield [crossfade.remote(Trainer).remote() for _ in range(2)]
    crossfade.shutdown()


def summed(trainers: list[Any]) -> tuple[Any, list[Any]]:
    with crossfade.InputNode() as x:
        return x, allreduce.bind([each.grad.bind(x) for each in trainers])


def test_what_only_leaves_is_written_inside(trainers: list[Any], said: list[str]) -> None:
    _, sums = summed(trainers)
    with crossfade.MultiOutputNode(sums).compile() as graph:
        assert said == ["asked"] * 2
        for number in range(3):
            said.clear()
            assert crossfade.get(graph.execute(number)) == [torch.tensor([2 * number])] * 2
            assert said == ["(", ")"] * 2


def test_of_values_that_a_method_takes_here_nobody_asks(trainers: list[Any], said: list[str]) -> None:
    _, sums = summed(trainers)
    used = [each.step.bind(one) for each, one in zip(trainers, sums, strict=True)]
    with crossfade.MultiOutputNode([*used, sums[0]]).compile() as graph:
        assert crossfade.get(graph.execute(4)) == [torch.tensor([8])] * 3
    assert said == []


def test_each_party_decides_by_what_it_does_itself(trainers: list[Any], said: list[str]) -> None:
    x, sums = summed(trainers)
    crossed = trainers[0].step.bind(sums[1], x)
    with crossfade.MultiOutputNode([crossed, sums[0], trainers[0].step.bind(sums[0])]).compile() as graph:
        assert said == ["asked"]  # trainer 1 only writes
        assert crossfade.get(graph.execute(1)) == [torch.tensor([3]), torch.tensor([2]), torch.tensor([2])]
        assert said == ["asked", "(", ")"]


@pytest.mark.parametrize("options", [{"overlap": False}, {"debug": True}], ids=str)
def test_without_overlap_or_with_checks_values_are_there_when_they_are_taken(
    trainers: list[Any], said: list[str], options: dict[str, Any]
) -> None:
    _, sums = summed(trainers)
    with crossfade.MultiOutputNode(sums).compile(**options) as graph:
        assert crossfade.get(graph.execute(1)) == [torch.tensor([2])] * 2
    assert said == []
