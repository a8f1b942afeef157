"""The marks of `crossfade.interrupted` are where they have to be, in all of the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import crossfade

_SOURCE = Path(crossfade.__file__).parent
_RAISES_WHAT_WAS_HELD = ast.unparse(ast.parse("if Held.is_pending:\n    raise_held()"))


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Those of files that have a destructor or a mark: each process that collects tests reads them."""
    for path in sorted(_SOURCE.rglob("*.py")):
        if not ("def __del__" in (text := path.read_text()) or "@whole" in text):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.relative_to(_SOURCE)}, line {node.lineno}: {node.name}", node


def marks(function: ast.FunctionDef) -> set[str]:
    return {each.id for each in function.decorator_list if isinstance(each, ast.Name)}


def is_raised_at_its_end(function: ast.FunctionDef) -> bool:
    last = function.body[-1]
    return isinstance(last, ast.Try) and any(ast.unparse(each) == _RAISES_WHAT_WAS_HELD for each in last.finalbody)


FUNCTIONS = list(functions())
DESTRUCTORS = [(label, function) for label, function in FUNCTIONS if function.name == "__del__"]
WHOLE = [(label, function) for label, function in FUNCTIONS if "whole" in marks(function)]


def test_there_are_some() -> None:
    assert DESTRUCTORS
    assert WHOLE


@pytest.mark.parametrize("function", [each for _, each in DESTRUCTORS], ids=[label for label, _ in DESTRUCTORS])
def test_an_interrupt_in_a_destructor_comes_again_behind_it(function: ast.FunctionDef) -> None:
    assert marks(function) & {"brief", "brief_step"}


@pytest.mark.parametrize("function", [each for _, each in WHOLE], ids=[label for label, _ in WHOLE])
def test_what_is_whole_raises_what_it_has_held_back(function: ast.FunctionDef) -> None:
    assert is_raised_at_its_end(function)
