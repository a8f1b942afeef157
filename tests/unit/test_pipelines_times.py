"""Times of stages on a GPU, with a stopwatch that knows what it was started for."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="stages are torch's")

import torch
from torch import nn

from crossfade.pipelines import measure_stages as measuring
from crossfade.pipelines.measure_stages import RunnableStage, StageTimes, Tensors, measure_stages
from crossfade.pipelines.timing import Loss, PassTime

HOST_US, DEVICE_US = [3.0, 9.0, 5.0, 6.0, 4.0], 7.0
"""What the stopwatch says, in turns, of the host, and what of the GPU."""


class FakeWatch:
    num_started = 0

    def __init__(self, device: torch.device) -> None:
        self._behind_us = 0.0

    def start(self, behind_us: float = 0.0) -> None:
        self._behind_us = behind_us

    def stop(self) -> PassTime:
        if self._behind_us:
            assert self._behind_us == pytest.approx(1.5 * max(HOST_US)), (
                "as long as the host took at most, and half of that"
            )
            return PassTime(device_us=DEVICE_US)
        FakeWatch.num_started += 1
        return PassTime(host_us=HOST_US[FakeWatch.num_started % len(HOST_US)])


def stages() -> list[RunnableStage]:
    def runnable(layer: nn.Module) -> RunnableStage:
        def run(values: Tensors) -> Tensors:
            return (layer(*values),)

        return RunnableStage(run, [*layer.parameters()], [])

    return [runnable(nn.Linear(4, 4)) for _ in range(3)]


def test_every_pass_is_timed_on_the_host_and_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "Stopwatch", FakeWatch)
    loss = Loss(nn.functional.mse_loss, torch.zeros(2, 4))
    found = measure_stages(stages(), (torch.ones(2, 4),), loss, torch.device("cuda"), 9)
    for index, times in enumerate(found):
        for name in ("forward", "backward", "input", "weight"):
            if (index, name) == (0, "input"):
                assert times.input == PassTime(), "the first stage does its whole backward pass as the second part"
            else:
                passed = getattr(times, name)
                assert passed.host_us in HOST_US
                assert passed.device_us == DEVICE_US


def test_a_stage_takes_what_keeps_its_host_or_its_gpu_busier() -> None:
    hosts = StageTimes(PassTime(5, 1), PassTime(4, 6), None, None, 0, 0, 0)
    assert (hosts.time_us, hosts.busier_us) == (9, (5, 4))
    gpus = StageTimes(PassTime(5, 1), PassTime(4, 9), None, None, 0, 0, 0)
    assert (gpus.time_us, gpus.busier_us) == (10, (1, 9))
