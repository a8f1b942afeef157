"""The floors of `crossfade.ops`: a file imports files of its own floor and of floors below, lazily and for types too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import crossfade.ops

ROOM = Path(crossfade.ops.__file__).parent
MOST_ENTRIES, MOST_LINES = 15, 400


def floors() -> list[str]:
    """From the top, as the room's docstring draws them."""
    (drawn,) = re.findall(
        r"::\n\n(.*?)\n\n", ast.get_docstring(ast.parse((ROOM / "__init__.py").read_text())) or "", re.S
    )
    return [line.split()[0].strip("/") for line in drawn.splitlines() if line.split()]


def imports() -> Iterator[tuple[str, str]]:
    """Who imports whom of this room's files, by their paths in it without ``.py``."""
    names = {".".join(path.relative_to(ROOM).with_suffix("").parts) for path in ROOM.rglob("*.py")}
    for name in names - {"__init__"}:
        for node in ast.walk(ast.parse((ROOM / f"{name.replace('.', '/')}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crossfade.ops"):
                base = (node.module or "").removeprefix("crossfade.ops").strip(".")
                for each in node.names:
                    inner = f"{base}.{each.name}".strip(".")
                    yield name, inner if inner in names else base


def test_the_top_is_a_table_of_contents() -> None:
    entries = {path.stem for path in ROOM.iterdir() if path.name != "__pycache__"}
    assert entries == {"__init__", *floors()}
    assert len(entries) <= MOST_ENTRIES


def test_nobody_imports_upward() -> None:
    order = floors()
    up = [pair for pair in imports() if order.index(pair[1].split(".")[0]) < order.index(pair[0].split(".")[0])]
    assert not up


def test_there_is_no_circle() -> None:
    arrows: dict[str, set[str]] = {}
    for name, target in imports():
        arrows.setdefault(name, set()).add(target)
    TopologicalSorter(arrows).prepare()


def test_files_are_short() -> None:
    assert not [path.name for path in ROOM.rglob("*.py") if len(path.read_text().splitlines()) > MOST_LINES]
