"""A module whose calls are run in the fastest way: the whole batch, or parts of it that take turns at collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from crossfade.batches.agreement import Agreement, maximum
from crossfade.batches.buffers import open_buffers
from crossfade.batches.calibration import Moves, Way
from crossfade.batches.captured_ways import CapturedWays, can_capture
from crossfade.batches.carriers import Carrier, CopyEngines, ProcessGroups, own_stream
from crossfade.batches.ddp import one_backward
from crossfade.batches.fsdp import share_parameters
from crossfade.batches.obstacles import why_not_captured, why_one_batch
from crossfade.batches.parts import Run, current_part
from crossfade.batches.report import BatchesReport
from crossfade.batches.tensors import Call, device_kinds, kind_of, leaves_of, modes, signature
from crossfade.batches.tuner import Step, Tuner
from crossfade.errors import BatchesError, CrossfadeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Split = Callable[[tuple[Any, ...], dict[str, Any], int], Sequence[Any]]
Join = Callable[[Sequence[Any], Sequence[int]], Any]
_WHOLE = Way(Moves.ONE)
_MODES: tuple[Callable[[], object], ...] = (
    torch.is_grad_enabled,
    torch.is_inference_mode_enabled,
    *(partial(ask, kind) for ask in (torch.is_autocast_enabled, torch.get_autocast_dtype) for kind in ("cpu", "cuda")),
)
"""What of torch's state makes another kind of call."""


class Runner:
    """What the calls of one handle share: streams, carriers, and the agreement with the other ranks.

    ``watches``: whether ways are measured again where the host has become slower or faster; not where shapes differ from call to
    call.
    """

    def __init__(
        self,
        num_batches: int,
        group: ProcessGroup | None,
        fixed: Moves | None,
        capture: bool,
        max_ctas: int | None,
        timeout_s: float,
        *,
        watches: bool,
    ) -> None:
        self.num_batches = num_batches
        self._watches = watches
        self._fixed = fixed
        self.captures = capture
        self.agreement: Agreement | None = None  # made at the first call: a process group need not be there before
        self._group = group
        self._timeout_s = timeout_s
        self._groups = ProcessGroups(max_ctas)
        self._copies = CopyEngines(num_batches, self._groups)

    def tuner(self, device: str, key: Sequence[str], reason: str, *, in_one_stream: bool, captures: bool) -> Tuner:
        """The ways of a kind of call that is new. Collective."""
        if self.agreement is None and dist.is_initialized():
            self.agreement, self._group = Agreement(self._group, self._timeout_s), None
        if self.agreement is None or not dist.is_initialized():
            ways, reason = [Moves.ONE], "there is no process group: nothing communicates"
        else:
            self.agreement.compare(f"a call of {', '.join(key)}; {reason or 'it can be interleaved'}")
            if reason:
                ways = [Moves.ONE]
            elif self._fixed is not None:
                ways, reason = [self._fixed], "it was asked for"
            else:
                ways = [Moves.ONE, Moves.GROUPS]
                if device == "cuda" and not in_one_stream and self._can_copy():
                    ways.append(Moves.COPIES)
        every = [Way(moves) for moves in ways]
        if captures and (self._fixed is None or len(ways) > 1):
            every += [Way(moves, is_captured=True) for moves in ways]
        elif captures:
            every = [Way(moves, is_captured=True) for moves in ways]
        return Tuner(every, reason, self.agreement, device, self.num_batches, watches=self._watches)

    def _can_copy(self) -> bool:
        """Whether all ranks can open shared buffers. Collective."""
        agreement = self.agreement
        assert agreement is not None, "asked for with a group only"
        try:
            open_buffers(agreement.group, torch.device("cuda", torch.cuda.current_device()), self.num_batches)
            failed = 0.0
        except CrossfadeError:
            failed = 1.0
        return maximum([failed], agreement.group, "cuda")[0] == 0.0

    def run(
        self, step: Step, device: str, calls: Sequence[Callable[[], Any]], *, in_one_stream: bool
    ) -> tuple[list[Any], Run]:
        """Interleaves calls."""
        carrier: Carrier = self._copies if step.way.moves is Moves.COPIES else self._groups
        streams = self._own_streams(len(calls)) if device == "cuda" and not in_one_stream else []
        is_capturing = device == "cuda" and torch.cuda.is_current_stream_capturing()
        compared = self.agreement if step.is_checked else None
        run = Run(carrier, agreement=compared, records=step.records, on_gpu=device == "cuda", streams=streams)
        # A capture is no run of its own, and may end otherwise than the other ranks'.
        following = nullcontext() if self.agreement is None or is_capturing else self.agreement.following(run.order)
        with following:
            outputs = run.go(calls)
        run.order.clear()
        if streams and not is_capturing:
            caller = torch.cuda.current_stream()
            for output in outputs:
                for leaf in leaves_of(output):
                    if isinstance(leaf, torch.Tensor) and leaf.is_cuda:
                        leaf.record_stream(caller)
        return outputs, run

    def _own_streams(self, number: int) -> list[torch.cuda.Stream]:
        if torch.is_grad_enabled():
            # Both parts' gradients of a weight are added on one stream; the engine orders that, and warns of it.
            warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
            if warn is not None:
                warn(False)
        return [own_stream("parts", part) for part in range(number)]


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
        if torch.compiler.is_compiling() or current_part() is not None or torch._C._current_graph_task_id() != -1:
            return self.module(*args, **kwargs)
        key = self._key(args, kwargs)
        tuner = self._last = self._tuners.get(key) or self._open(key, args, kwargs)
        if tuner.chosen == _WHOLE and not tuner.is_watched:
            return self._run_whole(args, kwargs)
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
            raise BatchesError("nothing has been called yet", hint="call the handle like the module, then ask")
        return self._last.report()

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
        """Equal for calls of one kind."""
        modes_now = dist.is_initialized(), *(ask() for ask in _MODES)
        state = self.module.training, *(each.training for each in self._norms), *modes_now
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
        kinds = device_kinds((args, kwargs))
        device, why = "cuda" if "cuda" in kinds else "cpu", ""
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
