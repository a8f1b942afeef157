"""Runs batches interleaved, in each of the ways that a kind of call has: what all calls of a handle, or all steps, share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from crossfade.batches.carriers.buffers import open_buffers
from crossfade.batches.carriers.carrier import Carrier
from crossfade.batches.carriers.copy_engines import CopyEngines, own_stream
from crossfade.batches.carriers.process_groups import ProcessGroups
from crossfade.batches.choice.calibration import Moves, Way
from crossfade.batches.choice.tuner import Step, Tuner
from crossfade.batches.coroutines.parts import Run
from crossfade.batches.ranks.agreement import Agreement, maximum
from crossfade.batches.tensors import leaves_of, local_of
from crossfade.errors import CrossfadeError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


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
            as_graph = "; it can be captured" if captures else ""
            self.agreement.compare(f"a call of {', '.join(key)}; {reason or 'it can be interleaved'}{as_graph}")
            if reason:
                ways = [Moves.ONE]
            elif self._fixed is not None:
                ways, reason = [self._fixed], "it was asked for"
            else:
                ways = [Moves.ONE, Moves.GROUPS]
                if device == "cuda" and not in_one_stream and self._can_copy():
                    ways.append(Moves.COPIES)
        every = [Way(moves) for moves in ways]
        if captures:
            every = [*(every if self._fixed is None else []), *(Way(moves, is_captured=True) for moves in ways)]
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
                        local_of(leaf).record_stream(caller)
        return outputs, run

    def _own_streams(self, number: int) -> list[torch.cuda.Stream]:
        if torch.is_grad_enabled():
            # Both parts' gradients of a weight are added on one stream; the engine orders that, and warns of it.
            warn = getattr(torch.autograd.graph, "set_warn_on_accumulate_grad_stream_mismatch", None)
            if warn is not None:
                warn(False)
        device = torch.cuda.current_device()
        return [own_stream("parts", part, device) for part in range(number)]
