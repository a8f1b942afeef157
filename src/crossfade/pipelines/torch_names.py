"""What is taken from torch under names that it does not document. Nothing else in this room uses such names.

A torch that lacks one of them is told by its version.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed.pipelining  # registers the operator

from crossfade.errors import CrossfadeError


def pipe_split_operator() -> Any:
    """The operator that marks a cut in a traced graph; `torch.distributed.pipelining.pipe_split` calls it."""
    return _named(torch.ops, "pippy._pipe_split.default")


def backward_functions() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """What a stage calls for its whole backward pass, for the part with its inputs' gradients, and for that with its weights'."""
    module = importlib.import_module("torch.distributed.pipelining._backward")
    return (
        _named(module, "stage_backward"),
        _named(module, "stage_backward_input"),
        _named(module, "stage_backward_weight"),
    )


def delay(device: torch.device, cycles: int) -> None:
    """Keeps a GPU's current stream busy for so many cycles of its clock."""
    with torch.cuda.device(device):
        _named(torch.cuda, "_sleep")(cycles)


def schedule_order(schedule: Any) -> dict[int, list[Any]]:
    """Each rank's actions, sends and receives among them, of a schedule with several stages on each rank."""
    order: dict[int, list[Any]] = _named(schedule, "pipeline_order_with_comms")
    return order


def _named(owner: Any, name: str) -> Any:
    try:
        return attrgetter(name)(owner)
    except AttributeError:
        raise CrossfadeError(
            f"torch {torch.__version__} has no {name} in {getattr(owner, '__name__', type(owner).__name__)}",
            hint="crossfade.pipelines works with torch 2.11 to 2.15: install one of them",
        ) from None
