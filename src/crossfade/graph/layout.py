"""Where things are in a drawing of a graph: boxes in layers, edges from each layer to the next.

Layers go from top to bottom. A value that is used further down than in the next layer passes the layers in between
through *bends*, places without a box; all readers of a value share its bends. The order within a layer is found by the
barycentre method (Sugiyama, Tagawa and Toda 1981): each place goes where its neighbours in the layer before are on
average, in sweeps down and up. Time grows with boxes, bends and edges.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from crossfade.graph.check import CheckedGraph
from crossfade.graph.collectives import CollectiveNode, CollectiveOutput
from crossfade.graph.nodes import MethodNode, Node, OutputNode, label_of
from crossfade.types import DRIVER

NUM_SWEEPS = 4
TOGETHER = "(collectives)"
"""Whose boxes collectives are: no actor's alone."""
MAX_BENDS = 20_000
"""With more bends than this none are made, and long edges are straight."""


@dataclass(frozen=True, slots=True)
class Box:
    """A value or a call in a drawing."""

    id: str  # ``i0`` (a part of the input), ``n0`` (a call, numbered as in the plan), ``c0`` (a collective) or ``out``
    label: str
    actor: str  # whose it is; the driver's are the input and the output
    detail: str = ""

    @property
    def text(self) -> str:
        """What stands in it."""
        return self.label if self.id == "out" else f"{self.id} {self.label}"


@dataclass(frozen=True, slots=True)
class Edge:
    """All values that go from one box to another."""

    source: str  # the id of the box that makes them
    target: str  # the id of the box that uses them
    # which of the source's values (``[1]``) and of the graph's outputs (``#0``) they are; empty where there is only one.
    label: str
    is_local: bool


@dataclass(frozen=True, slots=True)
class Picture:
    """What is to be drawn: boxes, each after those it depends on, and edges."""

    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]

    @property
    def actors(self) -> list[str]:
        """The actors in the order in which they are met, the driver first."""
        return list(dict.fromkeys([DRIVER, *(box.actor for box in self.boxes)]))


@dataclass(slots=True)
class Layout:
    """Which places each layer has, and how they are joined."""

    layers: list[list[str]]  # names of places, from left to right: a box's id, or a bend's name
    is_bent: bool = True  # long edges have bends; otherwise there would be too many
    bends: dict[str, str] = field(default_factory=dict)  # for each bend, the box whose value passes there
    # for each place, the places in the layer above (without bends: in any layer above) that it is joined to.
    sources: dict[str, list[str]] = field(default_factory=dict)
    # for each box whose value is used, the box and then its bends, downwards.
    trunks: dict[str, list[str]] = field(default_factory=dict)
    # for each edge, as (source, target), how many places of its source's trunk it passes.
    num_shared: dict[tuple[str, str], int] = field(default_factory=dict)

    def path(self, source: str, target: str) -> list[str]:
        """The places of an edge, from box to box."""
        return [*self.trunks[source][: self.num_shared[source, target]], target]


def picture_of(graph: CheckedGraph) -> Picture:
    """The boxes and edges of a graph."""
    names: dict[Node, str] = {}
    boxes: list[Box] = []
    for index, part in enumerate(graph.input_parts):
        names[part] = f"i{index}"
        boxes.append(Box(f"i{index}", label_of(part), DRIVER, "input"))
    calls, collectives = itertools.count(), itertools.count()
    for node in graph.steps:
        if isinstance(node, CollectiveNode):
            names[node] = f"c{next(collectives)}"
            label = f"{node.kind}({node.op or ''})"
            boxes.append(Box(names[node], label, TOGETHER, f"{label} of {', '.join(a.id for a in node.parties)}"))
            continue
        names[node] = f"n{next(calls)}"
        returns = f", returns {node.num_returns} values" if node.num_returns > 1 else ""
        boxes.append(Box(names[node], node.label, node.actor.id, f"{node.actor.class_name}.{node.method}{returns}"))
    num_outputs = len(graph.outputs)
    boxes.append(Box("out", f"output [{num_outputs}]" if graph.returns_list else "output", DRIVER, "output"))
    return Picture(tuple(boxes), tuple(_edges(graph, names)))


def _edges(graph: CheckedGraph, names: Mapping[Node, str]) -> Iterable[Edge]:
    labels: dict[tuple[str, str], list[str]] = {}
    for node in graph.steps:
        for source in node.inputs:
            labels.setdefault((names[_maker(source)], names[node]), []).append(_value_label(source))
    for index, source in enumerate(graph.outputs):
        position = f"#{index}" if graph.returns_list else ""
        label = " ".join(word for word in (_value_label(source), position) if word)
        labels.setdefault((names[_maker(source)], "out"), []).append(label)
    actor_of = {names[node]: _owner(node) for node in names}
    for (source_id, target_id), words in labels.items():
        is_local = actor_of[source_id] == actor_of.get(target_id, DRIVER)
        yield Edge(source_id, target_id, ", ".join(word for word in words if word), is_local)


def _owner(node: Node) -> str:
    if isinstance(node, CollectiveNode):
        return TOGETHER
    return node.actor.id if isinstance(node, MethodNode) else DRIVER


