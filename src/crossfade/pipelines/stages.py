"""A traced graph gets its cuts: what crosses one, and in which form.

Every value that crosses goes from a stage to the next one only: where a later stage needs it as well, those between pass it on,
so that every schedule can carry it (torch's run between neighbours, and take a value's gradient from one place only). Whatever
crosses is cloned at the end of its stage: torch detaches what a stage returns in place, which views refuse and which breaks a
backward pass that still needs the value, and transports want contiguous memory. They want it of gradients too, which torch's
divided backward pass gives as it finds them. The first stage gets all inputs, in the order of the signature, and the last one
returns all outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from crossfade.pipelines.graph import TracedGraph
from crossfade.pipelines.torch_names import pipe_split_operator


class _ContiguousGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


def with_contiguous_gradient(value: torch.Tensor) -> torch.Tensor:
    """The value; its gradient comes out contiguous."""
    same: torch.Tensor = _ContiguousGradient.apply(value)  # type: ignore[no-untyped-call,unused-ignore]
    return same


def cut_graph(traced: TracedGraph, cuts: Sequence[int]) -> None:
    """Puts the cuts, in ascending order, into the graph, which has none so far and is changed."""
    cutter = _Cutter(traced, cuts)
    cutter.name_inputs()
    for cut in cuts:
        cutter.cut(cut)
    cutter.return_from_last(cuts[-1] if cuts else 0)
    traced.module.graph.lint()
    traced.module.recompile()


class _Cutter:
    """Cuts from the front to the back; ``_now`` is what stands for a value behind the cuts made so far."""

    def __init__(self, traced: TracedGraph, cuts: Sequence[int]) -> None:
        self._traced, self._graph = traced, traced.module.graph
        self._crossing = {cut: traced.crossing(cut) for cut in cuts}
        self._operations = list(traced.operations)
        self._last = self._graph.output_node()
        self._outputs = list(traced.outputs)
        self._now: dict[fx.Node, fx.Node] = {}

    def name_inputs(self) -> None:
        """Gives each input a first use, in the order of the signature: torch orders the first stage's inputs by their first use."""
        for node in self._traced.inputs:
            with self._graph.inserting_before(self._operations[0]):
                alias = self._call(torch.ops.aten.alias.default, node, (node,), {}, self._operations[0])
            node.replace_all_uses_with(alias, delete_user_cb=partial(operator.is_not, alias))
            self._now[node] = alias

    def cut(self, cut: int) -> None:
        """Puts a cut before an operation."""
        anchor, before = self._operations[cut], self._operations[cut - 1]
        behind = {*self._operations[cut:], self._last}
        for value in self._crossing[cut]:
            now = self._now.get(value, value)
            with self._graph.inserting_before(anchor):
                sent = self._clone(now, before)
            now.replace_all_uses_with(sent, delete_user_cb=lambda user: user in behind)
            self._now[value] = sent
        with self._graph.inserting_before(anchor):
            self._graph.call_function(pipe_split_operator())
        for value in self._crossing[cut]:
            sent = self._now[value]
            with self._graph.inserting_before(anchor):
                received = self._call(with_contiguous_gradient, sent, (sent,), {}, anchor)
            sent.replace_all_uses_with(received, delete_user_cb=lambda user: user in behind)
            self._now[value] = received

    def return_from_last(self, cut: int) -> None:
        """Clones what the last stage would return without having made it, and what it would return twice."""
        made = set(self._operations[cut:])
        returned: list[fx.Node] = []
        for value in self._outputs:
            now = self._now.get(value, value)
            if now not in made or now in returned:
                with self._graph.inserting_before(self._last):
                    now = self._clone(now, self._operations[-1])
            returned.append(now)
        rest = iter(returned)
        self._last.args = fx.node.map_arg(self._last.args, lambda _: next(rest))

    def _clone(self, value: fx.Node, beside: fx.Node) -> fx.Node:
        kwargs: dict[str, Any] = {"memory_format": torch.contiguous_format}
        return self._call(torch.ops.aten.clone.default, value, (value,), kwargs, beside)

    def _call(
        self, called: Any, value: fx.Node, args: tuple[fx.Node], kwargs: dict[str, Any], beside: fx.Node
    ) -> fx.Node:
        node = self._graph.call_function(called, args, kwargs)
        node.meta["val"] = called(value.meta["val"], **kwargs)
        node.meta["nn_module_stack"] = {**beside.meta.get("nn_module_stack", {})}
        return node
