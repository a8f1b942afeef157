"""The batches of a whole training step, as the user has them, and one backward on the mean of their losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from crossfade.batches.capture.limits import why_not_captured
from crossfade.batches.capture.ways import CapturedWays, can_capture
from crossfade.batches.choice.calibration import Moves
from crossfade.batches.choice.report import BatchesReport
from crossfade.batches.choice.tuner import Step, Tuner
from crossfade.batches.coroutines.parts import Run
from crossfade.batches.runner import Runner, device_of
from crossfade.batches.tensors import device_kinds, kind_of, modes, modes_now, signature
from crossfade.batches.wrappers.sharded_calls import sharded_calls
from crossfade.errors import BatchesError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


_BATCH_NORM = "batch norm: each batch has statistics of its own, and the running ones are updated by all"


class StepPart:
    """One batch of a step: a call that runs when all batches are known.

    Attributes:
        weight: of its loss.
    """

    def __init__(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], weight: float
    ) -> None:
        self.function = function
        self.arguments = args, kwargs
        self.weight = weight
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
        self,
        group: ProcessGroup | None,
        fixed: Moves | None,
        per_shape: bool,
        max_ctas: int | None,
        timeout_s: float | None,
        captured: Sequence[nn.Module],
    ) -> None:
        self._module = nn.ModuleList(captured) if captured else None
        self._group = group
        self._make_runner = partial(
            Runner,
            group=group,
            fixed=fixed,
            capture=bool(captured),
            max_ctas=max_ctas,
            timeout_s=timeout_s,
            watches=per_shape,
        )
        self._runners: dict[int, Runner] = {}
        self._per_shape = per_shape
        self._tuners: dict[tuple[object, ...], Tuner] = {}
        self._captured: dict[tuple[object, ...], CapturedWays] = {}
        self._functions: dict[tuple[object, ...], list[Callable[..., Any]]] = {}  # those of a kind's first step
        self._last: Tuner | None = None
        self._parts: list[StepPart] = []
        self._kinds = set[str]()  # of devices, where the batches' tensors are
        self._step: Step | None = None
        self._run: Run | None = None
        self._is_open = False

    def __enter__(self) -> Self:
        self._is_open = True
        self._parts, self._kinds, self._step, self._run = [], set(), None, None
        return self

    def __call__(self, function: Callable[..., Any], *args: Any, weight: float = 1.0, **kwargs: Any) -> StepPart:
        """Adds a batch. ``weight``: of its loss in the mean that `backward` takes; rows, or tokens.

        Raises:
            BatchesError: it is called outside of a ``with``, or behind `backward`.
            TypeError: the function is none.
        """
        self._refuse_outside()
        if not callable(function):
            raise TypeError(f"a batch is {function!r}\nhint: run(loss_of, batch): a function and its arguments")
        if self._step is not None:
            raise BatchesError("the step's batches have run already", hint="give all batches before run.backward()")
        part = StepPart(function, args, kwargs, weight)
        self._kinds |= device_kinds(args, kwargs)
        self._parts.append(part)
        return part

    def backward(self) -> Any:
        """Runs the batches, and one backward on the mean of their losses by weight; gives that mean, without a graph."""
        self._refuse_outside()
        if not self._parts:
            raise BatchesError("a step has no batch", hint="run(loss_of, batch), then run.backward()")
        results = self._finish_forward()
        total = sum(part.weight for part in self._parts)
        if not total:
            raise BatchesError("the weights of a step's batches are 0 in all", hint="weight= is of rows, or of tokens")
        if not all(isinstance(result, torch.Tensor) and result.dim() == 0 for result in results):
            raise BatchesError(
                "a batch's loss is not a single number", hint="the functions of a step return their loss"
            )
        loss: Any = sum(result * (part.weight / total) for result, part in zip(results, self._parts, strict=True))
        loss.backward()
        return loss.detach()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open = False
        if kind is None and self._parts:
            self._finish_forward()
            step, tuner = self._step, self._last
            assert step is not None, "the forward has run"
            assert tuner is not None, "the forward has run"
            tuner.finish(step, None, self._run)  # with its backward
        self._parts, self._run = [], None

    def _refuse_outside(self) -> None:
        if not self._is_open:
            raise BatchesError("no step has begun", hint="with steps as run: run(loss_of, batch)")

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
            key, tuner = self._open()
            step = self._step = tuner.begin()
            arguments = tuple(part.arguments for part in self._parts)
            if step.way.is_captured:
                results, self._run = self._captured[key](tuner, step, self._go, arguments, {})
            else:
                results, self._run = self._look(tuner, step, arguments)
                if not tuner.has_captured:
                    self._captured.pop(key, None)
            if self._run is not None and self._run.has_batch_norm and _BATCH_NORM not in tuner.notes:
                tuner.notes.append(_BATCH_NORM)
            for part, result in zip(self._parts, results, strict=True):
                part.end(result)
        return [part.result for part in self._parts]

    def _look(self, tuner: Tuner, step: Step, arguments: tuple[Any, ...]) -> tuple[list[Any], Run | None]:
        """Runs them. The first step of a kind is no interleaved one, unless that was asked for."""
        with sharded_calls(takes_turns=step.way.moves is not Moves.ONE) as found:
            results = self._go(step, arguments, {})
        if found and tuner.chosen is None:
            tuner.fall_back(found[0])
        return results

    def _go(self, step: Step, arguments: tuple[Any, ...], _: dict[str, Any]) -> tuple[list[Any], Run | None]:
        """Runs the batches' functions, eagerly."""
        calls = [
            partial(part.function, *args, **kwargs) for part, (args, kwargs) in zip(self._parts, arguments, strict=True)
        ]
        if step.way.moves is Moves.ONE:
            return [call() for call in calls], None
        return self._runners[len(calls)].run(step, self._device(), calls, in_one_stream=False)

    def _device(self) -> str:
        return device_of(self._kinds, self._module, self._group)

    def _open(self) -> tuple[tuple[object, ...], Tuner]:
        captures = self._module is not None and can_capture(self._device())
        key, has_others = self._key(captures=captures)
        tuner = self._tuners.get(key)
        if tuner is None:
            tuner = self._tuners[key] = self._new_tuner(key, captures=captures, has_others=has_others)
        self._last = tuner
        return key, tuner

    def _key(self, *, captures: bool) -> tuple[tuple[object, ...], bool]:
        """Equal for steps of one kind; and whether its functions are others than those of the first captured step like it."""
        kinds = [kind_of(*part.arguments, with_values=captures) for part in self._parts] if self._per_shape else []
        key = len(self._parts), *modes_now(), *kinds
        if not captures:
            return key, False
        key = *key, *[each.training for each in self._module or ()]
        functions = [part.function for part in self._parts]
        has_others = self._functions.setdefault(key, functions) != functions
        return (*key, has_others), has_others

    def _kind(self, *, captures: bool, has_others: bool) -> tuple[str, ...]:
        """The same in words, for the ranks to compare."""
        kinds = [signature(part.arguments, with_values=captures) for part in self._parts] if self._per_shape else []
        state = modes(trains=torch.is_grad_enabled())
        words = f"{len(self._parts)} batches", *state, *[name for kind in kinds for name in kind]
        if not captures:
            return words
        words = *words, *[name for each in self._module or () for name in modes(trains=each.training)]
        return (*words, "other functions") if has_others else words

    def _new_tuner(self, key: tuple[object, ...], *, captures: bool, has_others: bool) -> Tuner:
        number, why = len(self._parts), ""
        if has_others:
            why = "its functions are others than those of the first step of its kind"
        elif self._module is not None and not captures:
            why = "a CPU has no graphs"
        runner = self._runners.get(number) or self._runners.setdefault(number, self._make_runner(number))
        if captures and self._module is not None and not why:
            why = why_not_captured(self._module, self._kinds, trains=torch.is_grad_enabled())
            if not why:
                self._captured[key] = CapturedWays(self._module)
        reason = "" if number > 1 else "there is one batch only"
        words = self._kind(captures=captures, has_others=has_others)
        captures = key in self._captured
        tuner = runner.tuner(self._device(), words, reason, in_one_stream=False, captures=captures)
        if why:
            tuner.notes.append(f"not captured: {why}")
        return tuner
