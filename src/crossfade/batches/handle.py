"""A module whose calls are run in the fastest way: the whole batch, or parts of it that take turns at collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from crossfade.batches.capture.limits import why_not_captured
from crossfade.batches.capture.ways import CapturedWays, can_capture
from crossfade.batches.choice.calibration import Moves, Way
from crossfade.batches.choice.report import BatchesReport
from crossfade.batches.choice.tuner import Step, Tuner
from crossfade.batches.coroutines.ddp import one_backward
from crossfade.batches.coroutines.parts import Run, current_part
from crossfade.batches.runner import Runner
from crossfade.batches.tensors import Call, device_kinds, kind_of, modes, modes_now, signature
from crossfade.batches.wrappers.fsdp import share_parameters
from crossfade.batches.wrappers.obstacles import why_one_batch
from crossfade.errors import BatchesError

Split = Callable[[tuple[Any, ...], dict[str, Any], int], Sequence[Any]]
Join = Callable[[Sequence[Any], Sequence[int]], Any]
_WHOLE = Way(Moves.ONE)
_C: Any = torch._C


def _is_in_checkpoint() -> bool:
    """Whether what runs is to be run again in the backward, and then must save the same tensors: as one batch, in both."""
    hooks = _C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


class Interleaved:
    """A module that `interleave` was given.

    Attributes:
        module: the module itself.
    """

    def __init__(self, module: nn.Module, runner: Runner, split: Split, join: Join, *, per_shape: bool) -> None:
        self.module = module
        self._runner = runner
        self._split = split
        self._join = join
        self._per_shape = per_shape
        self._tuners: dict[tuple[object, ...], Tuner] = {}
        self._captured: dict[tuple[object, ...], CapturedWays] = {}
        self._last: Tuner | None = None
        self._in_one_stream = False
        self._ddps = [each for each in module.modules() if isinstance(each, DistributedDataParallel)]
        self._norms = [each for each in module.modules() if isinstance(each, _BatchNorm)]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the module returns."""
        if (
            torch.compiler.is_compiling()
            or current_part() is not None
            or _C._current_graph_task_id() != -1
            or _is_in_checkpoint()
        ):
            return self.module(*args, **kwargs)
        key = self._key(args, kwargs)
        tuner = self._last = self._tuners.get(key) or self._open(key, args, kwargs)
        if tuner.chosen is not None and not tuner.is_watched:  # nothing is measured any more
            if tuner.chosen == _WHOLE:
                return self._run_whole(args, kwargs)
            graph = self._captured[key].only(tuner.chosen) if key in self._captured else None
            if graph is not None:
                return graph(*args, **kwargs)
        step = tuner.begin()
        if step.way.is_captured:
            captured = self._captured.get(key) or self._captured.setdefault(key, CapturedWays(self.module))
            output, run = captured(tuner, step, self._run, args, kwargs)
        else:
            is_tried = step.is_checked and tuner.chosen is None
            output, run = self._try(tuner, step, args, kwargs) if is_tried else self._run(step, args, kwargs)
            if not tuner.has_captured:
                self._captured.pop(key, None)
        tuner.finish(step, output, run)
        return output

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called only for names that a handle does not have."""
            has_it = False
            with suppress(Exception):  # it is a property of the module's that fails
                has_it = not name.startswith("_") and hasattr(vars(self).get("module"), name)
            if has_it:
                raise AttributeError(
                    f"a handle of interleave has no {name}\nhint: the module has it: handle.module.{name}"
                )
            return object.__getattribute__(self, name)  # raises Python's own error

    def __reduce__(self) -> Any:
        raise TypeError(
            "a handle of interleave is not copied or pickled\nhint: copy handle.module, and interleave the copy"
        )

    def __repr__(self) -> str:
        return f"Interleaved({type(self.module).__name__}, num_batches={self._runner.num_batches})"

    def report(self) -> BatchesReport:
        """About the kind of call that was last.

        Raises:
            BatchesError: there was none.
        """
        if self._last is None:
            raise BatchesError(
                "nothing has been called yet",
                hint="call the handle like the module, then ask; inside a checkpoint or a compiled function it is the module",
            )
        return self._last.report()

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
        """Equal for calls of one kind."""
        state = self.module.training, *[each.training for each in self._norms], *modes_now()
        return (*state, kind_of(args, kwargs, with_values=self._runner.captures)) if self._per_shape else state

    def _kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        """The same in words, for the ranks to compare."""
        said = modes(trains=self.module.training)
        if self._norms:
            num_training = sum(each.training for each in self._norms)
            said = (*said, f"{num_training} of {len(self._norms)} batch norms in training")
        kind = signature((args, kwargs), with_values=self._runner.captures)
        return (*said, *kind) if self._per_shape else said

    def _open(self, key: tuple[object, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tuner:
        reason, failed = why_one_batch(self.module), None
        try:
            if not reason and not self._parts(args, kwargs):
                reason = f"a batch has fewer rows than {self._runner.num_batches}"
        except Exception as error:  # the other ranks are told where they compare
            reason, failed = f"split raises {type(error).__name__}", error
        self._in_one_stream = share_parameters(self.module)
        kinds = device_kinds(args, kwargs)
        device, why = self._runner.device_of(kinds, self.module), ""
        if self._runner.captures:
            trains = torch.is_grad_enabled()
            why = why_not_captured(self.module, kinds, trains=trains) if can_capture(device) else "a CPU has no graphs"
        options = {"in_one_stream": self._in_one_stream, "captures": self._runner.captures and not why}
        try:
            tuner = self._runner.tuner(device, self._kind(args, kwargs), reason, **options)
        except BatchesError as error:
            raise failed or error from None
        if failed is not None:
            raise failed
        self._tuners[key] = tuner
        if why:
            tuner.notes.append(f"not captured: {why}")
        if any(
            isinstance(each, nn.modules.dropout._DropoutNd) and each.training and each.p
            for each in self.module.modules()
        ):
            tuner.notes.append("dropout: interleaved batches have other masks than the whole batch")
        return tuner

    def _run_whole(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._ddps or not torch.is_grad_enabled():
            return self.module(*args, **kwargs)
        with one_backward(self._ddps):
            return self.module(*args, **kwargs)

    def _run(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Run | None]:
        if step.way.moves is Moves.ONE:
            return self._run_whole(args, kwargs), None
        outputs, run, rows = self._run_parts(step, args, kwargs)
        return self._join(outputs, rows), run

    def _try(self, tuner: Tuner, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Run | None]:
        """The first interleaved call of a way that is measured: where its output is not the whole batch's, that is run instead."""
        try:
            outputs, run, rows = self._run_parts(step, args, kwargs)
        except Exception as error:
            if not isinstance(error, BatchesError):
                error.add_note(
                    "hint: it came in a part of the batch: interleave(split=...) splits what belongs to it as you say"
                )
            raise
        output, why = None, ""
        try:
            output = self._join(outputs, rows)
        except Exception as error:
            why = str(error) or type(error).__name__
        else:
            if self._per_shape and not tuner.has_shape(output):
                why = "joined outputs have other shapes than those of one batch: interleave(join=...) joins them as you say"
        if tuner.falls_back(why):
            del outputs, output, run  # and their graphs
            return self._run_whole(args, kwargs), None
        return output, run

    def _parts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Call]:
        number = self._runner.num_batches
        try:
            parts = [Call(*part) for part in self._split(args, kwargs, number)]
        except TypeError as error:
            error.add_note("hint: interleave(split=...) gives a list of (args, kwargs, rows), one a part")
            raise
        if len(parts) > number:
            raise BatchesError(f"split gives {len(parts)} parts", hint=f"at most {number}, as interleave was told")
        return parts

    def _run_parts(self, step: Step, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Run, list[int]]:
        """The parts' outputs, the run, and how many rows each part has."""
        parts: list[Call] = []
        try:
            parts = self._parts(args, kwargs)
            if not parts:
                raise BatchesError(
                    f"a batch has fewer rows than {self._runner.num_batches}",
                    hint="the other ranks split theirs: give more rows",
                )
            calls = [partial(self.module, *part.args, **part.kwargs) for part in parts]
        except Exception as error:
            calls = [partial(_raise, error)]  # inside the run, which tells the other ranks: they have begun theirs
        assert self._last is not None, "it is this call's"
        outputs, run = self._runner.run(step, self._last.device, calls, in_one_stream=self._in_one_stream)
        return outputs, run, [part.num_rows for part in parts]


def _raise(error: Exception) -> None:
    raise error
