"""The doctor's page holds its report unharmed and loads nothing. What a browser does with it is in tests/cpu."""

from __future__ import annotations

import json
import re
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from crossfade.profile.doctor.page import page
from tests.helpers.doctor_reports import many, realistic

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "crossfade"
DOCTOR = PACKAGE / "profile" / "doctor"
PARTS = sorted((DOCTOR / "page_parts").iterdir())
EVIL = [
    "</script><script>alert(1)</script>",
    "<!-- <script>",
    "-->",
    "]]> & &lt; \" ' \\ \u2028 \u2029 \x00",
    "half a pair \ud83d",
    "{{scripts}} {{report}} \\1 \\g<0>",
    "Größe 矩阵",
]


class Elements(HTMLParser):
    """The elements of a page in order, and the text in each script."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.title = ""
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside == "title":
            self.title += data


def as_json(report: dict[str, Any]) -> Any:
    return json.loads(json.dumps(report))


@pytest.mark.parametrize("text", EVIL)
def test_any_text_arrives_as_it_was(text: str) -> None:
    report = realistic() | {"title": text, "summary": text, "names": [text] * 8, "notes": [text]}
    report["diagnoses"][0] |= {"title": text, "code": text}
    whole = page(report)
    assert whole.encode("utf-8")
    found = Elements(whole)
    assert len(found.scripts) == 2, "the report's, and the page's own"
    assert json.loads(found.scripts[0]) == as_json(report)
    assert found.scripts[1] == Elements(page(realistic())).scripts[1]
    assert "alert" not in found.scripts[1]
    assert found.title == text.encode("utf-8", "replace").decode()


def test_it_loads_nothing() -> None:
    whole = page(realistic())
    assert not re.search(r"https?:", whole)
    assert not re.search(r"@import|url\(|\bimport\b|\bfetch\(|XMLHttpRequest|WebSocket|eval\(|innerHTML", whole)
    tags = Elements(whole).tags
    assert [attributes["href"] for _, attributes in tags if "href" in attributes] == ["data:,"]
    assert not any("src" in attributes for _, attributes in tags)
    (policy,) = (each["content"] for _, each in tags if each.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")


def test_no_place_is_left_open() -> None:
    report = realistic()
    assert not re.search(r"\{\{\w+\}\}", page(report))


@pytest.mark.parametrize("time", [float("nan"), float("inf")])
def test_a_time_that_is_no_number_is_refused(time: float) -> None:
    report = realistic()
    report["now"]["end_us"] = time
    with pytest.raises(ValueError, match="JSON compliant"):
        page(report)


@pytest.mark.parametrize("report", [realistic(), many(600)], ids=["realistic", "many"])
def test_made_up_reports_have_the_documented_shape(report: dict[str, Any]) -> None:
    timelines = [report["now"], *(each["fixed"] for each in report["diagnoses"] if each["fixed"])]
    for timeline in timelines:
        spans = timeline["spans"]
        assert [span[:2] for span in spans] == sorted(span[:2] for span in spans)
        assert all(0 <= lane < len(report["lanes"]) for lane, *_ in spans)
        assert all(0 <= name < len(report["names"]) and kind in range(5) for *_, name, kind in spans)
        assert max(start + length for _, start, length, _, _ in spans) <= timeline["end_us"] + 0.02
    for diagnosis in report["diagnoses"]:
        assert all(report["lanes"][lane] and start <= end for lane, start, end, _ in diagnosis["marks"])


def test_every_part_is_in_the_page_and_in_the_package() -> None:
    whole = page(realistic())
    for part in PARTS:
        assert part.read_text() in whole, f"{part.name} is not put into the page"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["crossfade"]
    for path in [DOCTOR / "page.html", *PARTS]:
        name = path.relative_to(PACKAGE).as_posix()
        assert any(fnmatch(name, pattern) for pattern in patterns), f"{name} is no package data"


@pytest.mark.parametrize("path", [DOCTOR / "page.html", *PARTS], ids=lambda path: path.name)
def test_parts_are_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
