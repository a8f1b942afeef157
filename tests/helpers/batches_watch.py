"""Cases of a host that becomes slower or faster after a choice that depends on how long launches take."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from crossfade.batches import interleave, interleaved
from crossfade.batches.choice import calibration, tuner, watch
from crossfade.batches.choice.calibration import Moves, Way
from crossfade.batches.choice.tuner import Tuner
from crossfade.batches.choice.watch import Watch
from crossfade.batches.coroutines.parts import current_part
from crossfade.batches.ranks import agreement as batches_agreement
from crossfade.batches.ranks.agreement import Agreement
from tests.helpers.batches_models import all_sum
from tests.helpers.ranks import Case

NUM_ROWS = 8
FAST_MS, SLOW_MS, SLOWEST_MS, WHOLE_MS = 1.0, 18.0, 60.0, 30.0
SHORT_WINDOW = 4


class Clock:
    """Time that passes where a module computes, and nowhere else; on a GPU, time itself."""

    def __init__(self) -> None:
        self.is_real = False
        self._now_ns = 0

    def sleep(self, taken_ms: float) -> None:
        if self.is_real:
            time.sleep(taken_ms / 1e3)
        else:
            self._now_ns += int(taken_ms * 1e6)

    def perf_counter(self) -> float:
        return self._now_ns / 1e9

    def perf_counter_ns(self) -> int:
        return self._now_ns


clock = Clock()


class Slowing(nn.Module):
    """A batch by itself keeps the device busy for `WHOLE_MS`; an interleaved one keeps the host busy for ``part_ms``.

    Its collective is a sum over all ranks, or, with ``group``, one whose result is not used.
    """

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.part_ms = FAST_MS
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        if current_part() is not None:
            clock.sleep(self.part_ms)
        elif x.is_cuda:
            busy: Any = torch.cuda._sleep
            busy(int(WHOLE_MS * 1e6 * 1.5))  # cycles
        else:
            clock.sleep(WHOLE_MS)
        if self.group is None:
            return all_sum(x * self.scale)
        dist.all_reduce(torch.ones(1, device=x.device), group=self.group)
        return x * self.scale


@contextmanager
def short_measuring(device: str) -> Iterator[None]:
    """Measuring takes tenths of a second. On a CPU, tuners believe that they are on a GPU, and time is the clock's."""
    clock.is_real = device == "cuda"
    with pytest.MonkeyPatch.context() as patched:
        for name, taken_ms in (("WARM_MS", 40.0), ("_ROW_MS", 8.0)):
            patched.setattr(calibration, name, taken_ms)
        patched.setattr(watch, "WINDOW_MS", 1.0)
        patched.setattr(watch, "LEAST_STEPS", SHORT_WINDOW)
        if device != "cuda":
            patched.setattr(Tuner, "on_gpu", True)
            patched.setattr(Tuner, "_read_clock", lambda self, step: None)
            patched.setattr(tuner, "mark", lambda *, on_gpu: clock.perf_counter_ns())
            patched.setattr(Tuner, "_waited_s", lambda self: 0.0)
            for module in (tuner, watch):
                patched.setattr(module, "time", clock)
            patched.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
            patched.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        yield


def _until(handle: Any, step: Callable[[], Any], *, is_settled: bool, most: int = 400) -> int:
    """How many steps it took until the ways are measured, or a way is chosen."""
    for number in range(1, most):
        step()
        if handle.report().is_settled is is_settled:
            return number
    raise AssertionError(f"{most} steps later: {handle.report()}")


def _all_said(own: object) -> None:
    said: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(said, own)
    assert len({str(each) for each in said}) == 1, said


def _handle(model: Slowing, device: str) -> tuple[Any, Callable[[], None]]:
    """A handle, and a training step of it whose result is checked."""
    x = torch.arange(NUM_ROWS * 2.0, device=device).view(NUM_ROWS, 2)
    handle = interleave(model)

    def step() -> None:
        model.zero_grad()
        output = handle(x)
        assert torch.equal(output, x * dist.get_world_size(model.group))
        output.sum().backward()
        assert model.scale.grad is not None
        assert model.scale.grad.item() == x.sum().item() * dist.get_world_size(model.group)

    return handle, step


def _whole_steps(model: Slowing, device: str) -> tuple[Any, Callable[[], None]]:
    x = torch.arange(NUM_ROWS * 2.0, device=device).view(NUM_ROWS, 2)
    steps = interleaved()

    def loss_of(rows: Tensor) -> Tensor:
        total: Tensor = model(rows).sum()
        return total

    def step() -> None:
        model.zero_grad()
        with steps as run:
            for half in (x[:3], x[3:]):
                run(loss_of, half)
            loss = run.backward()
        assert loss.item() == x.sum().item() * dist.get_world_size() / 2

    return steps, step


def a_host_that_becomes_slow(device: str) -> None:
    """One rank's: all go back to one batch in the same step."""
    model = Slowing().to(device)
    with short_measuring(device):
        handle, step = _handle(model, device)
        _until(handle, step, is_settled=True)
        assert handle.report().way != "one batch", handle.report()
        for _ in range(3 * SHORT_WINDOW):
            step()
        assert handle.report().is_settled, "it is as fast as it was"
        if dist.get_rank() == dist.get_world_size() - 1:
            model.part_ms = SLOWEST_MS
        numbers = [_until(handle, step, is_settled=False)]
        assert numbers[0] <= 3 * SHORT_WINDOW + 1
        assert "are measured again" in handle.report().reason
        numbers.append(_until(handle, step, is_settled=True))
        report = handle.report()
        assert report.way == "one batch", report
        ways = {"one batch", "process groups"} | ({"copy engines"} if device == "cuda" else set())
        assert set(report.measured_ms) == ways
        assert report.communication_ms is None, "that was the other way's"
        for _ in range(3 * SHORT_WINDOW):
            step()
        assert handle.report().is_settled
        _all_said(numbers)


