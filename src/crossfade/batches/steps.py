"""The batches of a whole training step, as the user has them, and one backward on the mean of their losses."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch.utils import _pytree as pytree

from crossfade.batches.calibration import Moves
from crossfade.batches.handle import Runner
from crossfade.batches.parts import Run
from crossfade.batches.report import BatchesReport
from crossfade.batches.tensors import signature
from crossfade.batches.tuner import Step, Tuner
from crossfade.errors import BatchesError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_BATCH_NORM = "batch norm: each batch has statistics of its own, and the running ones are updated by all"


class StepPart:
    """One batch of a step: a call that runs when all batches are known.

    Attributes:
        weight: of its loss.
    """

    def __init__(self, call: Callable[[], Any], weight: float, key: tuple[str, ...]) -> None:
        self.call = call
        self.weight = weight
        self.key = key
        self._result: list[Any] = []

    @property
    def result(self) -> Any:
        """What the call returned.

        Raises:
            BatchesError: it has not run yet: it runs in ``backward()``, or at the end of the ``with``.
        """
        if not self._result:
            raise BatchesError("the batch has not run yet", hint="it runs in run.backward(), or at the end of the with")
        return self._result[0]

    def end(self, result: Any) -> None:
        """It has run."""
        self._result = [result]


class InterleavedSteps:
    """What `crossfade.interleaved` gives. Entered once a step; called with a function and its arguments, once a batch."""

    def __init__(
        self, group: ProcessGroup | None, fixed: Moves | None, per_shape: bool, max_ctas: int | None, timeout_s: float
    ) -> None:
        self._make_runner = partial(
            Runner, group=group, fixed=fixed, capture=False, max_ctas=max_ctas, timeout_s=timeout_s
        )
        self._runners: dict[int, Runner] = {}
        self._per_shape = per_shape
        self._tuners: dict[tuple[str, ...], Tuner] = {}
        self._last: Tuner | None = None
        self._parts: list[StepPart] = []
        self._on_gpu = False
        self._step: Step | None = None
        self._run: Run | None = None

    def __enter__(self) -> Self:
        self._parts, self._step, self._run, self._on_gpu = [], None, None, False
        return self

    def __call__(self, function: Callable[..., Any], *args: Any, weight: float = 1.0, **kwargs: Any) -> StepPart:
        """Adds a batch. ``weight``: of its loss in the mean that `backward` takes; rows, or tokens."""
        part = StepPart(partial(function, *args, **kwargs), weight, signature((args, kwargs)))
        on_gpu = any(isinstance(each, torch.Tensor) and each.is_cuda for each in pytree.tree_leaves((args, kwargs)))
        self._on_gpu = self._on_gpu or on_gpu
        self._parts.append(part)
        return part

    def backward(self) -> Any:
        """Runs the batches, and one backward on the mean of their losses by weight; gives that mean, without a graph."""
        results = self._finish_forward()
        total = sum(part.weight for part in self._parts)
        loss = sum(result * (part.weight / total) for result, part in zip(results, self._parts, strict=True))
        if not isinstance(loss, torch.Tensor) or loss.dim():
            raise BatchesError(
                "a batch's loss is not a single number", hint="the functions of a step return their loss"
            )
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        return loss.detach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and self._parts:
            self._finish_forward()
            step, tuner = self._step, self._last
            assert step is not None, "the forward has run"
            assert tuner is not None, "the forward has run"
            tuner.finish(step, None, self._run)  # with its backward
        self._parts, self._run = [], None

    def report(self) -> BatchesReport:
        """About the kind of step that was last.

        Raises:
            BatchesError: there was none.
        """
        if self._last is None:
            raise BatchesError("no step has run yet", hint="with steps as run: ...")
        return self._last.report()

    def _finish_forward(self) -> list[Any]:
        """Runs the batches, if they have not run."""
        if self._step is None:
            runner, tuner = self._open()
            step = self._step = tuner.begin()
            calls = [part.call for part in self._parts]
            if step.way.moves is Moves.ONE:
                results = [call() for call in calls]
            else:
                device = "cuda" if self._on_gpu else "cpu"
                results, self._run = runner.run(step, device, calls, in_one_stream=False)
                if self._run.has_batch_norm and _BATCH_NORM not in tuner.notes:
                    tuner.notes.append(_BATCH_NORM)
            for part, result in zip(self._parts, results, strict=True):
                part.end(result)
        return [part.result for part in self._parts]

    def _open(self) -> tuple[Runner, Tuner]:
        number = len(self._parts)
        runner = self._runners.get(number) or self._runners.setdefault(number, self._make_runner(number))
        shapes = tuple(name for part in self._parts for name in part.key) if self._per_shape else ()
        key = (f"{number} batches", *shapes)
        tuner = self._tuners.get(key)
        if tuner is None:
            reason = "" if number > 1 else "there is one batch only"
            device = "cuda" if self._on_gpu else "cpu"
            tuner = self._tuners[key] = runner.tuner(device, key, reason, in_one_stream=False, captures=False)
        self._last = tuner
        return runner, tuner
