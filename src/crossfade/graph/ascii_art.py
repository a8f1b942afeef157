"""A graph drawn with letters, for terminals that show nothing but ASCII.

Boxes stand in layers; lines leave a box at its lower edge and enter at the upper one, with an arrowhead. A ``+`` joins
lines of one value; lines that merely cross are drawn as ``-|-``.

Lines turn between two layers, in the *channel*. Each value has a row of it to itself as far as it spreads (rows are
shared by values that do not meet), and columns are never shared: boxes send in even columns and receive in odd ones, or
in the very column in which their only sender stands above.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from crossfade.graph.check import CheckedGraph
from crossfade.graph.layout import Layout, Picture, lay_out, picture_of, place

MAX_DRAWN_NODES = 200
MAX_COLUMNS = 160
GAP = 3
BEND_WIDTH = 3
BOX_HEIGHT = 3
PORT_DISTANCE = 2
ROW_DISTANCE = 4
"""At most three lines run down beside each other (two that enter a box, one that leaves another between them), so there
is a space between the lines of two values in one row of a channel, and ``+|+`` is always a crossing."""
MAX_LISTED_ACTORS = 20


def to_ascii(graph: CheckedGraph) -> str:
    """The graph as text, ending in a newline.

    Boxes and lines where they fit into `MAX_COLUMNS` columns; else a list, a line per box; beyond `MAX_DRAWN_NODES`
    calls a summary.
    """
    picture = picture_of(graph)
    if len(graph.methods) > MAX_DRAWN_NODES:
        return _summary(graph, picture)
    layout = lay_out(picture)
    drawing = _Drawing(picture, layout) if layout.is_bent else None
    if drawing is None or drawing.num_columns > MAX_COLUMNS:
        return _list(picture, layout)
    return drawing.text()


def _summary(graph: CheckedGraph, picture: Picture) -> str:
    calls = Counter(node.actor.id for node in graph.methods)
    num_local = sum(edge.is_local for edge in picture.edges)
    inputs_outputs = f"{len(graph.input_parts)} inputs, {len(graph.outputs)} outputs"
    lines = [
        f"{len(graph.methods)} calls on {len(calls)} actors, {inputs_outputs}",
        f"{len(picture.edges)} edges, {num_local} of them within one process",
        *(f"  {actor}: {number} calls" for actor, number in calls.most_common(MAX_LISTED_ACTORS)),
    ]
    if len(calls) > MAX_LISTED_ACTORS:
        lines.append(f"  and {len(calls) - MAX_LISTED_ACTORS} more actors")
    return "\n".join([*lines, f"(more than {MAX_DRAWN_NODES} calls are not drawn with letters)", ""])


def _list(picture: Picture, layout: Layout) -> str:
    """A line per box, with what it is made from."""
    boxes = {box.id: box for box in picture.boxes}
    made_from: dict[str, list[str]] = {box.id: [] for box in picture.boxes}
    for edge in picture.edges:
        made_from[edge.target].append(edge.source)
    width = max(len(box.label) for box in picture.boxes)
    lines = []
    for index, layer in enumerate(layout.layers):
        lines.append(f"layer {index}")
        for name in layer:
            if name in boxes:
                sources = f"  <- {', '.join(made_from[name])}" if made_from[name] else ""
                lines.append(f"  {name:>4} {boxes[name].label:<{width}}{sources}".rstrip())
    return "\n".join([*lines, ""])


class _Drawing:
    """Boxes and lines on a grid of letters."""

    def __init__(self, picture: Picture, layout: Layout) -> None:
        self._layout = layout
        self._senders = {sender for senders in layout.sources.values() for sender in senders}
        self._labels = {box.id: box.text for box in picture.boxes}
        middle = place(layout, self._width, GAP)
        self._left = {name: round(x - self._width(name) / 2) for name, x in middle.items()}
        self._sends: dict[str, int] = {}
        self._receives: dict[str, dict[str, int]] = {}
        self._find_ports()
        self.num_columns = max(self._left[name] + self._width(name) for name in middle)

    def text(self) -> str:
        rows: list[str] = []
        for index, layer in enumerate(self._layout.layers):
            if index:
                rows += self._channel(layer)
            rows += self._boxes(layer)
        return "\n".join([*(row.rstrip() for row in rows), ""])

    def _width(self, name: str) -> int:
        if name in self._layout.bends:
            return BEND_WIDTH
        return max(len(self._labels[name]) + 4, (PORT_DISTANCE + 1) * len(self._layout.sources[name]) + 4)

    # Ports

    def _find_ports(self) -> None:
        for layer in self._layout.layers:
            for index, name in enumerate(layer):
                if name in self._layout.bends:
                    self._straighten(name, layer[index - 1 : index], layer[index + 1 : index + 2])
                left, right = self._inside(name)
                senders = sorted(self._layout.sources[name], key=lambda sender: self._sends[sender])
                columns = _receiving_columns([self._sends[sender] for sender in senders], left, right)
                self._receives[name] = dict(zip(senders, columns, strict=True))
                wanted = columns[0] if name in self._layout.bends else (left + right) // 2
                self._sends[name] = _nearest(wanted, left, right, parity=0)

    def _straighten(self, bend: str, before: Sequence[str], after: Sequence[str]) -> None:
        """Moves a bend below its sender if that is near enough and the neighbours leave room."""
        (sender,) = self._layout.sources[bend]
        left = self._sends[sender] - BEND_WIDTH // 2
        low = max((self._left[name] + self._width(name) + 1 for name in before), default=0)
        high = min((self._left[name] - BEND_WIDTH - 1 for name in after), default=left)
        if low <= left <= high and abs(left - self._left[bend]) <= GAP:
            self._left[bend] = left

    def _inside(self, name: str) -> tuple[int, int]:
        """The first and the last column where lines may begin or end."""
        left, right = self._left[name], self._left[name] + self._width(name) - 1
        return (left, right) if name in self._layout.bends else (left + 1, right - 1)

    # Rows

    def _boxes(self, layer: Sequence[str]) -> Iterator[str]:
        grid = [[" "] * self.num_columns for _ in range(BOX_HEIGHT)]
        for name in layer:
            left, width = self._left[name], self._width(name)
            if name in self._layout.bends:
                (received,) = self._receives[name].values()
                self._bend(grid, received, self._sends[name])
                continue
            edge = f"+{'-' * (width - 2)}+"
            for row, text in enumerate((edge, f"|{self._labels[name]:^{width - 2}}|", edge)):
                grid[row][left : left + width] = text
            if name in self._senders:
                grid[-1][self._sends[name]] = "+"
        return ("".join(row) for row in grid)

    def _bend(self, grid: list[list[str]], received: int, sent: int) -> None:
        grid[0][received] = grid[2][sent] = "|"
        for column in range(min(received, sent), max(received, sent) + 1):
            grid[1][column] = "-"
        grid[1][received] = grid[1][sent] = "|" if received == sent else "+"

    def _channel(self, layer: Sequence[str]) -> Iterator[str]:
        """The rows between a layer and the one above it."""
        ends: dict[str, list[int]] = {}
        for name in layer:
            for sender, column in self._receives[name].items():
                ends.setdefault(sender, []).append(column)
        spans = {s: (min(self._sends[s], *columns), max(self._sends[s], *columns)) for s, columns in ends.items()}
        tracks = _share_rows({sender: span for sender, span in spans.items() if span[0] < span[1]})
        num_tracks = max(tracks.values(), default=-1) + 1
        grid = [[" "] * self.num_columns for _ in range(num_tracks + 1)]
        for sender, track in tracks.items():
            first, last = spans[sender]
            grid[track][first : last + 1] = "-" * (last + 1 - first)
        for sender, columns in ends.items():
            turn = tracks.get(sender, num_tracks)
            for row in range(turn):
                grid[row][self._sends[sender]] = "|"
            for column in columns:
                for row in range(turn, num_tracks):
                    grid[row][column] = "|"
        for sender, track in tracks.items():
            for column in (self._sends[sender], *ends[sender]):
                grid[track][column] = "+"
        for name in layer:
            for column in self._receives[name].values():
                grid[-1][column] = "|" if name in self._layout.bends else "v"
        return ("".join(row) for row in grid)


def _receiving_columns(senders: Sequence[int], left: int, right: int) -> list[int]:
    """A column for each sender, in order: its own where that is possible, else the nearest odd one that is free."""
    columns: list[int] = []
    low = left
    for index, sender in enumerate(senders):
        high = right - (PORT_DISTANCE + 1) * (len(senders) - 1 - index)
        column = sender if low <= sender <= high else _nearest(sender, low, high, parity=1)
        columns.append(column)
        low = column + PORT_DISTANCE
    return columns


def _nearest(wanted: int, low: int, high: int, *, parity: int) -> int:
    """The column of a parity in low..high that is nearest to the wanted one."""
    inside = min(max(wanted, low), high)
    near = (column for column in (inside, inside - 1, inside + 1) if low <= column <= high and column % 2 == parity)
    return next(near)


def _share_rows(spans: dict[str, tuple[int, int]]) -> dict[str, int]:
    """A row for each span, so that spans in one row are more than `ROW_DISTANCE` apart."""
    last: list[int] = []
    rows: dict[str, int] = {}
    for name, (first, end) in sorted(spans.items(), key=lambda item: item[1]):
        row = next((row for row, used in enumerate(last) if first - used > ROW_DISTANCE), len(last))
        if row == len(last):
            last.append(end)
        last[row] = end
        rows[name] = row
    return rows
