"""Drawings of a graph: with letters, for Graphviz, as SVG, and through Graphviz as a bitmap or PDF."""

from __future__ import annotations

import shutil
import subprocess
import webbrowser
from pathlib import Path

from crossfade.errors import CrossfadeError
from crossfade.graph.ascii_art import to_ascii
from crossfade.graph.check import CheckedGraph
from crossfade.graph.layout import picture_of
from crossfade.graph.svg import colours_of, to_svg

__all__ = ["FORMATS", "to_ascii", "to_dot", "to_svg", "visualize"]

BY_GRAPHVIZ = ("png", "pdf", "jpeg")
FORMATS = ("ascii", "svg", "dot", *BY_GRAPHVIZ)


def to_dot(graph: CheckedGraph) -> str:
    """The graph in Graphviz's language. Values that stay in one process are dashed."""
    picture = picture_of(graph)
    colours = colours_of(picture)
    lines = [
        "digraph compiled_graph {",
        '  node [shape=box, style="rounded,filled", fontname="monospace", fontsize=11];',
        '  edge [fontname="monospace", fontsize=9];',
    ]
    for box in picture.boxes:
        shape = "" if box.id.startswith("n") else ", shape=ellipse, style=filled"
        lines.append(f'  {box.id} [label={_quote(box.text)}, fillcolor="{colours[box.actor]}"{shape}];')
    for edge in picture.edges:
        looks = [f"label={_quote(edge.label)}"] if edge.label else []
        looks += ['style=dashed, color="#8a9099"'] if edge.is_local else []
        attributes = f" [{', '.join(looks)}]" if looks else ""
        lines.append(f"  {edge.source} -> {edge.target}{attributes};")
    return "\n".join([*lines, "}", ""])


def visualize(graph: CheckedGraph, filename: str = "compiled_graph", format: str = "png", view: bool = False) -> str:
    """Draws a graph into a file, whose suffix is the format; ``ascii`` is printed and not written. Returns the drawing as text.

    For ``png``, ``pdf`` and ``jpeg`` Graphviz has to be installed; their text is what it was given.
    """
    if format not in FORMATS:
        raise ValueError(f"there is no format {format!r}\nhint: it is one of {', '.join(FORMATS)}")
    if format == "ascii":
        text = to_ascii(graph)
        print(text, end="")
        return text
    path = Path(f"{filename}.{format}")
    if format in BY_GRAPHVIZ:
        text = to_dot(graph)
        _run_graphviz(text, path, format)
    else:
        text = to_svg(graph) if format == "svg" else to_dot(graph)
        path.write_text(text, encoding="utf-8")
    if view:
        webbrowser.open(path.absolute().as_uri())
    return text


def _run_graphviz(text: str, path: Path, format: str) -> None:
    program = shutil.which("dot")
    if program is None:
        raise CrossfadeError(
            f"{format} pictures are drawn by Graphviz, whose program `dot` is not installed",
            hint='use format="svg", which needs nothing else, or install Graphviz',
        )
    done = subprocess.run(
        [program, f"-T{format}", "-o", str(path)], input=text, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        raise CrossfadeError(
            f"Graphviz could not draw {path} (exit code {done.returncode}): {done.stderr.strip()}",
            hint='use format="svg", which needs nothing else',
        )


def _quote(text: str) -> str:
    """A string of Graphviz's language; a backslash in it is a backslash."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\0", "")
    return f'"{escaped}"'
