"""A graph as a standalone SVG picture.

Each actor has its colour, each box its actor's; colours repeat after eight actors, names do not. Values that go from
one process to another are drawn as solid dark lines, those that stay in one as thin dashed ones.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from crossfade.graph.check import CheckedGraph
from crossfade.graph.layout import Box, Edge, Layout, Picture, lay_out, picture_of, place
from crossfade.types import DRIVER

MARGIN = 20.0
LETTER_WIDTH = 7.4
"""The widest that letters of ``FONT_SIZE`` are on average, in the fonts named below."""
FONT_SIZE = 12
LABEL_SIZE = 10
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
BOX_HEIGHT = 30.0
LAYER_HEIGHT = 78.0
GAP = 22.0
BEND_WIDTH = 8.0
MAX_PORT_DISTANCE = 18.0
LEGEND_HEIGHT = 24.0
MAX_LABEL_LETTERS = 40
MAX_LEGEND_ACTORS = 24
LEGEND_WIDTH = 640.0

DRIVER_COLOUR = "#e4e6e9"
COLOURS = ("#9fd0ee", "#f6cf86", "#8fd9bd", "#f2b3d4", "#f5ec95", "#f0ab86", "#b9bdf0", "#c9dca0")
"""Light enough for black text, and told apart with any kind of colour vision by lightness as well as hue."""

Spot = tuple[float, float]
"""x and y, in pixels."""
Branch = tuple[Spot, Spot]
"""The ends of the last piece of an edge: a box or a bend, and the box that it leads to."""

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def colours_of(picture: Picture) -> dict[str, str]:
    """The colour of each actor."""
    others = [actor for actor in picture.actors if actor != DRIVER]
    return {DRIVER: DRIVER_COLOUR} | {actor: COLOURS[index % len(COLOURS)] for index, actor in enumerate(others)}


def to_svg(graph: CheckedGraph) -> str:
    """The graph as an SVG document; the sizes in it are in pixels."""
    picture = picture_of(graph)
    layout = lay_out(picture)
    labels = {box.id: _shorten(box.text) for box in picture.boxes}
    widths = {name: len(label) * LETTER_WIDTH + 20 for name, label in labels.items()}
    middle = place(layout, lambda name: widths.get(name, BEND_WIDTH), GAP)
    colours = colours_of(picture)
    legend = list(_legend(colours))
    top = MARGIN * 2 + LEGEND_HEIGHT * (1 + max(row for row, _, _ in legend))
    spots = _spots(layout, middle, top)
    branches = _branches(layout, spots, widths)
    width = max(LEGEND_WIDTH, max(middle[name] + widths.get(name, BEND_WIDTH) / 2 for name in middle)) + 2 * MARGIN
    height = top + (len(layout.layers) - 1) * LAYER_HEIGHT + BOX_HEIGHT + MARGIN
    lines = [
        *_head(width, height),
        *(_legend_item(row, x, name, colours) for row, x, name in legend),
        *_trunks(picture, layout, spots),
        *(_edge(edge, branches[edge.source, edge.target]) for edge in picture.edges),
        *(_box(box, labels[box.id], spots[box.id], widths[box.id], colours[box.actor]) for box in picture.boxes),
        *(_edge_label(edge, branches[edge.source, edge.target]) for edge in picture.edges if edge.label),
    ]
    return "\n".join([*lines, "</svg>", ""])


def _spots(layout: Layout, middle: Mapping[str, float], top: float) -> dict[str, Spot]:
    """The middle of each place, in x and y."""
    return {
        name: (middle[name] + MARGIN, top + index * LAYER_HEIGHT + BOX_HEIGHT / 2)
        for index, layer in enumerate(layout.layers)
        for name in layer
    }


def _branches(layout: Layout, spots: Mapping[str, Spot], widths: Mapping[str, float]) -> dict[tuple[str, str], Branch]:
    """The last piece of each edge. It ends at the target, moved aside so that edges end beside one another."""
    arriving: dict[str, list[tuple[str, Spot]]] = {}
    for (source, target), num_shared in layout.num_shared.items():
        arriving.setdefault(target, []).append((source, spots[layout.trunks[source][num_shared - 1]]))
    branches: dict[tuple[str, str], Branch] = {}
    for target, starts in arriving.items():
        starts.sort(key=lambda start: start[1])
        distance = min(MAX_PORT_DISTANCE, (widths[target] - 16) / len(starts))
        for index, (source, spot) in enumerate(starts):
            x, y = spots[target]
            branches[source, target] = (spot, (x + (index - (len(starts) - 1) / 2) * distance, y))
    return branches


def _head(width: float, height: float) -> Iterator[str]:
    size = f'width="{width:.0f}" height="{height:.0f}" viewBox="0 0 {width:.0f} {height:.0f}"'
    yield '<?xml version="1.0" encoding="UTF-8"?>'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" font-size="{FONT_SIZE}">'
    yield "<title>compiled graph</title>"
    yield "<defs>"
    for kind, colour in (("far", "#222222"), ("near", "#8a9099")):
        yield (
            f'<marker id="{kind}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto"><path d="M0,0 L8,4 L0,8 z" fill="{colour}"/></marker>'
        )
    yield "</defs>"
    yield f'<rect width="{width:.0f}" height="{height:.0f}" fill="#ffffff"/>'


def _legend(colours: Mapping[str, str]) -> Iterator[tuple[int, float, str]]:
    """Row, left edge and name of each item: the two kinds of line, then the actors."""
    names = list(colours)
    shown = names[: MAX_LEGEND_ACTORS + 1]
    more = [f"and {len(names) - len(shown)} more actors"] if len(names) > len(shown) else []
    row, x = 0, MARGIN
    for name in ["between processes", "within one process", *shown, *more]:
        width = len(_shorten(name)) * LETTER_WIDTH + 46
        if x > MARGIN and x + width > LEGEND_WIDTH + MARGIN:
            row, x = row + 1, MARGIN
        yield row, x, name
        x += width


def _legend_item(row: int, x: float, name: str, colours: Mapping[str, str]) -> str:
    y = MARGIN + row * LEGEND_HEIGHT
    text = _text(x + 30, y + 4, _shorten(name), 'fill="#333333"')
    if name in colours:
        return f'<rect x="{x:.1f}" y="{y - 7:.1f}" width="24" height="14" rx="4" fill="{colours[name]}"/>{text}'
    look = _look(is_local=name == "within one process")
    return f'<path d="M{x:.1f},{y:.1f} h24" {look}/>{text}'


def _box(box: Box, label: str, spot: Spot, width: float, colour: str) -> str:
    x, y = spot
    kind = "call" if box.id.startswith("n") else "input" if box.id.startswith("i") else "output"
    radius = 5 if kind == "call" else BOX_HEIGHT / 2
    place = f'x="{x - width / 2:.1f}" y="{y - BOX_HEIGHT / 2:.1f}" width="{width:.1f}" height="{BOX_HEIGHT:.0f}"'
    text = _text(x, y + 4, label, 'fill="#000000" text-anchor="middle"')
    tip = _clean(f"{box.label} on {box.actor}: {box.detail}")
    return (
        f'<g class="{kind}" id="{box.id}"><title>{tip}</title>'
        f'<rect {place} rx="{radius:.0f}" fill="{colour}" stroke="#444444" stroke-width="0.8"/>'
        f"{text}</g>"
    )


def _trunks(picture: Picture, layout: Layout, spots: Mapping[str, Spot]) -> Iterator[str]:
    """The way of each value through its bends, which its edges share; drawn as local if all of them are."""
    is_local = dict.fromkeys(layout.trunks, True)
    for edge in picture.edges:
        is_local[edge.source] &= edge.is_local or layout.num_shared[edge.source, edge.target] == 1
    for source, places in layout.trunks.items():
        if len(places) > 1:
            way = _way([spots[name] for name in places])
            x, y = spots[places[-1]]
            end = f"L{x:.1f},{y + BOX_HEIGHT / 2:.1f}"
            yield f'<path class="trunk" data-from="{source}" d="{way} {end}" {_look(is_local=is_local[source])}/>'


def _edge(edge: Edge, branch: Branch) -> str:
    kind, arrow = ("local", "near") if edge.is_local else ("remote", "far")
    return (
        f'<path class="{kind}" data-from="{edge.source}" data-to="{edge.target}" d="{_way(branch)}" '
        f'{_look(is_local=edge.is_local)} marker-end="url(#{arrow})"/>'
    )


def _way(spots: Sequence[Spot]) -> str:
    """From the lower edge of the first place to the upper edge of the last: straight through places, curved between."""
    x, y = spots[0]
    pieces = [f"M{x:.1f},{y + BOX_HEIGHT / 2:.1f}"]
    for (x, y), (next_x, next_y) in pairwise(spots):
        start, end = y + BOX_HEIGHT / 2, next_y - BOX_HEIGHT / 2
        middle = (start + end) / 2
        pieces.append(f"L{x:.1f},{start:.1f} C{x:.1f},{middle:.1f} {next_x:.1f},{middle:.1f} {next_x:.1f},{end:.1f}")
    return " ".join(pieces)


def _look(*, is_local: bool) -> str:
    if is_local:
        return 'fill="none" stroke="#8a9099" stroke-width="1.1" stroke-dasharray="5 3"'
    return 'fill="none" stroke="#222222" stroke-width="1.5"'


def _edge_label(edge: Edge, branch: Branch) -> str:
    (x, y), (next_x, next_y) = branch
    x, y = (x + next_x) / 2, (y + next_y) / 2
    label = _shorten(edge.label)
    width = len(label) * LETTER_WIDTH * LABEL_SIZE / FONT_SIZE + 4
    back = f'<rect x="{x - width / 2:.1f}" y="{y - 7:.1f}" width="{width:.1f}" height="14" fill="#ffffff"/>'
    return back + _text(x, y + 3.5, label, f'fill="#333333" font-size="{LABEL_SIZE}" text-anchor="middle"')


def _text(x: float, y: float, text: str, look: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{_clean(text)}</text>'


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_LABEL_LETTERS else f"{text[: MAX_LABEL_LETTERS - 1]}…"


def _clean(text: str) -> str:
    """Text for XML: escaped, and without what XML cannot hold."""
    return html.escape(NOT_IN_XML.sub("\ufffd", text))
