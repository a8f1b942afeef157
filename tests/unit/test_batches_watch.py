"""A tuner that believes it is on a GPU, whose host becomes slow."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch", reason="batches are torch's")

import torch
from torch._C._distributed_c10d import HashStore

from crossfade.batches.choice import tuner, watch
from crossfade.batches.choice.calibration import Moves, Way
from crossfade.batches.choice.watch import LEAST_STEPS
from crossfade.batches.ranks.votes import Votes

ONE, GROUPS, _ = (Way(moves) for moves in Moves)
TAKEN_MS = {ONE: 1300.0, GROUPS: 1000.0}


class Alone:
    """The agreement of a rank with itself."""

    group = None
    waited_s = 0.0
    has_group = True

    def votes(self) -> Votes:
        store = HashStore()
        return Votes(store, 0, 1, timedelta(seconds=1), timedelta(seconds=1))


class Host:
    """Makes steps of a tuner. Its launches of the interleaved way take ``launches_ms``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, watches: bool = True) -> None:
        self.agreement = Alone()
        self.launches_ms = 950.0
        self.is_capturing = self.is_settled = False
        self._now: list[Way] = [ONE]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.is_capturing)
        monkeypatch.setattr(tuner.Tuner, "_read_clock", lambda tuner, step: None)
        monkeypatch.setattr(watch, "loop_us", lambda: 17.0)
        monkeypatch.setattr(tuner, "line_up", lambda group, device: self.collective([]))
        monkeypatch.setattr(tuner, "maximum", lambda values, group, device: self.collective(values))
        monkeypatch.setattr(tuner, "us_between", lambda begin, end: end)
        monkeypatch.setattr(tuner, "mark", lambda *, on_gpu: 1e3 * TAKEN_MS[self._now[0]])
        self.tuner = tuner.Tuner([ONE, GROUPS], "", cast(Any, self.agreement), "cuda", 2, watches=watches)

    def collective(self, values: list[float]) -> list[float]:
        assert not self.is_settled, "others may come between calls by then"
        return values

    def begin(self) -> tuner.Step:
        step = self.tuner.begin()
        self._now[0] = step.way
        step.began_s -= self.launches_ms / 1e3 if step.way == GROUPS else 0.0
        return step

    def settle(self) -> None:
        while self.tuner.chosen is None:
            self.tuner.finish(self.begin(), torch.zeros(1), None)
        self.is_settled = True

    def steps(self, number: int) -> None:
        for _ in range(number):
            self.tuner.finish(self.begin(), torch.zeros(1), None)


def test_a_way_whose_host_became_slow_gives_way_to_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.settle()
    assert host.tuner.chosen == GROUPS
    host.steps(4 * LEAST_STEPS)
    assert host.tuner.chosen == GROUPS
    host.launches_ms = 1700.0
    host.steps(2 * LEAST_STEPS)
    assert host.tuner.chosen is None
    assert host.tuner.report().reason == "the host has become slower; ways are measured again"
    host.settle()
    assert host.tuner.chosen == ONE
    assert "its launches take 100% of that: capture" in host.tuner.report().reason
    assert host.tuner.is_watched
    host.steps(6 * LEAST_STEPS)
    assert host.tuner.chosen == ONE, "the loop takes as long as it did"
    assert "ways were measured again: 1 x" in str(host.tuner.report())


def test_a_rank_that_does_not_tell_what_ways_took_leaves_the_choice_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.settle()
    reason = host.tuner.report().reason
    host.launches_ms = 1700.0
    host.steps(2 * LEAST_STEPS)
    assert host.tuner.chosen is None
    monkeypatch.setattr(Votes, "maximum", silent)
    host.settle()
    assert host.tuner.chosen == GROUPS
    report = host.tuner.report()
    assert report.reason == reason
    assert "a rank has waited too long for the others" in str(report)
    assert not host.tuner.is_watched
    host.steps(6 * LEAST_STEPS)
    assert host.tuner.chosen == GROUPS


def silent(votes: Votes, values: list[float]) -> None:
    votes.is_over = True


def test_the_choice_is_told_while_ways_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It won by 1.5 %, which is enough after a second comparison, and is not before one."""
    monkeypatch.setitem(TAKEN_MS, GROUPS, 1280.0)
    host = Host(monkeypatch)
    host.settle()
    assert host.tuner.chosen == GROUPS
    host.launches_ms = 1700.0
    host.steps(2 * LEAST_STEPS)
    assert host.tuner.chosen is None
    assert host.tuner.report().way == "process groups"
    host.is_capturing = True
    assert host.begin().way == GROUPS


@pytest.mark.parametrize("why", ["shapes change", "the group is destroyed", "a graph is captured"])
def test_where_ways_are_not_measured_again(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch, watches=why != "shapes change")
    host.settle()
    host.launches_ms = 1700.0
    host.agreement.has_group = why != "the group is destroyed"
    host.is_capturing = why == "a graph is captured"
    host.steps(5 * LEAST_STEPS)
    assert host.tuner.chosen == GROUPS


def test_a_captured_call_is_no_step_of_a_watch_or_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(monkeypatch)
    host.settle()
    host.launches_ms = 1700.0
    num_counted = 0
    while host.tuner.chosen is not None:
        host.is_capturing = True
        host.steps(3)
        host.is_capturing = False
        host.steps(1)
        num_counted += 1
    assert num_counted == 2 * LEAST_STEPS
    num_left = len(host.tuner._calibration._trials)
    host.is_capturing = True
    assert host.begin().way == GROUPS, "what was chosen"
    host.is_capturing = False
    assert len(host.tuner._calibration._trials) == num_left
    assert host.begin().way == ONE


def test_a_backward_behind_the_next_forward_counts_for_its_own_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two forwards, then two backwards; the second calibration begins between them."""
    host = Host(monkeypatch)
    host.settle()
    host.launches_ms = 1700.0
    with_graphs = list[torch.Tensor]()
    while host.tuner.chosen is not None or len(with_graphs) > 0:
        step, output = host.begin(), torch.ones(1, requires_grad=True) * 2
        host.tuner.finish(step, output, None)
        with_graphs.append(output)
        if len(with_graphs) == 2:
            for each in with_graphs:
                torch.autograd.backward(each)
            with_graphs.clear()
    host.settle()
    assert host.tuner.chosen == ONE
