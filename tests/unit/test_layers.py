"""Who may import whom: the table of docs/architecture.md, read from there, and enforced on the source, subfolders included.

Every import counts: at the top of a module, inside a function, under ``if TYPE_CHECKING`` and by
``importlib.import_module``, whose name has to be a literal. So do all of them for cycles.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
PACKAGE = "crossfade"

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"


@dataclass(frozen=True)
class Table:
    """Who may import whom, as `DOCUMENT` says it."""

    shared: frozenset[str]  # modules that every room may import; they import only each other
    rooms: Mapping[str, set[str]]
    """The rooms, and the other rooms that each may import. ``cli`` may import all of them, but for ``for_tests``."""
    for_tests: frozenset[str]  # rooms that only tests import
    facade: frozenset[str]
    """Modules that only re-export, under Ray's import paths. They may import any room but ``cli``; no room imports them."""
    never_torch: frozenset[str]  # rooms and modules that work without torch

    @classmethod
    def read(cls, text: str) -> Table:
        """From the page's sentence about the shared modules, and its table."""
        (sentence,) = (line for line in text.splitlines() if line.startswith("Who may import whom"))
        shared = frozenset(re.findall(r"`(\w+)`", sentence))
        rooms: dict[str, set[str]] = {}
        for_tests, facade, never_torch = set[str](), set[str](), set(shared)
        rows = text.split("| room | may import |\n| --- | --- |\n")[1].split("\n\n")[0]
        for row in rows.splitlines():
            left, right = (cell.strip() for cell in row.strip("|").split("|"))
            names, (may, *rest) = re.findall(r"\w+", left), right.split("; ")
            never_torch.update(names if "never torch" in rest else ())
            for_tests.update(names if "no room imports it" in rest else ())
            if may == "any room but cli":
                facade.update(names)
            elif may != "any room":
                rooms.update((name, set(re.findall(r"\w+", may)) - {"none"}) for name in names)
        return cls(shared, rooms, frozenset(for_tests), frozenset(facade), frozenset(never_torch) | ENTRY)


ENTRY = {"__main__"}
"""Modules that Python starts. They may import ``cli`` only."""

TABLE = Table.read(DOCUMENT.read_text())

NAMES_FOUND_AT_RUN_TIME = {
    "crossfade.__init__": "public names are imported when they are first used; its own table says from where",
    "crossfade.batches.__init__": "likewise",
    "crossfade.ops.__init__": "likewise",
    "crossfade.peers.__init__": "likewise",
    "crossfade.not_here": "a facade's submodules, by the name that was looked for",
    "crossfade.cli.target": "the user's module",
    "crossfade.engines.template": "the modules that the user preloads",
}
"""The modules that may import by a name that is no literal, and what."""

RAY_ONLY_IN = ("crossfade.engines.ray", "crossfade.engines.ray_graphs")
UNKNOWN = "a name that is no literal"
HEAVY = {"torch", "numpy", "ray", "typer", "rich", "greenlet"}
"""What ``import crossfade`` leaves unimported."""


@dataclass(frozen=True)
class Import:
    importer: str
    line: int
    target: str

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}, imports {self.target}"


