"""Runs batches interleaved, in each of the ways that a kind of call has: what all calls of a handle, or all steps, share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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
    from torch import nn
    from torch.distributed import ProcessGroup


def device_of(kinds: Collection[str], module: nn.Module | None, group: ProcessGroup | None) -> str:
    """Where a call computes: on a GPU if an argument is there, or a parameter, or if its ranks can communicate nowhere else.

    ``kinds``: of devices, where the arguments are.
    """
    if "cuda" in kinds or (module is not None and any(each.is_cuda for each in module.parameters())):
        return "cuda"
    if not dist.is_initialized() or not torch.cuda.is_available():
        return "cpu"
    inside: Any = dist.distributed_c10d
    reached = {each.type for each in (group or inside._get_default_group())._device_types}
    return "cuda" if reached == {"cuda"} else "cpu"


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
        timeout_s: float | None,
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

    def device_of(self, kinds: Collection[str], module: nn.Module) -> str:
        """Where a call of the module computes: ``"cpu"`` or ``"cuda"``. ``kinds``: of devices, where its arguments are."""
        group = self._group
        if self.agreement is not None and self.agreement.has_group:
            group = self.agreement.group
        return device_of(kinds, module, group)

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
        """Whether all ranks have shared buffers that work. Collective."""
        agreement = self.agreement
        assert agreement is not None, "asked for with a group only"
        try:
            device = torch.device("cuda", torch.cuda.current_device())
            open_buffers(agreement.group, device, self.num_batches).check()
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
