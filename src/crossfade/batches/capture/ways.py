"""The graphs of one kind of call, one a way: captured at the way's first step, and given up by all ranks if one fails."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import torch

from crossfade.batches.capture.calls import CapturedCall, CapturedStep
from crossfade.batches.choice.calibration import Way
from crossfade.batches.choice.tuner import Step, Tuner

if TYPE_CHECKING:
    from torch import nn

    from crossfade.batches.coroutines.parts import Run

RunEager = Callable[[Step, tuple[Any, ...], dict[str, Any]], "tuple[Any, Run | None]"]
"""Runs a call of these arguments as a step says; gives its output, and what was interleaved."""


def can_capture(device: str) -> bool:
    """Whether there are graphs of what a kind of device does."""
    return device == "cuda"


class CapturedWays:
    """See the module's text.

    Args:
        module: has all parameters and buffers that the calls use.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._graphs: dict[Way, CapturedCall | CapturedStep] = {}

    def __call__(
        self, tuner: Tuner, step: Step, run_eager: RunEager, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Run | None]:
        """A step by a graph. ``run_eager``, what is captured, is not kept: the owner of this is behind it, and a graph must go with
        its owner's last reference. NCCL's communicators wait at their end until no graph has collectives of theirs.
        """
        self._forget_others(tuner.ways)
        graph, run = self._graphs.get(step.way), None
        if graph is None:
            plain = Way(step.way.moves)
            # Communicators and buffers are there then.
            output, run = run_eager(Step(plain, is_checked=True), args, kwargs)
            why = ""
            try:
                graph = self._capture(lambda *a, **k: run_eager(Step(plain), a, k)[0], args, kwargs)
            except Exception as error:
                why = f"{type(error).__name__}: {error}".partition("\n")[0]
            if tuner.gives_up(step, why) or graph is None:
                return output, run
            self._graphs[step.way] = graph
            del output
            tuner.restart(step)
        return graph(*args, **kwargs), run

    def only(self, way: Way) -> CapturedCall | CapturedStep | None:
        """The graph of a way, where it is there and no other one any more."""
        return self._graphs.get(way) if len(self._graphs) == 1 else None

    def _forget_others(self, ways: Collection[Way]) -> None:
        """Gives the memory of graphs back that are not used any more."""
        if any(way not in ways for way in self._graphs):
            self._graphs = {way: graph for way, graph in self._graphs.items() if way in ways}

    def _capture(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> CapturedCall | CapturedStep:
        kind = CapturedStep if torch.is_grad_enabled() else CapturedCall
        return kind(self._module, call, args, kwargs)
