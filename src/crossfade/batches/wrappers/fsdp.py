"""FSDP2: the batches of a run share each layer's gathered parameters, and its one reduction of gradients.

By itself FSDP2 frees a layer's parameters when the first batch leaves it, while the other one computes with them, and reduces
gradients when the first batch's backward leaves it. Here both wait for the last batch. That takes torch's private names, which are
replaced on each group of parameters of an interleaved module; with another version of torch the whole batch is run.

==================================  =======================================================================================
of a group of parameters            what it does here
==================================  =======================================================================================
``pre_forward``                     gathers in one turn; each batch registers its arrival in backward
``post_forward``                    gives the output back untouched, until all batches have left the layer
``post_backward`` of a batch        nothing, until the last batch that registered arrives
``post_backward`` at the end        as it is: it reduces what batches without gradients have left over
==================================  =======================================================================================
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from crossfade.batches.coroutines.parts import current_part
from crossfade.batches.wrappers.sharded_calls import look

TESTED = ("2.11.", "2.13.")
"""Versions of torch whose private names are the ones used here, shown by the tests."""


def is_fully_sharded(module: nn.Module) -> bool:
    """Whether FSDP2 has sharded it."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def why_not_shared(module: Any) -> str:
    """Why batches cannot share its parameters; nothing if they can."""
    if not torch.__version__.startswith(TESTED):
        return f"what batches have to share is known of torch {', '.join(TESTED)}x, and this is {torch.__version__}"
    if any(len(group.modules) > 1 for group in _groups(module)):
        return "several modules in one group of parameters"
    return ""


def _groups(module: Any) -> list[Any]:
    state = module._get_fsdp_state()
    single = getattr(state, "_fsdp_param_group", None)  # in torch 2.11 there is but one
    return list(getattr(state, "_fsdp_param_groups", [] if single is None else [single]))


def share_parameters(module: nn.Module) -> bool:
    """Makes the batches of all later runs share the groups of parameters in a module. Gives whether there are any. Idempotent."""
    shared = False
    for each in module.modules():
        if is_fully_sharded(each) and not why_not_shared(each):
            for group in _groups(each):
                shared = True
                if "pre_forward" not in vars(group):
                    _Shared(group)
    return shared


class _Round:
    """One run's batches in one group of parameters: how often they left the layer, and their arrivals in backward."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.left: Counter[int] = Counter()
        self.num_inside = self.num_registered = self.num_arrived = 0


class _Arrival:
    """Stands for the group of parameters in the backward of one batch."""

    def __init__(self, arrive: Callable[[], None]) -> None:
        self.post_backward = arrive


class _Shared:
    """One group of parameters, shared by the parts of a run. Outside a run it behaves as before."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._round = _Round(None)
        self._pre_forward = group.pre_forward
        self._post_forward = group.post_forward
        self._register = type(group)._register_post_backward_hook
        group.pre_forward = self.pre_forward
        group.post_forward = self.post_forward
        group._register_post_backward_hook = self.register

    def pre_forward(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        look(module)
        part = current_part()
        if part is None:
            return self._pre_forward(module, args, kwargs)
        if self._round.owner is not part.owner:
            self._round = _Round(part.owner)
        self._round.num_inside += 1
        # FORWARD would mean that a batch has registered already, and is the only one.
        self._group._training_state = type(self._group._training_state).IDLE
        with part.quiet():
            return self._pre_forward(module, args, kwargs)

    def post_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        part = current_part()
        if part is None:
            return self._post_forward(module, args, output)
        this = self._round
        this.num_inside -= 1
        this.left[part.index] += 1
        if this.num_inside or len(this.left) < len(part.owner.parts) or len(set(this.left.values())) > 1:
            return output
        with part.quiet():
            return self._post_forward(module, args, output)

    def register(self, args: Any, kwargs: Any) -> Any:
        if current_part() is None:
            return self._register(self._group, args, kwargs)
        this = self._round
        new_args, new_kwargs = self._register(_Arrival(lambda: self._arrive(this)), args, kwargs)
        if new_args is not args or new_kwargs is not kwargs:
            this.num_registered += 1
        return new_args, new_kwargs

    def _arrive(self, this: _Round) -> None:
        this.num_arrived += 1
        if this.num_arrived == this.num_registered:
            self._group.post_backward()