def a_host_that_is_slow_for_a_moment(device: str) -> None:
    """The way stays chosen, and its windows are twice as long from then on."""
    model = Slowing().to(device)
    with short_measuring(device):
        steps, step = _whole_steps(model, device)
        _until(steps, step, is_settled=True)
        assert steps.report().way != "one batch", steps.report()
        for number in range(2):
            assert steps._last._watcher._watch.window == SHORT_WINDOW << number
            model.part_ms = SLOWEST_MS
            numbers = [_until(steps, step, is_settled=False)]
            model.part_ms = FAST_MS
            numbers.append(_until(steps, step, is_settled=True))
            assert steps.report().way != "one batch", steps.report()
            _all_said(numbers)


def a_host_that_becomes_fast(device: str) -> None:
    """All are slow while ways are measured. They interleave when they are fast, and no more when they are slow again."""
    model = Slowing().to(device)
    with short_measuring(device), pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch, "loop_us", lambda: 10.0 if model.part_ms == FAST_MS else 17.0)
        for make, slow_ms in ((_handle, SLOW_MS), (_whole_steps, 2 * SLOW_MS)):
            model.part_ms = slow_ms
            handle, step = make(model, device)
            _until(handle, step, is_settled=True)
            assert handle.report().way == "one batch", handle.report()
            for _ in range(3 * SHORT_WINDOW):
                step()
            assert handle.report().is_settled, "it is as slow as it was"
            numbers = list[int]()
            for part_ms in (FAST_MS, slow_ms):
                model.part_ms = part_ms
                numbers.append(_until(handle, step, is_settled=False))
                assert "faster" in handle.report().reason or part_ms == slow_ms, handle.report()
                numbers.append(_until(handle, step, is_settled=True))
                assert (handle.report().way == "one batch") == (part_ms == slow_ms), handle.report()
            _all_said(numbers)


def ranks_that_make_different_numbers_of_calls(device: str) -> None:
    """Of whole batches, whose collectives are each rank's own. One waits for the other once, and the choice stays."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    model, rank = Slowing(groups[dist.get_rank()]).to(device), dist.get_rank()
    with short_measuring(device), pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch, "loop_us", lambda: 10.0 if model.part_ms == FAST_MS else 17.0)
        patched.setattr(batches_agreement, "_MOST_WAITED", timedelta(seconds=0.3))
        model.part_ms = SLOW_MS
        handle, step = _handle(model, device)
        _until(handle, step, is_settled=True)
        assert handle.report().way == "one batch", handle.report()
        dist.barrier()
        for each in range(dist.get_world_size()):
            if rank == each:
                for _ in range(4 * SHORT_WINDOW):
                    step()
            dist.barrier()
        model.part_ms = FAST_MS
        for _ in range(6 * SHORT_WINDOW):
            step()
        assert handle.report().way == "one batch", handle.report()
        assert handle.report().is_settled
        assert "a rank has waited too long for the others" in str(handle.report())


def watches_that_agree(device: str) -> None:
    """Ranks of random speeds, with random pauses, have the same answers in the same steps."""
    own = random.Random(dist.get_rank())
    agreement, shared = Agreement(None, timeout_s=20), random.Random("shared")
    votes = agreement.votes()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(watch, "loop_us", lambda: own.uniform(8.0, 20.0))
        patched.setattr(watch, "_LOOPS_APART_S", 0.0)
        for _ in range(40):
            step_ms, num_doublings, way = shared.choice([10.0, 300.0]), shared.choice([0, 1]), Way(Moves.GROUPS)
            watches_one_batch = shared.random() < 0.5
            slow = (
                {"slow_us": own.choice([17.0, 19.0, float("inf")])}
                if watches_one_batch
                else {"limit_ms": shared.choice([1.0, 5.0, 9.0])}
            )
            watched, answers = Watch(votes, step_ms, num_doublings, **slow), list[int]()
            for step in range(shared.randint(1, 300)):
                if watched.has_changed():
                    answers.append(step)
                for _ in range(own.choice([0, 1, 1, 2])):
                    watched.note_launches(way, own.uniform(0.0, 10.0))
                if own.random() < 0.005:
                    time.sleep(0.01)
            _all_said(answers)


def a_rank_that_makes_more_calls(device: str) -> None:
    """It waits once, and then there are no more votes on any rank."""
    votes, rank = Agreement(None, timeout_s=0.3).votes(), dist.get_rank()
    assert votes.vote(says_yes=rank == 0) is None, "there is no question before the first"
    dist.barrier()
    assert votes.vote(says_yes=False), "of rank 0"
    dist.barrier()
    if rank == 0:
        answers = [votes.vote(says_yes=False) for _ in range(2)]
        assert answers == [False, None]
        began_s = time.perf_counter()
        assert votes.vote(says_yes=True) is None
        assert time.perf_counter() - began_s < 0.1, "it does not wait again"
    dist.barrier()
    if rank != 0:
        answers = [votes.vote(says_yes=True) for _ in range(3)]
        assert answers == [False, None, None]
    dist.barrier()


WATCHES: dict[str, Case] = {
    "a_host_that_becomes_slow": a_host_that_becomes_slow,
    "a_host_that_becomes_fast": a_host_that_becomes_fast,
    "a_host_that_is_slow_for_a_moment": a_host_that_is_slow_for_a_moment,
    "ranks_that_make_different_numbers_of_calls": ranks_that_make_different_numbers_of_calls,
    "watches_that_agree": watches_that_agree,
    "a_rank_that_makes_more_calls": a_rank_that_makes_more_calls,
}
