"""Which stream waits for what comes out of a collective between GPUs: the compute stream, or, where it only leaves, another."""

from __future__ import annotations

import threading
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

torch: Any = pytest.importorskip("torch", reason="collectives need torch")

from crossfade.collectives.end import GroupCollective  # noqa: E402
from crossfade.collectives.group import Group  # noqa: E402
from crossfade.collectives.streams import GroupStreams  # noqa: E402
from crossfade.collectives.task import Task  # noqa: E402
from crossfade.collectives.terms import Terms  # noqa: E402
from crossfade.types import CollectiveKind, ReduceOp  # noqa: E402

COMPUTE, LEAVING = 1, 2
TERMS = Terms("c0", CollectiveKind.ALLREDUCE, ReduceOp.SUM, 0, ("A", "B"))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What is done to streams."""
    found: list[tuple[Any, ...]] = []

    def current(stream: int) -> Any:
        found.append(("current", stream))
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "stream", current)
    monkeypatch.setattr("crossfade.collectives.streams._as_torch", lambda handle, device: handle)
    return found


@pytest.fixture
def group(lines: list[tuple[Any, ...]]) -> Group:
    """On a device whose calls are written down; without a table, a mover and a thread."""
    events = iter(range(100, 200))

    def create_stream(label: str, *, is_urgent: bool = False) -> int:
        lines.append(("create", label))
        return LEAVING

    driver = SimpleNamespace(
        create_event=lambda: next(events),
        create_stream=create_stream,
        wait_event=lambda stream, event: lines.append(("wait", stream, event)),
        has_happened=lambda event: False,
    )
    made = object.__new__(Group)
    context: Any = SimpleNamespace(driver=driver, device=0, is_host=False, compute_stream=lambda: COMPUTE)
    streams = GroupStreams(context, "A, B")
    lines.clear()
    vars(made).update(reason="", streams=streams, _guard=threading.Lock(), _kept=deque())
    return made


def taken(group: Group, end: GroupCollective, event: int) -> None:
    """The program takes what an exchange with this event gave."""
    task = end._task = Task(TERMS, 0, 0, 1)
    task.done, task.result = event, [None]
    assert end.try_finish() == [None]
    assert task.is_taken


def test_the_compute_stream_waits_for_what_is_used_here(group: Group, lines: list[tuple[Any, ...]]) -> None:
    taken(group, GroupCollective(group, TERMS, 0, 0, 1), 7)
    assert lines == [("wait", COMPUTE, 7)]


def test_another_stream_waits_for_what_leaves(group: Group, lines: list[tuple[Any, ...]]) -> None:
    used, *leave = (GroupCollective(group, TERMS, number, 0, 1) for number in range(3))
    around = [end.pass_on() for end in leave]
    assert lines == [("create", "what leaves collectives of A, B")]  # one for all of them
    lines.clear()
    for event, end in enumerate((leave[0], used, leave[1]), 7):
        taken(group, end, event)
    assert lines == [("wait", LEAVING, 7), ("wait", COMPUTE, 8), ("wait", LEAVING, 9)]
    lines.clear()
    for each in around:
        assert each is not None
        with each():
            pass
    assert lines == [("current", LEAVING)] * 2
