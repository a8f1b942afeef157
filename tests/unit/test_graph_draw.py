"""Drawings: every box and every edge is there, nothing overlaps, text is escaped, files are written."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.errors import CrossfadeError
from crossfade.graph.ascii_art import MAX_COLUMNS, ROW_DISTANCE, _share_rows
from crossfade.graph.check import CheckedGraph, check
from crossfade.graph.draw import to_ascii, to_dot, to_svg, visualize
from crossfade.graph.layout import lay_out, picture_of, place
from crossfade.graph.nodes import ActorInfo, InputNode, MethodNode, MultiOutputNode, Node, bind

SVG = "{http://www.w3.org/2000/svg}"
METHODS = {"f": 1, "split": 2}


def actor(name: str) -> ActorInfo:
    return ActorInfo(name, "Worker", "s", METHODS)


def call(name: str, *args: Any) -> MethodNode:
    node = bind(actor(name), "f", args, {})
    assert isinstance(node, MethodNode)
    return node


def checked(output: Node) -> CheckedGraph:
    return check(output, session="s", transports=("auto",))


def diamond() -> CheckedGraph:
    inp = InputNode()
    top = call("A", inp.x)
    left, right = call("A", top, inp[0]), call("B", top)
    values = bind(actor("C"), "split", (left, right), {})
    assert isinstance(values, tuple)
    return checked(MultiOutputNode([values[1], call("A", values[0]), top]))


def chain(num_calls: int, num_actors: int = 3) -> CheckedGraph:
    inp = InputNode()
    node: Node = inp
    for index in range(num_calls):
        node = call(f"W{index % num_actors}", node)
    return checked(node)


@st.composite
def graphs(draw_: st.DrawFn, max_calls: int = 9) -> CheckedGraph:
    inp = InputNode()
    values: list[Node] = []
    calls: list[MethodNode] = []
    for _ in range(draw_(st.integers(1, max_calls))):
        args = draw_(st.lists(st.sampled_from([*values, inp]), max_size=3))
        made = bind(actor(draw_(st.sampled_from("ABC"))), draw_(st.sampled_from(["f", "split"])), tuple(args), {})
        calls.append(made[0].parent if isinstance(made, tuple) else made)
        values += made if isinstance(made, tuple) else [made]
    ends = [node for node in calls if not any(value._users for value in node.outputs or (node,))]
    return checked(MultiOutputNode([node.outputs[0] if node.outputs else node for node in ends]))


def edges_of(graph: CheckedGraph) -> set[tuple[str, str]]:
    return {(edge.source, edge.target) for edge in picture_of(graph).edges}


# Boxes, edges, layers


def test_the_boxes_and_edges_of_a_diamond() -> None:
    picture = picture_of(diamond())
    labels = {box.id: box.label for box in picture.boxes}
    assert labels == {
        "i0": "inp.x",
        "i1": "inp[0]",
        "n0": "A.f",
        "n1": "A.f",
        "n2": "B.f",
        "n3": "C.split",
        "n4": "A.f",
        "out": "output [3]",
    }
    edges = {(edge.source, edge.target): (edge.label, edge.is_local) for edge in picture.edges}
    assert edges == {
        ("i0", "n0"): ("", False),
        ("n0", "n1"): ("", True),
        ("i1", "n1"): ("", False),
        ("n0", "n2"): ("", False),
        ("n1", "n3"): ("", False),
        ("n2", "n3"): ("", False),
        ("n3", "n4"): ("[0]", False),
        ("n3", "out"): ("[1] #0", False),
        ("n4", "out"): ("#1", False),
        ("n0", "out"): ("#2", False),
    }
    assert picture.actors == ["driver", "A", "B", "C"]


@given(graphs())
def test_layers_bends_and_places(graph: CheckedGraph) -> None:
    picture = picture_of(graph)
    layout = lay_out(picture)
    names = [name for layer in layout.layers for name in layer]
    assert all(layout.layers)
    assert Counter(names) == Counter([*(box.id for box in picture.boxes), *layout.bends])
    layer_of = {name: index for index, layer in enumerate(layout.layers) for name in layer}
    assert set(layout.num_shared) == edges_of(graph)
    for source, target in layout.num_shared:
        path = layout.path(source, target)
        assert (path[0], path[-1]) == (source, target)
        assert [layer_of[name] for name in path] == list(range(layer_of[source], layer_of[target] + 1))
        assert all(layout.bends[name] == source for name in path[1:-1])
        assert all(before in layout.sources[after] for before, after in pairwise(path))
    middle = place(layout, lambda name: 10 if name not in layout.bends else 2, 3)
    for layer in layout.layers:
        for before, after in pairwise(layer):
            widths = sum(10 if name not in layout.bends else 2 for name in (before, after))
            assert middle[after] - middle[before] >= widths / 2 + 3 - 1e-9


# Letters


def test_a_chain_in_letters() -> None:
    assert to_ascii(chain(2)).splitlines() == [
        "+--------+",
        "| i0 inp |",
        "+---+----+",
        "    v",
        "+---------+",
        "| n0 W0.f |",
        "+---+-----+",
        "    v",
        "+---------+",
        "| n1 W1.f |",
        "+---+-----+",
        "    v",
        "+--------+",
        "| output |",
        "+--------+",
    ]


class Lines:
    """Follows the lines of a drawing from a box to the boxes they end at."""

    def __init__(self, text: str) -> None:
        self.rows = text.splitlines()
        width = max(map(len, self.rows))
        self.rows = [row.ljust(width) for row in self.rows]
        self.boxes: dict[str, tuple[int, int, int]] = {}
        for row, line in enumerate(self.rows):
            for found in re.finditer(r"\| *((?:[in]\d+ \S+)|(?:output(?: \[\d+\])?)) *\|", line):
                name = found[1].split()[0].replace("output", "out")
                self.boxes[name] = (row, found.start(), found.end())

    def edges(self) -> set[tuple[str, str]]:
        return {(name, target) for name in self.boxes for target in self.targets(name)}

    def targets(self, name: str) -> Iterator[str]:
        row, start, end = self.boxes[name]
        bottom = self.rows[row + 1][start + 1 : end - 1] if row + 1 < len(self.rows) else ""
        for index, letter in enumerate(bottom):
            if letter == "+":
                yield from self.follow(row + 2, start + 1 + index)

    def follow(self, row: int, column: int) -> Iterator[str]:
        """Everything that a line which comes down into this cell leads to."""
        seen: set[tuple[int, int, int, int]] = set()
        pending = [(row, column, 1, 0)]
        while pending:
            step = pending.pop()
            if step in seen:
                continue
            seen.add(step)
            row, column, down, right = step
            letter = self.rows[row][column]
            if letter == "v":
                yield self.box_at(row + 2, column)
                continue
            assert letter in ("|-+" if right else "|+"), (letter, row, column)
            ways = [(down, right)]
            if letter == "+":
                ways = [way for way in ((1, 0), (0, 1), (0, -1)) if self.goes_on(row, column, *way)]
                ways = [way for way in ways if way != (-down, -right)]
            pending += [(row + way[0], column + way[1], *way) for way in ways]

    def goes_on(self, row: int, column: int, down: int, right: int) -> bool:
        row, column = row + down, column + right
        if not (0 <= row < len(self.rows) and 0 <= column < len(self.rows[row])):
            return False
        if down:
            return self.rows[row][column] in "|+v"
        while self.rows[row][column] == "|" and 0 < column < len(self.rows[row]) - 1:
            column += right
        return self.rows[row][column] in "-+"

    def box_at(self, row: int, column: int) -> str:
        return next(name for name, (at, start, end) in self.boxes.items() if at == row and start < column < end)


@given(graphs())
def test_lines_in_letters_lead_where_the_edges_do(graph: CheckedGraph) -> None:
    text = to_ascii(graph)
    assert text.isascii()
    if text.startswith("layer 0"):
        return
    assert max(map(len, text.splitlines())) <= MAX_COLUMNS
    assert Lines(text).edges() == edges_of(graph), text


def test_the_diamond_in_letters_is_drawn_and_not_listed() -> None:
    lines = Lines(to_ascii(diamond()))
    assert set(lines.boxes) == {"i0", "i1", "n0", "n1", "n2", "n3", "n4", "out"}
    assert lines.edges() == edges_of(diamond())


def test_a_graph_too_wide_for_letters_is_listed() -> None:
    inp = InputNode()
    text = to_ascii(checked(call("Sum", [call(f"Worker{index}", inp) for index in range(30)])))
    assert text.splitlines()[:2] == ["layer 0", "    i0 inp"]
    assert re.search(r"^    n7 Worker7\.f +<- i0$", text, re.MULTILINE)
    assert re.search(r"^   n30 Sum\.f +<- n0, n1, .*, n29$", text, re.MULTILINE)


def test_a_graph_too_big_for_letters_is_summed_up() -> None:
    text = to_ascii(chain(201))
    assert text.startswith("201 calls on 3 actors, 1 inputs, 1 outputs\n")
    assert "  W0: 67 calls" in text
    assert "| n199 W1.f |" in to_ascii(chain(200))


@given(st.dictionaries(st.integers(), st.tuples(st.integers(0, 50), st.integers(1, 20)), max_size=12))
def test_spans_in_one_row_keep_their_distance(given_spans: dict[int, tuple[int, int]]) -> None:
    spans = {str(name): (first, first + length) for name, (first, length) in given_spans.items()}
    rows = _share_rows(spans)
    for name, (first, last) in spans.items():
        for other, (other_first, other_last) in spans.items():
            if name != other and rows[name] == rows[other]:
                assert last + ROW_DISTANCE < other_first or other_last + ROW_DISTANCE < first


# Pictures


def elements(text: str, kind: str, **wanted: str) -> list[ElementTree.Element]:
    found = ElementTree.fromstring(text.encode()).iter(f"{SVG}{kind}")
    return [each for each in found if all(each.get(name) == value for name, value in wanted.items())]


@given(graphs())
def test_an_svg_has_every_box_and_every_edge(graph: CheckedGraph) -> None:
    text = to_svg(graph)
    groups = elements(text, "g")
    assert {group.get("id") for group in groups} == {box.id for box in picture_of(graph).boxes}
    rects = [rect for group in groups for rect in group.iter(f"{SVG}rect")]
    spans = [tuple(float(rect.get(name, "")) for name in ("x", "y", "width", "height")) for rect in rects]
    root = ElementTree.fromstring(text.encode())
    for index, (x, y, width, height) in enumerate(spans):
        assert 0 <= x <= x + width <= float(root.get("width", ""))
        assert 0 <= y <= y + height <= float(root.get("height", ""))
        for other_x, other_y, other_width, _ in spans[:index]:
            assert y != other_y or x + width < other_x or other_x + other_width < x
    paths = [path for kind in ("local", "remote") for path in elements(text, "path", **{"class": kind})]
    assert {(path.get("data-from"), path.get("data-to")) for path in paths} == edges_of(graph)


def test_an_svg_tells_actors_and_processes_apart() -> None:
    text = to_svg(diamond())
    local = elements(text, "path", **{"class": "local"})
    assert [(path.get("data-from"), path.get("data-to")) for path in local] == [("n0", "n1")]
    assert all(path.get("stroke-dasharray") for path in local)
    assert not any(path.get("stroke-dasharray") for path in elements(text, "path", **{"class": "remote"}))
    fills = {group.get("id"): rect.get("fill") for group in elements(text, "g") for rect in group.iter(f"{SVG}rect")}
    assert fills["n0"] == fills["n1"] == fills["n4"]
    assert len({fills["n0"], fills["n2"], fills["n3"], fills["out"]}) == 4
    assert fills["i0"] == fills["out"]


def test_names_are_escaped() -> None:
    inp = InputNode()
    graph = checked(call("<&\"'>\x00\\", inp['<b a="1">&\\']))
    (root,) = [ElementTree.fromstring(to_svg(graph).encode())]
    written = "".join(root.itertext())
    assert 'inp["<b a=\\"1\\">&\\\\"]' in written
    assert "<&\"'>\ufffd\\.f" in written
    assert r'label="i0 inp[\"<b a=\\\"1\\\">&\\\\\"]"' in to_dot(graph)
    assert "\0" not in to_dot(graph)


def test_graphviz_text() -> None:
    lines = to_dot(diamond()).splitlines()
    assert lines[0] == "digraph compiled_graph {"
    assert lines[-1] == "}"
    assert any(line.startswith('  n3 [label="n3 C.split", fillcolor="#') for line in lines)
    assert '  n0 -> n1 [style=dashed, color="#8a9099"];' in lines
    assert '  n3 -> out [label="[1] #0"];' in lines
    assert "  i0 -> n0;" in lines


def test_big_graphs_are_drawn_in_time() -> None:
    inp = InputNode()
    node: Node = call("A", inp)
    for index in range(2_000):
        node = call(f"W{index % 5}", node, inp)
    long_ = checked(node)
    other = InputNode()
    wide = checked(call("Sum", [call(f"W{index % 7}", other) for index in range(1_000)]))
    start_s = time.process_time()
    for graph in (long_, wide):
        text = to_svg(graph)
        assert text.count("<g ") == len(graph.methods) + 2
        assert len(text) < 2_000 * len(graph.methods)
        to_dot(graph)
        to_ascii(graph)
    assert time.process_time() - start_s < 5


def test_too_many_bends_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossfade.graph.layout.MAX_BENDS", 0)
    graph = diamond()
    assert not lay_out(picture_of(graph)).is_bent
    assert len(elements(to_svg(graph), "path", **{"class": "remote"})) == 9
    assert to_ascii(graph).startswith("layer 0")


# visualize


def test_letters_are_printed_and_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    graph = diamond()
    assert visualize(graph, format="ascii") == to_ascii(graph) == capsys.readouterr().out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("kind", "function"), [("svg", to_svg), ("dot", to_dot)])
def test_files_are_written_and_shown(kind: str, function: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []
    monkeypatch.setattr("webbrowser.open", shown.append)
    graph = diamond()
    text = visualize(graph, str(tmp_path / "my.graph"), kind)
    assert text == function(graph) == (tmp_path / f"my.graph.{kind}").read_text(encoding="utf-8")
    assert shown == []
    visualize(graph, str(tmp_path / "my.graph"), kind, view=True)
    assert shown == [(tmp_path / f"my.graph.{kind}").as_uri()]


def test_bitmaps_need_graphviz(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CrossfadeError, match='hint: use format="svg"'):
        visualize(diamond(), str(tmp_path / "graph"))


def fake_dot(folder: Path, script: str) -> None:
    program = folder / "dot"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)


def test_graphviz_is_given_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dot(tmp_path, 'echo "$1" > "$3"; cat >> "$3"')
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path / name))
    text = visualize(diamond(), str(tmp_path / "graph"))
    assert text == to_dot(diamond())
    assert (tmp_path / "graph.png").read_text() == f"-Tpng\n{text}"


def test_graphviz_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_dot(tmp_path, 'cat > /dev/null; echo "no fonts" >&2; exit 3')
    monkeypatch.setattr("shutil.which", lambda name: str(tmp_path / name))
    with pytest.raises(CrossfadeError, match=r"exit code 3\): no fonts\nhint:"):
        visualize(diamond(), str(tmp_path / "graph"), "pdf")


def test_a_format_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="hint: it is one of ascii, svg, dot, png, pdf, jpeg"):
        visualize(diamond(), format="bmp")
