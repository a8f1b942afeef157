"""The modules that setup.py has compiled: what mypyc would compile to something else than Python means, none of them does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MARKS = {"whole", "interruptible"}


def hot_modules() -> list[str]:
    """`HOT` of setup.py, without running it."""
    for statement in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "HOT":
            return list(ast.literal_eval(statement.value))
    raise AssertionError("setup.py has no HOT")


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.fixture(params=hot_modules())
def tree(request: pytest.FixtureRequest) -> ast.Module:
    return ast.parse((ROOT / "src" / "crossfade" / f"{request.param}.py").read_text())


def test_the_list_is_sorted_and_has_each_module_once() -> None:
    assert hot_modules() == sorted(set(hot_modules()))


def test_no_nested_function_uses_another_one(tree: ast.Module) -> None:
    """Nested functions share one environment, which would refer to itself: what they hold would stay until the collector comes."""
    for function in functions(tree):
        nested = [node for node in ast.walk(function) if isinstance(node, ast.FunctionDef | ast.Lambda)]
        names = {node.name for node in functions(function)} - {function.name}
        for node in nested[1:]:
            used = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
            assert not used & names, f"in {function.name}, line {node.lineno}"


def test_no_function_imports_a_module_of_ours_as_a_name(tree: ast.Module) -> None:
    """``from crossfade.package import module`` inside a function gives None; names of a module are imported well."""
    for function in functions(tree):
        for node in ast.walk(function):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("crossfade"):
                folder = ROOT / "src" / str(node.module).replace(".", "/")
                assert not [each.name for each in node.names if (folder / f"{each.name}.py").exists()], node.lineno


def test_no_function_says_by_its_frame_that_an_interrupt_waits(tree: ast.Module) -> None:
    """It would have none (`crossfade.interrupted`)."""
    marks = [
        decorator.id
        for function in functions(tree)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Name)
    ]
    assert not MARKS & set(marks)


def test_no_class_calls_a_method_by_another_name(tree: ast.Module) -> None:
    """``other = method`` in a class would look for a global of that name, and leave its error pending."""
    for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        methods = {node.name for node in owner.body if isinstance(node, ast.FunctionDef)}
        named = [
            node.value.id for node in owner.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name)
        ]
        assert not methods & set(named), owner.name


def test_no_kind_of_exception_is_made(tree: ast.Module) -> None:
    """It would be a native class: ``except`` of it and of another one under one name takes both for it."""
    bases = [
        base.id
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if isinstance(base, ast.Name)
    ]
    assert not [base for base in bases if base.endswith(("Exception", "Error", "Broken", "Closed"))]


def test_nothing_is_deleted_from_an_object(tree: ast.Module) -> None:
    deleted = [target for node in ast.walk(tree) if isinstance(node, ast.Delete) for target in node.targets]
    assert not [target.lineno for target in deleted if isinstance(target, ast.Attribute)]
