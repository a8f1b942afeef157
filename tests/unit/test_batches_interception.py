"""What interleaving replaces in torch is there only meanwhile; what it needs is named."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("torch", reason="batches are torch's")
pytest.importorskip("greenlet", reason="parts are greenlets: pip install crossfade[batches]")

import torch
import torch.distributed as dist

import crossfade
from crossfade.batches.carriers.process_groups import ProcessGroups
from crossfade.batches.coroutines.interception import METHODS, PACKETS, installed
from crossfade.batches.coroutines.parts import Run
from crossfade.errors import MissingDependency
from tests.helpers.scripted import Scripted


def test_what_was_replaced_is_put_back() -> None:
    def now() -> list[Any]:
        methods = [vars(dist.ProcessGroup).get(name) for name in METHODS]
        return [*methods, *(getattr(getattr(torch.ops, space), PACKETS[space].split()[0]) for space in PACKETS)]

    before = now()
    during = Run(ProcessGroups()).go([now, lambda: None])[0]
    assert all(ours is not theirs for ours, theirs in zip(before, during, strict=True) if theirs is not None)
    assert all(ours is theirs for ours, theirs in zip(before, now(), strict=True))
    with pytest.raises(ZeroDivisionError):
        Run(ProcessGroups()).go([lambda: 1 / 0, lambda: None])
    assert all(ours is theirs for ours, theirs in zip(before, now(), strict=True))
    assert not installed._users


def test_what_somebody_else_has_replaced_meanwhile_is_called_and_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    def theirs(*_: Any) -> None:
        calls.append("theirs")

    def part() -> None:
        group: Any = dist.ProcessGroup
        group.broadcast(group, None)

    Run(ProcessGroups()).go([lambda: None, lambda: None])
    monkeypatch.setattr(dist.ProcessGroup, "broadcast", theirs)
    for _ in range(2):
        Run(ProcessGroups()).go([part, part])
        assert vars(dist.ProcessGroup)["broadcast"] is theirs
    assert calls == ["theirs"] * 4
    monkeypatch.undo()
    before = vars(dist.ProcessGroup)["broadcast"]
    Run(ProcessGroups()).go([lambda: None, lambda: None])
    assert vars(dist.ProcessGroup)["broadcast"] is before is not theirs


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")
def test_parts_do_not_stop_under_a_script() -> None:
    """It calls Python through C++ that ends the process where a greenlet is switched under it."""
    scripted = torch.jit.script(Scripted())
    run = Run(ProcessGroups())
    assert run.go([lambda: scripted(torch.ones(1)).tolist(), lambda: scripted(torch.zeros(1)).tolist()]) == [[2], [1]]
    assert [dict(part.atomic) for part in run.parts] == [{"inside an operator": 1}] * 2


@pytest.mark.parametrize("function", ["enter", "leave"])
def test_what_an_interrupt_leaves_in_place_is_taken_away_later(function: str) -> None:
    before = {name: vars(dist.ProcessGroup).get(name) for name in METHODS}
    left = 0  # lines until the interrupt

    def interrupt(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        if frame.f_code.co_name in (function, "_take_away") and event == "line":
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return interrupt

    for number in range(1, 60, 3):
        left = number
        sys.settrace(interrupt)
        with suppress(KeyboardInterrupt):
            Run(ProcessGroups()).go([lambda: None, lambda: None])
        sys.settrace(None)
        Run(ProcessGroups()).go([lambda: None, lambda: None])
        assert {name: vars(dist.ProcessGroup).get(name) for name in METHODS} == before
        assert not installed._users


def test_without_greenlet_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "greenlet", None)
    for name in ("handle", "coroutines.parts"):  # to be imported again
        monkeypatch.delitem(sys.modules, f"crossfade.batches.{name}", raising=False)
    with pytest.raises(MissingDependency) as caught:
        crossfade.interleave(torch.nn.Linear(1, 1))
    assert caught.value.hint == "pip install 'crossfade[batches]'"
