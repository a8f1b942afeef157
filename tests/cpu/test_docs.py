"""The documentation's programs run and print what it says, and it names everything that is public."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

import crossfade
from tests.helpers.programs import environment, python
from tests.helpers.sessions import TORCH
from tests.helpers.two_at_a_time import Ran, two_at_a_time
from tests.helpers.warm import warm_python

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LIMIT_S = 90
FENCE = re.compile(r"```(\w*)\s*")
PRINTED = re.compile(r"\s*print\(.*\)  # (.+)")
PUBLIC = re.compile(r"\bcrossfade\.([A-Za-z]\w*)")
LINK = re.compile(r"\]\(([^)\s]+)\)")


def read(page: Path) -> tuple[str, list[str]]:
    """The Python blocks of a page as one script, each line where it is on the page, and the lines that it is to print.

    These are the lines of ``output`` blocks, and what comes after ``#`` behind a print.
    """
    script: list[str] = []
    wanted: list[str] = []
    language: str | None = None
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = FENCE.fullmatch(line)
        if fence:
            language = fence[1] if language is None else None
        is_inside = language is not None and not fence
        script.append(line if is_inside and language == "python" else "")
        printed = PRINTED.fullmatch(script[-1])
        if printed:
            wanted.append(printed[1])
        elif is_inside and language == "output":
            wanted.append(line)
    return "\n".join(script), wanted


def first_missing(wanted: list[str], lines: list[str]) -> str | None:
    """The first wanted line that does not come after those before it."""
    rest = iter(lines)
    return next((line for line in wanted if line not in rest), None)


def anchors_of(text: str) -> set[str]:
    """What a heading is linked as: small letters, no punctuation, hyphens for spaces."""
    heads = re.findall(r"(?m)^#+ (.+)$", text)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


PROGRAMS = {str(page.relative_to(ROOT)): read(page) for page in PAGES}
RUNNABLE = sorted(name for name, (script, _) in PROGRAMS.items() if script.strip())


def test_pages_have_programs() -> None:
    assert {"README.md", "docs/guide.md", "docs/errors.md"} <= set(RUNNABLE)
    assert all(PROGRAMS[name][1] for name in RUNNABLE)


def run(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    script = folder / f"{Path(name).stem}.py"
    script.write_text(PROGRAMS[name][0], encoding="utf-8")
    variables = environment(PYTHONPATH=str(ROOT / "src"))
    if not (TORCH and "torch" in PROGRAMS[name][0]):
        return python(str(script), cwd=folder, env=variables, encoding="utf-8", timeout_s=LIMIT_S)
    variables["CROSSFADE_PRELOAD"] = ",".join(TORCH)
    return warm_python(TORCH, str(script), cwd=folder, env=variables, timeout_s=LIMIT_S)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    with two_at_a_time({name: partial(run, name, tmp_path_factory.mktemp("page")) for name in RUNNABLE}) as ran:
        yield ran


@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize("name", RUNNABLE)
def test_programs_run_and_print_what_they_say(name: str, runs: Ran) -> None:
    if name == "docs/ray_engine.md" and importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install crossfade[ray]")
    wanted = PROGRAMS[name][1]
    ran = runs[name].result()
    assert ran.returncode == 0, f"{name} (lines as on the page):\n{ran.stderr}"
    first = first_missing(wanted, ran.stdout.splitlines())
    assert first is None, f"{name} says that {first!r} is printed next; this was printed:\n{ran.stdout}"


def test_every_public_name_is_explained() -> None:
    guides = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    missing = set(crossfade.__all__) - set(PUBLIC.findall(guides))
    assert not missing, f"the pages in docs/ do not say crossfade.{sorted(missing)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_and_links_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    rooms = {name for name in PUBLIC.findall(text) if name not in dir(crossfade)}
    unknown = {name for name in rooms if importlib.util.find_spec(f"crossfade.{name}") is None}
    assert not unknown, f"there is no crossfade.{sorted(unknown)}"
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if not link.startswith(("http:", "https:")):
            target = page.parent / path if path else page
            assert target.exists(), f"{page.name} links to {link}"
            assert not anchor or anchor in anchors_of(target.read_text(encoding="utf-8")), (
                f"{page.name} links to {link}"
            )


def test_the_readme_shows_the_first_program() -> None:
    example = (ROOT / "examples" / "first_program.py").read_text(encoding="utf-8")
    program = example.partition('"""\n\n')[2]  # without what is said above it
    assert program
    assert program in (ROOT / "README.md").read_text(encoding="utf-8")