def _maker(node: Node) -> Node:
    return node.parent if isinstance(node, OutputNode | CollectiveOutput) else node


def _value_label(node: Node) -> str:
    if isinstance(node, CollectiveOutput):
        return f"[{node.actor.id}]" if node.index == 0 else f"[{node.actor.id}][{node.index}]"
    return f"[{node.index}]" if isinstance(node, OutputNode) else ""


def lay_out(picture: Picture) -> Layout:
    """Assigns boxes to layers, bends long edges, and orders each layer."""
    layer_of = _layers_of(picture)
    layout = Layout([[] for _ in range(max(layer_of.values()) + 1)])
    for box in picture.boxes:
        layout.layers[layer_of[box.id]].append(box.id)
    _join(layout, picture, layer_of)
    _order(layout)
    return layout


def _layers_of(picture: Picture) -> dict[str, int]:
    """Each box one layer below the lowest that it depends on; parts of the input right above their first user."""
    sources: dict[str, list[str]] = {box.id: [] for box in picture.boxes}
    targets: dict[str, list[str]] = {box.id: [] for box in picture.boxes}
    for edge in picture.edges:
        sources[edge.target].append(edge.source)
        targets[edge.source].append(edge.target)
    layer_of: dict[str, int] = {}
    for box in picture.boxes:
        layer_of[box.id] = max((layer_of[source] + 1 for source in sources[box.id]), default=0)
    for box in picture.boxes:
        if box.id.startswith("i") and targets[box.id]:
            layer_of[box.id] = min(layer_of[target] for target in targets[box.id]) - 1
    return layer_of


def _join(layout: Layout, picture: Picture, layer_of: Mapping[str, int]) -> None:
    farthest: dict[str, int] = {}
    for edge in picture.edges:
        farthest[edge.source] = max(farthest.get(edge.source, 0), layer_of[edge.target])
    layout.is_bent = sum(last - layer_of[source] - 1 for source, last in farthest.items()) <= MAX_BENDS
    layout.sources.update({box.id: [] for box in picture.boxes})
    layout.trunks.update({source: [source] for source in farthest})
    for source, last in farthest.items() if layout.is_bent else ():
        for layer in range(layer_of[source] + 1, last):
            bend = f"{source}@{layer}"
            layout.bends[bend] = source
            layout.sources[bend] = [layout.trunks[source][-1]]
            layout.layers[layer].append(bend)
            layout.trunks[source].append(bend)
    for edge in picture.edges:
        num_places = layer_of[edge.target] - layer_of[edge.source] if layout.is_bent else 1
        layout.num_shared[edge.source, edge.target] = num_places
        layout.sources[edge.target].append(layout.trunks[edge.source][num_places - 1])


def _order(layout: Layout) -> None:
    targets: dict[str, list[str]] = {}
    for place_name, sources in layout.sources.items():
        for source in sources:
            targets.setdefault(source, []).append(place_name)
    for _ in range(NUM_SWEEPS):
        _sweep(layout.layers[::-1], targets)
        _sweep(layout.layers, layout.sources)


def _sweep(layers: Sequence[list[str]], neighbours: Mapping[str, list[str]]) -> None:
    """Sorts each layer by where its neighbours in layers already visited are; others keep their relative place."""
    where: dict[str, float] = {}
    for layer in layers:
        size = max(1, len(layer))
        keys: dict[str, float] = {}
        for index, name in enumerate(layer):
            known = [where[other] for other in neighbours.get(name, ()) if other in where]
            keys[name] = sum(known) / len(known) if known else (index + 0.5) / size
        layer.sort(key=keys.__getitem__)
        where.update({name: (index + 0.5) / size for index, name in enumerate(layer)})


def place(layout: Layout, width_of: Callable[[str], float], gap: float) -> dict[str, float]:
    """The middle of each place, in the unit of the widths; the drawing begins at 0.

    Each place is wanted below the middle of those it is joined to. Within a layer wishes are met as far as the order and the gaps
    allow, halfway between what pushing everything to the right gives and what pushing to the left gives.
    """
    middle: dict[str, float] = {}
    for layer in layout.layers:
        wishes = []
        for name in layer:
            known = [middle[source] for source in layout.sources[name] if source in middle]
            wishes.append(sum(known) / len(known) if known else 0.0)
        widths = [width_of(name) for name in layer]
        to_right = _push(wishes, widths, gap)
        to_left = [-x for x in _push([-x for x in reversed(wishes)], widths[::-1], gap)][::-1]
        middle.update({name: (a + b) / 2 for name, a, b in zip(layer, to_right, to_left, strict=True)})
    left = min(middle[name] - width_of(name) / 2 for name in middle)
    return {name: x - left for name, x in middle.items()}


def _push(wishes: Sequence[float], widths: Sequence[float], gap: float) -> list[float]:
    """The wishes, each moved to the right as far as its left neighbour makes necessary."""
    placed: list[float] = []
    for index, wish in enumerate(wishes):
        if index:
            wish = max(wish, placed[-1] + (widths[index - 1] + widths[index]) / 2 + gap)
        placed.append(wish)
    return placed
