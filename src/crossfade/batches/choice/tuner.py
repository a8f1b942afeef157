"""Runs the steps of one kind of call in one way after the other, times them, and settles on the fastest with all ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from crossfade.batches.choice.calibration import Calibration, Moves, Trial, Way, choose
from crossfade.batches.choice.report import BatchesReport, Counts, hidden_of, why_no_gain, why_not_hidden
from crossfade.batches.choice.watch import Watch, Watcher
from crossfade.batches.coroutines.parts import Run
from crossfade.batches.coroutines.spans import Mark, mark, us_between
from crossfade.batches.ranks.agreement import Agreement, line_up, maximum
from crossfade.batches.tensors import leaves_of, signature
from crossfade.device.clocks import GpuClocks, GpuLoad, Sample


@dataclass
class Step:
    """One step, and how it is to be run.

    Attributes:
        way: how.
        is_checked: the ranks compare their collectives in it.
        is_timed: it counts in the calibration.
        lines_up: it begins for all ranks at once.
        records: the spans of its collectives are recorded.
        counted_by: adds up the times of launches; None where this step's do not count.
        host_s: how long its launches took, without what this rank waited for others.
        num_not_replayed: how many of its collectives were not replayed, though they could have been.
        begin, end: its time; the end may move to the end of its backward.
        began_s: when its launches began.
        waited_s: how long this rank had waited for others then, in all steps.
    """

    way: Way
    is_checked: bool = False
    is_timed: bool = False
    lines_up: bool = False
    records: bool = False
    counted_by: Calibration | Watch | None = None
    host_s: float = 0.0
    num_not_replayed: int = 0
    begin: Mark = None
    end: Mark = None
    began_s: float = field(default_factory=time.perf_counter)
    waited_s: float = 0.0


class Tuner:
    """The ways of one kind of call.

    Attributes:
        device: where the tensors are: ``"cpu"`` or ``"cuda"``.

    Args:
        ways: one batch first; a single way is not measured.
        reason: why there is but one.
        agreement: with the other ranks; None where there are none.
        num_batches: for the report.
        watches: measure again where the host has become so slow or so fast that another way may be the fastest.
    """

    def __init__(
        self,
        ways: Sequence[Way],
        reason: str,
        agreement: Agreement | None,
        device: str,
        num_batches: int,
        *,
        watches: bool = True,
    ) -> None:
        self.notes: list[str] = []
        self.chosen: Way | None = ways[0] if len(ways) == 1 else None
        self.reason = reason or "it is being measured"
        self._obstacle = reason
        self._agreement = agreement
        self.device = device
        self._num_batches = num_batches
        self._calibration = Calibration(ways)
        self._watcher: Watcher | None = None
        self._before: tuple[Way | None, str] = None, ""  # the choice that was measured again, and its reason
        if watches and agreement is not None and self.on_gpu and len(ways) > 1:
            self._watcher = Watcher(agreement, ways)
        self._times_ms: dict[Way, float] = {}  # the slowest rank's, as are those of launches
        self._launches_ms: dict[Way, float] = {}
        self._is_checked = set[Way]()
        self._has_recorded = False
        self._timed: list[Step] = []
        self._shape: tuple[str, ...] | None = None  # of the whole batch's output
        self._counts = Counts()
        self._recorded: Run | None = None
        self._clocks: GpuClocks | None = None  # while ways are measured
        self._samples: list[Sample] = []
        self._load: GpuLoad | None = None

    @property
    def on_gpu(self) -> bool:
        """Whether times are taken on a GPU."""
        return self.device == "cuda"

    @property
    def ways(self) -> Collection[Way]:
        """Those that may still be run."""
        return self._calibration.ways if self.chosen is None else [self.chosen]

    @property
    def is_watched(self) -> bool:
        """Whether the choice is watched: another one may follow it."""
        return self._watcher is not None and self._watcher.is_on

    @property
    def has_captured(self) -> bool:
        """Whether a captured one is among them."""
        return any(way.is_captured for way in self.ways)

    def begin(self) -> Step:
        """The next step. When all have been measured, the ranks agree here on a way, or on more steps, and wait for each other."""
        # Nothing can be timed while the user captures a graph, and a rank may repeat its capture alone: such calls are not counted.
        is_capturing = self.on_gpu and torch.cuda.is_current_stream_capturing()
        if self._watcher is not None and not is_capturing and self._watcher.has_changed():
            self._measure_again(self._watcher)
        trial = None if is_capturing else self._next()
        step = Step(self.chosen or Way(self._best().moves) if trial is None else trial.way)
        if trial is not None:
            step.is_timed, step.lines_up = trial.is_timed, trial.lines_up
            step.counted_by = self._calibration if trial.counts_launches else None
            if trial.begins_idle:
                torch.cuda.current_stream().synchronize()  # not the device: a receive of the user's may wait for this call
            if self._watcher is not None:
                self._watcher.note_measured(trial.way)
        elif self._watcher is not None and not is_capturing:
            step.counted_by = self._watcher.counter
        is_interleaved = step.way.moves is not Moves.ONE
        step.is_checked = is_interleaved and step.way not in self._is_checked and not step.way.is_captured
        self._is_checked.add(step.way)
        step.records = (
            trial is None
            and is_interleaved
            and not (step.is_checked or self._has_recorded or step.way.is_captured or is_capturing)
        )
        self.restart(step)
        return step

    def _best(self) -> Way:
        """The choice. While ways are measured: the one before, or the fastest way so far."""
        return self.chosen or self._before[0] or (choose(self._times_ms) if self._times_ms else Way(Moves.ONE))

    def _next(self) -> Trial | None:
        """The next step to measure; None when a way is chosen."""
        while self.chosen is None:
            trial = self._calibration.next()
            if trial is not None:
                return trial
            self._settle()
        return None

    def restart(self, step: Step) -> None:
        """The step begins now: for all ranks, where a row of steps or a timed one begins, which would have the others' lateness."""
        if step.lines_up and self._agreement is not None:
            line_up(self._agreement.group, self.device)
        step.begin = mark(on_gpu=self.on_gpu) if step.is_timed else None
        step.host_s, step.began_s, step.waited_s = 0.0, time.perf_counter(), self._waited_s()

    def _waited_s(self) -> float:
        return 0.0 if self._agreement is None else self._agreement.waited_s

    def finish(self, step: Step, output: Any, run: Run | None) -> None:
        """The step's call has returned. ``run``: of an interleaved one."""
        step.num_not_replayed = 0 if run is None or step.way.is_captured else run.num_not_replayed
        if step.is_timed:
            self._timed.append(step)
        self._end(step)
        is_measured = step.is_timed or step.counted_by is not None
        has_backward = is_measured and _around_backward(
            output, lambda: self._begin_backward(step), lambda: self._end_backward(step)
        )
        if self.chosen is None and step.way.moves is Moves.ONE and self._shape is None:
            self._shape = signature(output)
        if not has_backward:
            self._note(step)
        if run is not None:
            atomic = sum((part.atomic for part in run.parts), Counter[str]())
            self._counts = Counts(
                tuple(part.num_collectives for part in run.parts), tuple(part.num_stops for part in run.parts), atomic
            )
            if step.records:
                self._has_recorded, self._recorded = True, run

    def _end(self, step: Step) -> None:
        step.host_s += time.perf_counter() - step.began_s - (self._waited_s() - step.waited_s)
        if step.is_timed:
            step.end = mark(on_gpu=self.on_gpu)

    def _begin_backward(self, step: Step) -> None:
        """Launches go on; what the caller did since the forward was none."""
        step.began_s, step.waited_s = time.perf_counter(), self._waited_s()

    def _end_backward(self, step: Step) -> None:
        self._end(step)
        self._note(step)

    def _note(self, step: Step) -> None:
        """The step is over, with its backward."""
        if step.counted_by is not None:
            step.counted_by.note_launches(step.way, step.host_s * 1e3, step.num_not_replayed)
        self._read_clock(step)

    def _read_clock(self, step: Step) -> None:
        """Behind a step's launches, while the GPU computes; not between the marks of its time."""
        if not self.on_gpu or self.chosen is not None:
            return
        if self._clocks is None:
            uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
            self._clocks = GpuClocks(f"GPU-{uuid}")
        sample = self._clocks.read() if step.is_timed else None
        if sample is not None:
            self._samples.append(sample)

    def _close_clocks(self) -> None:
        clocks, self._clocks = self._clocks, None
        if clocks is not None:
            clocks.close()
            clocks_mhz, powers_w, capped = zip(*self._samples, strict=True) if self._samples else ((), (), ())
            self._load = GpuLoad.of(clocks_mhz, powers_w, clocks.max_mhz, clocks.limit_w, capped)

    def gives_up(self, step: Step, why: str) -> bool:
        """Whether a captured way is given up, since a rank says why it must be. Collective."""
        failed = 1.0 if why else 0.0
        if self._agreement is not None:
            # A rank that failed by itself in a run that all make may find the others in the middle of a collective.
            self._agreement.compare(f"{step.way} was tried")
            failed = maximum([failed], self._agreement.group, self.device)[0]
        if failed:
            self.notes.append(f"{step.way} is left out: {why or 'another rank could not capture it'}")
            step.is_timed = False
            if self.chosen is None:
                self._calibration.drop(step.way)
            else:
                self.chosen = Way(step.way.moves)
        return bool(failed)

    def falls_back(self, why: str) -> bool:
        """Whether the whole batch is run from now on, since a rank says why an interleaved call has no output. Collective."""
        failed = 1.0 if why else 0.0
        if self._agreement is not None:
            self._agreement.compare("outputs of parts")
            failed = maximum([failed], self._agreement.group, self.device)[0]
        if failed:
            self.fall_back(why or "another rank's outputs could not be joined")
        return bool(failed)

    def has_shape(self, output: Any) -> bool:
        """Whether an output is like the whole batch's, as far as one was measured."""
        return self._shape is None or self._shape == signature(output)

    def fall_back(self, reason: str) -> None:
        """From now on the whole batch is run. All ranks do it in the same step."""
        self.chosen, self.reason = Way(Moves.ONE), reason
        self._close_clocks()

    def _settle(self) -> None:
        """The measured steps are over. A way is chosen, unless there are more steps to measure."""
        calibration = self._calibration
        for step in self._timed:  # only now, since a CPU that waits for the GPU cannot run ahead of it
            host_ms = step.host_s * 1e3 if self.on_gpu else None
            calibration.note(step.way, us_between(step.begin, step.end) / 1e3, host_ms, step.num_not_replayed)
        self._timed.clear()
        own_launches = calibration.launches_ms()
        figures = [*calibration.times_ms(), *own_launches]
        if calibration.is_again:
            assert self._watcher is not None, "it had them measured again"
            slowest = self._watcher.maximum(figures)
            if slowest is None:
                self._close_clocks()
                self.chosen, self.reason = self._before
                return
            figures = slowest
        elif self._agreement is not None:
            figures = maximum(figures, self._agreement.group, self.device)
        ways, num = calibration.ways, len(calibration.ways)
        self._times_ms = dict(zip(ways, figures[:num], strict=True))
        self._launches_ms = dict(zip(ways, figures[num:], strict=True))
        if self.on_gpu and calibration.add_second_comparison(self._times_ms, self._launches_ms):
            self._samples.clear()
            self.reason = (
                "it is the fastest so far; it is compared once more with one batch and with those that may be as fast"
            )
            return
        self._close_clocks()
        self.chosen = choose(self._times_ms, calibration.least_gain)
        if self._watcher is not None:
            own = dict(zip(ways, own_launches, strict=True))
            self._watcher.begin(self.chosen, self._times_ms, self._launches_ms, own, calibration.least_gain)
        if self._obstacle:
            self.reason = self._obstacle
        elif self.chosen.moves is Moves.ONE:
            self.reason = why_no_gain(
                self._times_ms, self._launches_ms, self._counts, self._load, calibration.least_gain
            )
        else:
            single = min(taken for way, taken in self._times_ms.items() if way.moves is Moves.ONE)
            self.reason = f"it takes {self._times_ms[self.chosen] / single:.3f} of one batch's time"

    def _measure_again(self, watcher: Watcher) -> None:
        """Starts another calibration, without a second comparison: the host may change again before that had ended."""
        assert self.chosen is not None, "it was watched"
        self._before = self.chosen, self.reason
        self.reason = (
            f"the host has become {'faster' if self.chosen.moves is Moves.ONE else 'slower'}; ways are measured again"
        )
        self._calibration = Calibration(watcher.ways, is_again=True)
        self.chosen = self._recorded = None
        self._has_recorded = False
        self._samples.clear()

    def report(self) -> BatchesReport:
        """What is known so far. Waits for the GPU where a recorded run is told for the first time."""
        said = BatchesReport(
            way=str(self._best()),
            reason=self.reason,
            is_settled=self.chosen is not None,
            num_batches=self._num_batches,
            measured_ms={str(way): taken for way, taken in self._times_ms.items()},
            host_ms={str(way): taken for way, taken in self._launches_ms.items() if taken},
            load=self._load,
            counts=self._counts,
            notes=(*self.notes, *self._notes_of_counts(), *self._notes_of_host()),
        )
        if self._recorded is None:
            return said
        spans, total_us = self._recorded.timeline()
        all_ms, hidden_ms, exposed_ms = hidden_of(spans, self._num_batches, total_us)
        return replace(
            said,
            communication_ms=all_ms,
            hidden_ms=hidden_ms,
            exposed_ms=exposed_ms,
            timeline=tuple(spans),
            not_hidden=why_not_hidden(self._counts, hidden_ms, exposed_ms),
        )

    def _notes_of_counts(self) -> list[str]:
        if len(set(self._counts.collectives)) <= 1:
            return []
        return [f"the batches issue different numbers of collectives: {', '.join(map(str, self._counts.collectives))}"]

    def _notes_of_host(self) -> list[str]:
        notes = list[str]()
        if self._watcher is not None and self._watcher.num_again:
            notes.append(f"the host seemed slower or faster, and ways were measured again: {self._watcher.num_again} x")
        if self._watcher is not None and self._watcher.is_over:
            notes.append("the choice stays whatever the host does: a rank has waited too long for the others")
        return notes


def _around_backward(output: Any, begin: Callable[[], Any], end: Callable[[], Any]) -> bool:
    """Calls when the first backward through the output begins, and when it has ended. False if there can be none."""
    tensors = [leaf for leaf in leaves_of(output) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
    if not tensors:
        return False
    engine: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined,unused-ignore]
    hooked: Any = tensors[0]

    def act(_: torch.Tensor) -> None:
        hook.remove()
        begin()
        engine.queue_callback(end)

    unserializable: Any = torch.utils.hooks.unserializable_hook  # torch.save of the output would warn of it
    hook = hooked.register_hook(unserializable(act))
    return True
