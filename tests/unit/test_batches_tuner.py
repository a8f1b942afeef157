"""A tuner that believes it is on a GPU: what it measures, when it settles, and what it asks the machine meanwhile."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="batches are torch's")

import torch

from crossfade.batches.choice import tuner
from crossfade.batches.choice.calibration import MOST_STEPS, WARM_MS, Moves, Way, trials
from crossfade.device.clocks import GpuLoad
from tests.helpers.nvml import FakeNvml

ONE, GROUPS, _ = (Way(moves) for moves in Moves)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """A tuner believes that it is on a GPU, whose clock can be read."""
    nvml = FakeNvml(100)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="1"))
    monkeypatch.setattr(tuner, "mark", lambda *, on_gpu: 0.0)
    monkeypatch.setattr(tuner, "us_between", lambda begin, end: 1000.0)
    return nvml


@pytest.mark.parametrize(("warm_us", "wanted"), [(9_950.0, ONE), (9_850.0, GROUPS)])
def test_a_choice_between_close_ways_stands_when_the_gpu_is_warm(
    warm_us: float, wanted: Way, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By then 1 % is enough."""
    measured, ways = tuner.Tuner([ONE, GROUPS], "", None, "cuda", 2), list[Way]()
    taken_us = {ONE: 10_000.0, GROUPS: 9_700.0}
    monkeypatch.setattr(tuner, "us_between", lambda begin, end: end)
    monkeypatch.setattr(tuner, "mark", lambda *, on_gpu: taken_us[ways[-1]] if ways else 0.0)
    said = set[str]()
    while measured.chosen is None:
        step = measured.begin()
        ways.append(step.way)
        measured.finish(step, torch.zeros(1), None)
        if len(ways) == MOST_STEPS + 1:
            report = measured.report()
            assert (report.way, report.is_settled) == ("process groups", False)
            assert "it is compared once more with one batch" in report.reason
            taken_us.update({ONE: 10_000.0, GROUPS: warm_us})
        said.add(measured.report().way)
    assert measured.chosen == wanted
    assert ("no way wins by 1%" in measured.report().reason) == (wanted == ONE)
    assert said == {"one batch", "process groups"}
    assert len(ways) >= MOST_STEPS + WARM_MS / 9.7


def test_a_way_that_a_busy_host_makes_slow_is_not_chosen_for_a_few_fast_steps(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured, ways = tuner.Tuner([ONE, GROUPS], "", None, "cuda", 2), list[Way]()
    taken_us, host_s = {ONE: 66_000.0, GROUPS: 57_000.0}, {ONE: 0.015, GROUPS: 0.053}
    monkeypatch.setattr(tuner, "us_between", lambda begin, end: end)
    monkeypatch.setattr(tuner, "mark", lambda *, on_gpu: taken_us[ways[-1]] if ways else 0.0)
    while measured.chosen is None:
        step = measured.begin()
        ways.append(step.way)
        step.began_s -= host_s[step.way]
        measured.finish(step, torch.zeros(1), None)
        if len(ways) == MOST_STEPS + 10:
            assert measured.report().way == "process groups"
            host_s[GROUPS] = 0.085
    assert measured.chosen == ONE
    report = measured.report()
    assert "its launches take 100% of that: capture" in report.reason
    assert report.measured_ms["process groups"] == pytest.approx(85, rel=0.1)
    assert report.host_ms["process groups"] == pytest.approx(85, rel=0.1)


def test_what_a_rank_waits_for_others_is_no_launch(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    agreement: Any = SimpleNamespace(waited_s=5.0, group=None, votes=lambda: None)
    monkeypatch.setattr(tuner, "line_up", lambda group, device: None)
    monkeypatch.setattr(tuner, "maximum", lambda values, group, device: values)
    measured = tuner.Tuner([ONE, GROUPS], "", agreement, "cuda", 2)
    while measured.chosen is None:
        step = measured.begin()
        step.began_s -= 0.5 + 0.05
        agreement.waited_s += 0.5
        measured.finish(step, torch.zeros(1), None)
    assert measured.report().host_ms["process groups"] == pytest.approx(50, rel=0.2)


@pytest.mark.parametrize("others_launches_ms", [1.0, 900.0])
def test_the_slowest_rank_s_launches_decide_what_is_compared_again(
    others_launches_ms: float, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This rank has next to no launches; the ways differ by a third."""
    monkeypatch.setattr(tuner, "line_up", lambda group, device: None)
    taken_us, ways = {ONE: 1_300_000.0, GROUPS: 1_000_000.0}, list[Way]()
    monkeypatch.setattr(tuner, "us_between", lambda begin, end: end)
    monkeypatch.setattr(tuner, "mark", lambda *, on_gpu: taken_us[ways[-1]] if ways else 0.0)

    def maximum(values: Sequence[float], group: object, device: str) -> list[float]:
        *others, one, groups = values
        return [*others, one, max(groups, others_launches_ms)]

    monkeypatch.setattr(tuner, "maximum", maximum)
    agreement: Any = SimpleNamespace(waited_s=0.0, group=None)
    measured = tuner.Tuner([ONE, GROUPS], "", agreement, "cuda", 2)
    while measured.chosen is None:
        step = measured.begin()
        ways.append(step.way)
        measured.finish(step, torch.zeros(1), None)
    assert measured.chosen == GROUPS
    assert (len(ways) > MOST_STEPS + 1) == (others_launches_ms > 700.0)


def test_clock_and_power_are_read_while_ways_are_measured(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    taken_us = iter([10_000.0] * 4 + [8_000.0] * 4)
    monkeypatch.setattr(tuner, "us_between", lambda begin, end: next(taken_us))
    measured = tuner.Tuner([ONE, GROUPS], "", None, "cuda", 2)
    while measured.chosen is None:
        measured.finish(measured.begin(), torch.zeros(1), None)
    report = measured.report()
    assert report.load == GpuLoad(1500, 1980, 699.0, 700.0, is_capped=True)
    assert "its power limit" in str(report)
    assert nvml.left == 100 - sum(trial.is_timed for trial in trials([ONE, GROUPS])), "and not afterwards"
    assert not nvml.num_open


def test_training_reads_the_clock_behind_its_backward(nvml: FakeNvml) -> None:
    def train() -> None:
        measured = tuner.Tuner([ONE, GROUPS], "", None, "cuda", 2)
        for _ in range(3):
            step, output = measured.begin(), torch.ones(1, requires_grad=True) * 2
            measured.finish(step, output, None)
            left = nvml.left
            torch.autograd.backward(output)
            assert nvml.left == left - step.is_timed
        assert nvml.num_open == 1

    train()
    gc.collect()
    assert not nvml.num_open, "a kind of call that never came to an end"


def test_launches_of_a_backward_count_too_and_what_comes_before_it_does_not(nvml: FakeNvml) -> None:
    measured = tuner.Tuner([ONE, GROUPS], "", None, "cuda", 2)
    while measured.chosen is None:
        step, leaf = measured.begin(), torch.ones(1, requires_grad=True)

        def launch(_: torch.Tensor, step: tuner.Step = step) -> None:
            step.began_s -= 0.9

        leaf.register_hook(launch)  # type: ignore[no-untyped-call,unused-ignore]
        output = leaf * 2
        measured.finish(step, output, None)
        step.began_s -= 7  # the program prints its loss
        torch.autograd.backward(output, retain_graph=True)
        taken_s = step.host_s
        torch.autograd.backward(output)
        assert step.host_s == taken_s, "of the first backward"
    assert {name: 900 < ms < 1000 for name, ms in measured.report().host_ms.items()} == {
        "one batch": True,
        "process groups": True,
    }
