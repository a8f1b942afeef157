"""Ranges around methods, by a module in the place of the real ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest

import crossfade
from crossfade.runtime.nvtx import Ranges, find_ranges


class Adder:
    def add(self, x: int) -> int:
        return x + 1

    def fail(self, x: int) -> int:
        raise ValueError("planted")


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def _nvtx(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that writes down what it is told."""
    module = ModuleType("nvtx")
    vars(module).update(push_range=lambda name: said.append(name), pop_range=lambda: said.append("end"))
    monkeypatch.setitem(sys.modules, "nvtx", module)


@pytest.fixture
def adder() -> Iterator[crossfade.ActorHandle]:
    crossfade.init(engine="inline")
    yield crossfade.remote(Adder).remote()
    crossfade.shutdown()


def run(adder: crossfade.ActorHandle, *methods: str) -> None:
    node = crossfade.InputNode()
    for method in methods:
        node = getattr(adder, method).bind(node)
    with node.compile() as graph:
        for x in range(2):
            try:
                graph.execute(x).get()
            except ValueError:
                pass


@pytest.mark.usefixtures("_nvtx")
def test_each_method_has_a_range_with_its_name(
    adder: crossfade.ActorHandle, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CROSSFADE_NVTX", "1")
    run(adder, "add", "fail")
    assert said == ["Adder0.add (node n0)", "end", "Adder0.fail (node n1)", "end"] * 2


@pytest.mark.usefixtures("_nvtx")
@pytest.mark.parametrize("value", [None, "", "0"])
def test_off_there_is_nothing(
    adder: crossfade.ActorHandle, said: list[str], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("CROSSFADE_NVTX", raising=False)
    if value is not None:
        monkeypatch.setenv("CROSSFADE_NVTX", value)
    assert find_ranges() is None
    run(adder, "add")
    assert said == []


def fail(*args: str) -> None:
    raise RuntimeError("NVTX functions not installed")


@pytest.mark.parametrize("torch", [None, SimpleNamespace(range_push=fail, range_pop=fail)], ids=["absent", "for CPUs"])
def test_where_nothing_can_make_ranges_that_is_said(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], torch: object
) -> None:
    monkeypatch.setenv("CROSSFADE_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setitem(sys.modules, "torch", torch and SimpleNamespace(cuda=SimpleNamespace(nvtx=torch)))
    assert find_ranges() is None
    assert "hint: pip install nvtx" in capfd.readouterr().err


def test_torch_makes_them_where_it_can(monkeypatch: pytest.MonkeyPatch, said: list[str]) -> None:
    nvtx = SimpleNamespace(range_push=said.append, range_pop=lambda: said.append("end"))
    monkeypatch.setenv("CROSSFADE_NVTX", "1")
    monkeypatch.setitem(sys.modules, "nvtx", None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(nvtx=nvtx)))
    ranges = find_ranges()
    assert isinstance(ranges, Ranges)
    said.clear()
    assert not ranges.wrap(lambda: False, "A.f (node n3)")()
    assert said == ["A.f (node n3)", "end"]
