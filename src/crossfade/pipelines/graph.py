"""What a traced module's graph says about cuts: operations, the values that cross, where a cut cannot be.

A graph has inputs (``placeholder``), parameters and buffers (``get_attr``), operations (all that is called) and one output. Cut
``c`` lies before operation ``c``. A value *crosses* a cut when it is made before it and used, or returned, behind it. Parameters
and buffers never cross: each stage that uses one has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

import torch
from torch import fx
from torch.utils import _pytree as pytree


@dataclass(frozen=True)
class TracedGraph:
    """A graph, with its operations in order."""

    module: fx.GraphModule

    @cached_property
    def operations(self) -> list[fx.Node]:
        """What is called, in topological order."""
        return [node for node in self.module.graph.nodes if node.op.startswith("call_")]

    @cached_property
    def inputs(self) -> list[fx.Node]:
        """The module's inputs, in the order of its signature."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @cached_property
    def outputs(self) -> list[fx.Node]:
        """The values that the module returns, in order; one may be there twice."""
        return nodes_in(self.module.graph.output_node().args)

    @cached_property
    def place(self) -> dict[fx.Node, int]:
        """The position of each operation; -1 for inputs, the number of operations for the output."""
        places = {node: place for place, node in enumerate([*self.operations, self.module.graph.output_node()])}
        return {**places, **dict.fromkeys(self.inputs, -1)}

    def last_use(self, node: fx.Node) -> int:
        """The position of the last operation, or output, that uses a value; -1 for none."""
        return max((self.place[user] for user in node.users if user in self.place), default=-1)

    def crossing(self, cut: int) -> list[fx.Node]:
        """The values that cross a cut, in the order in which they are made."""
        return [node for node in self._values if self.place[node] < cut <= self.last_use(node)]

    def allowed_cuts(self, changed_buffers: Sequence[str] = ()) -> dict[int, int]:
        """The cuts that are allowed, with the bytes that cross each.

        Not allowed: where something else than a tensor would cross (a list of tensors, before its items are taken), where a
        value crosses whose memory is written behind the cut, and between two uses of a buffer that the forward pass changes.
        """
        num = len(self.operations)
        sizes, forbidden = [0] * (num + 1), [0] * (num + 2)
        for node in self._values:
            first, last = self.place[node] + 1, self.last_use(node)
            for cut in range(max(first, 1), last + 1):
                sizes[min(cut, num)] += bytes_of(node)
            last_write = self._last_writes.get(self._memory[node], -1)
            _forbid(forbidden, first, last if _tensor_of(node) is None else min(last, last_write))
        for name in changed_buffers:
            same = [node for node in self.module.graph.nodes if node.op == "get_attr" and node.target == name]
            uses = [self.place[user] for node in same for user in node.users if user in self.place]
            _forbid(forbidden, min(uses, default=0) + 1, max(uses, default=0))
        allowed, depth = {}, 0
        for cut in range(num):
            depth += forbidden[cut]
            if cut > 0 and depth == 0:
                allowed[cut] = sizes[cut]
        return allowed

    def attributes_of(self, place: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters and buffers that an operation uses itself, with their names."""
        for node in self.operations[place].all_input_nodes:
            if node.op == "get_attr":
                tensor = attrgetter(str(node.target))(self.module)
                if isinstance(tensor, torch.Tensor):
                    yield str(node.target), tensor

    @cached_property
    def _values(self) -> list[fx.Node]:
        return [*self.inputs, *self.operations]

    @cached_property
    def _memory(self) -> dict[fx.Node, fx.Node]:
        """For each value the one whose memory it lies in: an operator's schema says of which argument its result is a view."""
        memory: dict[fx.Node, fx.Node] = {}
        for node in self._values:
            viewed = next((each for each in _viewed(node) if each in memory), None)
            memory[node] = node if viewed is None else memory[viewed]
        return memory

    @cached_property
    def _last_writes(self) -> dict[fx.Node, int]:
        """For each value that has memory of its own, the position of the last operation that writes into it."""
        last: dict[fx.Node, int] = {}
        for place, node in enumerate(self.operations):
            last |= {self._memory[each]: place for each in _written(node) if each in self._memory}
        return last


def bytes_of(node: fx.Node) -> int:
    """The size of the tensor that a value is; 0 for what is none."""
    tensor = _tensor_of(node)
    return 0 if tensor is None else tensor.nbytes


def module_of(node: fx.Node) -> str:
    """The qualified name of the innermost module that an operation belongs to, and what it is: ``layers.3.mlp (linear)``."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    name = str(stack[-1][0]) if stack else ""
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
    operator = target.partition(".")[0]
    return f"{name} ({operator})" if name else f"({operator})"


def _tensor_of(node: fx.Node) -> torch.Tensor | None:
    value = node.meta.get("val")
    return value if isinstance(value, torch.Tensor) else None


def _forbid(changes: list[int], first: int, last: int) -> None:
    """Forbids the cuts from ``first`` to ``last``, in a list of differences."""
    if first <= last:
        changes[max(first, 0)] += 1
        changes[last + 1] -= 1


def _viewed(node: fx.Node) -> list[fx.Node]:
    """The arguments in whose memory an operation's result may lie."""
    if getattr(node.target, "__name__", "") == "getitem":
        return node.all_input_nodes[:1]
    schema = getattr(node.target, "_schema", None)
    if schema is None or all(each.alias_info is None for each in schema.returns):
        return []
    return [each for name, each in _arguments(node, schema) if name.alias_info is not None]


def _written(node: fx.Node) -> list[fx.Node]:
    """The arguments into whose memory an operation writes."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    pairs = _arguments(node, schema)
    return [each for argument, each in pairs if argument.alias_info is not None and argument.alias_info.is_write]


def _arguments(node: fx.Node, schema: torch.FunctionSchema) -> list[tuple[torch.Argument, fx.Node]]:
    """The values that an operation gets, each with the parameter of the operator's schema that it is for."""
    given = [*node.args, *(None for _ in schema.arguments[len(node.args) :])]
    named = (node.kwargs.get(argument.name, value) for argument, value in zip(schema.arguments, given, strict=False))
    return [
        (argument, each) for argument, value in zip(schema.arguments, named, strict=False) for each in nodes_in(value)
    ]


def nodes_in(value: object) -> list[fx.Node]:
    """The nodes in an argument, which may be nested, in order."""
    return [each for each in pytree.tree_leaves(value) if isinstance(each, fx.Node)]
