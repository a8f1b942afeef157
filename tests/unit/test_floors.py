"""The floors of large rooms: a file imports files of its own floor and of floors below, lazily and for types too."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import crossfade

MOST_ENTRIES, MOST_LINES = 15, 400
pytestmark = pytest.mark.parametrize("room", ["batches", "ops"])


def folder_of(room: str) -> Path:
    return Path(crossfade.__file__).parent / room


def floors(room: str) -> list[str]:
    """From the top, as the room's docstring draws them."""
    (drawn,) = re.findall(
        r"::\n\n(.*?)\n\n", ast.get_docstring(ast.parse((folder_of(room) / "__init__.py").read_text())) or "", re.S
    )
    return [line.split()[0].strip("/") for line in drawn.splitlines() if line.split()]


def imports(room: str) -> Iterator[tuple[str, str]]:
    """Who imports whom of the room's files, by their paths in it without ``.py``."""
    folder, package = folder_of(room), f"crossfade.{room}"
    names = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("*.py")}
    for name in names - {"__init__"}:
        for node in ast.walk(ast.parse((folder / f"{name.replace('.', '/')}.py").read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(package):
                base = (node.module or "").removeprefix(package).strip(".")
                for each in node.names:
                    inner = f"{base}.{each.name}".strip(".")
                    yield name, inner if inner in names else base


def test_the_top_is_a_table_of_contents(room: str) -> None:
    entries = {path.stem for path in folder_of(room).iterdir() if path.name != "__pycache__"}
    assert entries == {"__init__", *floors(room)}
    assert len(entries) <= MOST_ENTRIES


def test_nobody_imports_upward(room: str) -> None:
    order = floors(room)
    up = [pair for pair in imports(room) if order.index(pair[1].split(".")[0]) < order.index(pair[0].split(".")[0])]
    assert not up


def test_there_is_no_circle(room: str) -> None:
    arrows: dict[str, set[str]] = {}
    for name, target in imports(room):
        arrows.setdefault(name, set()).add(target)
    TopologicalSorter(arrows).prepare()


def test_files_are_short(room: str) -> None:
    assert not [path.name for path in folder_of(room).rglob("*.py") if len(path.read_text().splitlines()) > MOST_LINES]