class _Finder(ast.NodeVisitor):
    """Collects the imports of one module, as absolute names."""

    def __init__(self, module: str, is_package: bool, known: set[str]) -> None:
        self.found: list[Import] = []
        self._module = module
        self._base = module.split(".") if is_package else module.split(".")[:-1]
        self._known = known

    def _add(self, node: ast.AST, target: str) -> None:
        self.found.append(Import(self._module, getattr(node, "lineno", 0), target))

    def visit_Import(self, node: ast.Import) -> None:
        for name in node.names:
            self._add(node, name.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self._base[: len(self._base) - node.level + 1] if node.level else []
        module = ".".join([*base, *([node.module] if node.module else [])])
        for name in node.names:
            submodule = f"{module}.{name.name}"
            self._add(node, submodule if submodule in self._known else module)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__") and node.args:
            if isinstance(node.args[0], ast.Constant):
                name = str(node.args[0].value)
                dots = len(name) - len(name.lstrip("."))
                base = self._base[: len(self._base) - dots + 1] if dots else []
                self._add(node, ".".join([*base, name[dots:]]))
            else:
                self._add(node, UNKNOWN)
        self.generic_visit(node)


def read_sources(root: Path = SOURCE) -> dict[str, str]:
    """Module name -> source text; a package's own module is named like ``crossfade.plan.__init__``."""
    return {
        ".".join(path.relative_to(root).with_suffix("").parts): path.read_text()
        for path in sorted((root / PACKAGE).rglob("*.py"))
    }


def find_imports(sources: Mapping[str, str]) -> list[Import]:
    """All imports; modules are named as Python names them."""
    known = {name.removesuffix(".__init__") for name in sources}
    found: list[Import] = []
    for name, text in sources.items():
        finder = _Finder(name.removesuffix(".__init__"), name.endswith(".__init__"), known)
        finder.visit(ast.parse(text, filename=name))
        found += finder.found
    return found


def is_ours(module: str) -> bool:
    return module == PACKAGE or module.startswith(PACKAGE + ".")


def room_of(module: str) -> str:
    """``crossfade.plan.text`` is in ``plan``, ``crossfade`` itself in ``__init__``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def allowed_rooms(room: str) -> set[str]:
    """The rooms that a module of ``room`` may import, its own included."""
    rooms, shared, facade = set(TABLE.rooms) - TABLE.for_tests, set(TABLE.shared), set(TABLE.facade)
    if room in shared:
        return shared
    if room in facade:
        return rooms | shared | facade
    if room in ENTRY:
        return {"cli"}
    if room == "cli":
        return rooms | shared | facade | {"cli"}
    return TABLE.rooms[room] | shared | {room}


def wrong_rooms(imports: list[Import]) -> Iterator[str]:
    for found in imports:
        if is_ours(found.target):
            room, target = room_of(found.importer), room_of(found.target)
            if target not in allowed_rooms(room):
                yield f"{found}: {room} may import {', '.join(sorted(allowed_rooms(room) - {room}))}"


def unknown_names(imports: list[Import]) -> Iterator[str]:
    for found in imports:
        if found.target == UNKNOWN and not {found.importer, f"{found.importer}.__init__"} & set(
            NAMES_FOUND_AT_RUN_TIME
        ):
            yield str(found)


def wrong_libraries(imports: list[Import]) -> Iterator[str]:
    for found in imports:
        top = found.target.split(".")[0]
        if top == "torch" and room_of(found.importer) in TABLE.never_torch:
            yield f"{found}: {room_of(found.importer)} works without torch"
        if top == "ray" and found.importer not in RAY_ONLY_IN:
            yield f"{found}: only {' and '.join(RAY_ONLY_IN)} name ray"


def import_cycle(imports: list[Import]) -> list[str]:
    """The modules of one import cycle, in order, or an empty list. Imports for types only count too.

    Importing ``a.b.c`` runs the packages ``a`` and ``a.b`` too; that is Python's doing and does not count.
    """
    arrows: dict[str, set[str]] = {}
    for found in imports:
        if is_ours(found.target) and found.target != found.importer:
            arrows.setdefault(found.importer, set()).add(found.target)
    try:
        TopologicalSorter(arrows).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def imports() -> list[Import]:
    return find_imports(read_sources())


def test_every_module_is_in_a_room_of_the_table() -> None:
    rooms = {room_of(name.removesuffix(".__init__")) for name in read_sources()}
    unknown = rooms - set(TABLE.rooms) - TABLE.shared - TABLE.facade - ENTRY - {"cli"}
    assert not unknown, f"not in the table: {sorted(unknown)}\nhint: add them to docs/architecture.md"


def test_every_room_of_the_table_is_there() -> None:
    rooms = {room_of(name.removesuffix(".__init__")) for name in read_sources()}
    assert rooms >= {*TABLE.rooms, *TABLE.shared, *TABLE.facade}


def test_the_source_was_found(imports: list[Import]) -> None:
    assert len({found.importer for found in imports if is_ours(found.target)}) > 10


def test_rooms_import_only_what_the_table_allows(imports: list[Import]) -> None:
    assert not list(wrong_rooms(imports))


def test_torch_and_ray_stay_in_their_rooms(imports: list[Import]) -> None:
    assert not list(wrong_libraries(imports))


def test_only_the_ray_engine_has_a_name_ray() -> None:
    named = [
        f"{module}, line {node.lineno}"
        for module, text in read_sources().items()
        if module not in RAY_ONLY_IN
        for node in ast.walk(ast.parse(text, filename=module))
        if isinstance(node, ast.Name) and node.id == "ray"
    ]
    assert not named


def test_no_import_cycle(imports: list[Import]) -> None:
    assert not import_cycle(imports), " -> ".join(import_cycle(imports))


def test_the_table_itself_has_no_cycle() -> None:
    TopologicalSorter(TABLE.rooms).prepare()
    assert set().union(*TABLE.rooms.values()) <= set(TABLE.rooms)


def test_imports_have_literal_names(imports: list[Import]) -> None:
    assert not list(unknown_names(imports))
    found = {each.importer for each in imports if each.target == UNKNOWN}
    assert {name.removesuffix(".__init__") for name in NAMES_FOUND_AT_RUN_TIME} == found


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={"PYTHONPATH": str(SOURCE)}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_facade_imports_nothing_heavy() -> None:
    code = f"import sys, crossfade; crossfade.__all__; print(*({HEAVY!r} & set(sys.modules)))"
    assert run_python(code).split() == []


def test_every_public_name_works_without_torch_and_ray() -> None:
    code = (
        "import sys\n"
        "sys.modules.update(torch=None, ray=None)\n"
        "import crossfade\n"
        "for name in crossfade.__all__: getattr(crossfade, name)\n"
    )
    run_python(code)


def sources(**texts: str) -> dict[str, str]:
    """A small package; ``plan_text="..."`` is the module ``crossfade.plan.text``, ``plan_init`` the package itself."""
    return {
        "crossfade." + name.replace("_", ".").replace(".init", ".__init__"): text
        for name, text in sorted(texts.items())
    }


@pytest.mark.parametrize(
    "text",
    [
        "import crossfade.engines.local",
        "from crossfade.engines import local",
        "from ..engines import local",
        "def f():\n    from crossfade.engines.local import start",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import crossfade.engines.local",
        "import importlib\ndef f():\n    importlib.import_module('crossfade.engines.local')",
        "import importlib\nimportlib.import_module('..engines.local', __package__)",
        "import crossfade",
        "from crossfade import get",
        "import crossfade.cli.main",
        "from crossfade.testing import fake",
    ],
)
def test_an_import_against_the_table_is_seen(text: str) -> None:
    package = sources(plan_init="", plan_text=text, engines_init="", engines_local="", cli_main="", testing_fake="")
    assert len(list(wrong_rooms(find_imports(package)))) == 1


@pytest.mark.parametrize("importer", ["crossfade.__init__", "crossfade.dag.input", "crossfade.cli.main"])
def test_only_tests_import_a_room_for_tests(importer: str) -> None:
    package = {importer: "from crossfade.testing import fake", "crossfade.testing.fake": ""}
    assert len(list(wrong_rooms(find_imports(package)))) == 1


@pytest.mark.parametrize("text", ["from crossfade import errors", "from .plan import Plan", "import crossfade.types"])
def test_an_import_by_the_table_is_allowed(text: str) -> None:
    package = sources(errors="", types="", plan_init="", plan_plan="", plan_text=text)
    assert not list(wrong_rooms(find_imports(package)))


@pytest.mark.parametrize(("library", "module"), [("torch", "plan_text"), ("torch", "errors"), ("ray", "engines_local")])
def test_a_library_in_the_wrong_room_is_seen(library: str, module: str) -> None:
    lazy = f"def f():\n    import {library}.util\n"
    assert len(list(wrong_libraries(find_imports(sources(**{module: lazy}))))) == 1


@pytest.mark.parametrize(
    ("first", "second", "is_cycle"),
    [
        ("import crossfade.plan.b", "import crossfade.plan.a", True),
        ("import crossfade.plan.b", "def f():\n    from crossfade.plan import a", True),
        ("import crossfade.plan.b", "from crossfade.plan import THING", True),
        ("import crossfade.plan.b", "if TYPE_CHECKING:\n    import crossfade.plan.a", True),
        ("import crossfade.plan.b", "", False),
    ],
)
def test_a_cycle_is_seen(first: str, second: str, is_cycle: bool) -> None:
    package = sources(plan_init="from crossfade.plan import a", plan_a=first, plan_b=second)
    assert bool(import_cycle(find_imports(package))) is is_cycle


@pytest.mark.parametrize("name", ["name", "f'crossfade.plan.{name}'", "str(__package__)"])
def test_an_import_whose_name_is_no_literal_is_seen(name: str) -> None:
    package = sources(plan_text=f"import importlib\ndef f(name):\n    importlib.import_module({name})")
    assert len(list(unknown_names(find_imports(package)))) == 1


def test_an_import_in_a_subfolder_is_seen() -> None:
    package = {"crossfade.plan.sub.text": "from crossfade.engines import local", "crossfade.engines.local": ""}
    assert len(list(wrong_rooms(find_imports(package)))) == 1


def test_the_table_is_read_as_it_stands() -> None:
    table = Table.read(
        "Who may import whom (every room may also import `errors` and `types`):\n\n| room | may import |\n| --- | --- |\n"
        "| graph, plan | none; never torch |\n| api | graph, plan |\n| `__init__`, dag | any room but cli; never torch |\n"
        "| cli | any room; only `__main__` imports it |\n| testing | plan; no room imports it |\n\nText.\n"
    )
    assert table.rooms == {"graph": set(), "plan": set(), "api": {"graph", "plan"}, "testing": {"plan"}}
    assert [*map(sorted, (table.shared, table.for_tests, table.facade))] == [
        ["errors", "types"],
        ["testing"],
        ["__init__", "dag"],
    ]
    assert table.never_torch == {"errors", "types", "graph", "plan", "__init__", "dag", "__main__"}
