"""The doctor's page in a headless Chromium: it loads without complaint, keys and mouse move it, marks are drawn."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from crossfade.profile.doctor.page import page
from tests.helpers.chromium import SHIFT, Page, browser, find_chromium
from tests.helpers.doctor_reports import HOST, LANES_PER_RANK, MAIN, many, realistic

pytestmark = pytest.mark.skipif(find_chromium() is None, reason="no Chromium here that starts")

REPORT = realistic()
EVIL = "</script><script>window.harmed = 1</script><img src=x onerror='window.harmed = 1'>"
STILL = """new Promise((done) => {
  const look = () => (doctorPage.isMoving ? requestAnimationFrame(look) : done());
  requestAnimationFrame(() => requestAnimationFrame(look));  // what an event does may begin with the next frame
})"""
NUM_SPANS = 100_000
MOST_MEDIAN_MS = 50.0
SCRIPTED = """(async () => {
  const canvas = document.getElementById("timeline");
  const box = canvas.getBoundingClientRect();
  const gaps = [];
  let last = null;
  const frame = () => new Promise((done) => requestAnimationFrame((now) => {
    if (last !== null) gaps.push(now - last);
    last = now;
    done();
  }));
  const wheel = async (times, more) => {
    for (let n = 0; n < times; n++) {
      canvas.dispatchEvent(new WheelEvent("wheel", { clientX: box.left + box.width * 0.6, clientY: box.top + 90, ...more }));
      await frame();
    }
  };
  const before = doctorPage.frames.length;
  await wheel(90, { deltaY: -80 });   // from the whole to less than a microsecond
  await wheel(90, { deltaY: 80 });
  await wheel(20, { deltaY: -80 });
  await wheel(60, { deltaX: 60 });
  return { drawing: doctorPage.frames.slice(before), gaps };
})()"""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture
def shown(tab: Page, tmp_path: Path) -> Iterator[Page]:
    """The realistic report. Nothing that a test does makes the page complain."""
    yield opened(tab, tmp_path, REPORT)
    assert tab.complaints == []


def opened(tab: Page, folder: Path, report: dict[str, Any], **options: Any) -> Page:
    path = folder / "page.html"
    path.write_text(page(report), encoding="utf-8")
    tab.complaints.clear()
    tab.open(path, **options)
    return tab


def press(tab: Page, *keys: str, modifiers: int = 0) -> None:
    for key in keys:
        tab.press(key, modifiers)
    tab.value(STILL)


def state(tab: Page, name: str) -> Any:
    return tab.value(f"doctorPage.{name}")


def seen_us(tab: Page) -> float:
    start_us, end_us = state(tab, "visible")
    return float(end_us - start_us)


def text_of(tab: Page, selector: str) -> str:
    return str(tab.value(f"document.querySelector({json.dumps(selector)}).innerText"))


def colours_at(tab: Page, place: str) -> list[int]:
    """Red, green and blue of the canvas at this place, which is JavaScript for [x, y] on the page."""
    look = f"""(() => {{
        const canvas = document.getElementById("timeline"), box = canvas.getBoundingClientRect(), [x, y] = {place};
        const copy = new OffscreenCanvas(1, 1).getContext("2d", {{ willReadFrequently: true }});
        copy.drawImage(canvas, Math.round(x - box.left), Math.round(y - box.top), 1, 1, 0, 0, 1, 1);
        return [...copy.getImageData(0, 0, 1, 1).data].slice(0, 3);
    }})()"""
    return list(tab.value(look))


def test_the_first_diagnosis_is_open_and_marked(shown: Page) -> None:
    assert state(shown, "selected") == 0
    assert text_of(shown, "#summary") == REPORT["summary"]
    card = text_of(shown, "#card")
    for key in ("evidence", "where", "fix"):
        assert REPORT["diagnoses"][0][key] in card
    assert "loss.detach()" in text_of(shown, "#card pre")
    assert "NVIDIA H100" in text_of(shown, "h1")
    assert "0.42%" in text_of(shown, "#metrics")
    assert {mark["label"] for mark in state(shown, "marks")} == {"loss.item() waits for the GPU"}
    assert sum(mark["count"] for mark in state(shown, "marks")) == 8
    assert state(shown, "numTimelines") == 2


def test_spans_and_marks_have_their_colours(shown: Page) -> None:
    lane, start_us, end_us, _ = REPORT["diagnoses"][0]["marks"][1]
    middle = f"doctorPage.place(0, {lane}, {(start_us + end_us) / 2})"
    assert colours_at(shown, f"(([x, y]) => [x, y + 9])({middle})") == [0xD5, 0x5E, 0x00], "a host that waits"
    assert colours_at(shown, f"(([x, y]) => [x, y + 12])({middle})") == [0x16, 0x19, 0x1D], "the outline of its mark"
    kernel = max((span for span in REPORT["now"]["spans"] if span[0] == MAIN), key=lambda span: span[2])
    place = f"(([x, y]) => [x, y + 8])(doctorPage.place(0, {MAIN}, {kernel[1] + kernel[2] / 2}))"
    assert colours_at(shown, place) == [0x00, 0x72, 0xB2], "a kernel"
    opened_dark = "getComputedStyle(document.documentElement).getPropertyValue('--compute')"
    shown.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert shown.value(opened_dark) == "#3d9fdc"
    shown.value(STILL)
    assert colours_at(shown, place) == [0x3D, 0x9F, 0xDC], "the same kernel in the dark"


def test_keys_choose_diagnoses_and_zoom_to_their_marks(shown: Page) -> None:
    for key, number in (("n", 1), ("n", 2), ("n", 0), ("p", 2), ("1", 0), ("2", 1), ("9", 1)):
        press(shown, key)
        assert state(shown, "selected") == number
        assert REPORT["diagnoses"][number]["title"].lower() in text_of(shown, "#card h2").lower()
        start_us, end_us = state(shown, "visible")
        marks = REPORT["diagnoses"][number]["marks"]
        assert start_us <= min(mark[1] for mark in marks)
        assert end_us >= max(mark[2] for mark in marks)
        assert {mark["label"] for mark in state(shown, "marks")} == {marks[0][3]}
    press(shown, "3")
    assert state(shown, "numTimelines") == 1, "this one has no timeline after the fix"


def test_keys_go_from_mark_to_mark(shown: Page) -> None:
    press(shown, "2", "m")
    first, second, *_ = sorted(REPORT["diagnoses"][1]["marks"], key=lambda mark: mark[1])
    start_us, end_us = state(shown, "visible")
    assert start_us < first[1] < first[2] < end_us
    assert end_us - start_us < 4 * (first[2] - first[1])
    press(shown, "m")
    start_us, end_us = state(shown, "visible")
    assert start_us < second[1] < second[2] < end_us
    assert second[3] in text_of(shown, "#said")


def test_keys_zoom_and_pan(shown: Page) -> None:
    whole_us = seen_us(shown)
    press(shown, "+", "+")
    assert seen_us(shown) == pytest.approx(whole_us / 1.5**2)
    start_us = state(shown, "visible[0]")
    press(shown, "ArrowRight")
    assert state(shown, "visible[0]") == pytest.approx(start_us + 0.15 * seen_us(shown))
    press(shown, "ArrowLeft", "-")
    assert seen_us(shown) == pytest.approx(whole_us / 1.5)
    press(shown, *"+" * 60)
    assert seen_us(shown) == pytest.approx(0.2), "no further than this"
    press(shown, "Home")
    assert seen_us(shown) == pytest.approx(whole_us)
    press(shown, "-", "ArrowLeft")
    assert seen_us(shown) == pytest.approx(whole_us)


def test_keys_show_the_fix_and_help(shown: Page) -> None:
    press(shown, "f")
    assert state(shown, "numTimelines") == 1
    assert shown.value("document.querySelector('[data-key=f]').getAttribute('aria-pressed')") == "false"
    press(shown, "f")
    assert state(shown, "numTimelines") == 2
    press(shown, "?")
    assert shown.value("document.getElementById('help').open") is True
    press(shown, "n")
    assert state(shown, "selected") == 0, "keys are for the help while it is open"
    press(shown, "Escape")
    assert shown.value("document.getElementById('help').open") is False


def test_spans_are_read_with_the_keyboard_alone(shown: Page) -> None:
    for _ in range(30):
        shown.press("Tab")
        if shown.value("document.activeElement.id") == "timeline":
            break
    assert shown.value("document.activeElement.id") == "timeline"
    press(shown, "ArrowDown", "ArrowDown")
    assert state(shown, "focus") == {"lane": MAIN, "panel": 0, "span": -1}
    press(shown, "ArrowRight", "ArrowRight", modifiers=SHIFT)
    assert state(shown, "focus") == {"lane": MAIN, "panel": 0, "span": 1}
    name = REPORT["names"][[span for span in REPORT["now"]["spans"] if span[0] == MAIN][1][3]]
    assert name in text_of(shown, "#tip")
    assert name in text_of(shown, "#said")
    press(shown, "Enter")
    assert seen_us(shown) < 100, "zoomed to the span"
    press(shown, "Escape")
    assert state(shown, "focus") is None
    for _ in range(20):
        press(shown, "ArrowDown")
    assert state(shown, "focus") == {"lane": 2 * LANES_PER_RANK - 1, "panel": 1, "span": -1}


def test_tabs_are_chosen_with_arrows(shown: Page) -> None:
    shown.value("document.getElementById('tab-0').focus()")
    press(shown, "ArrowDown")
    assert state(shown, "selected") == 1
    assert shown.value("document.activeElement.id") == "tab-1"
    assert shown.value("document.querySelectorAll('[role=tab][tabindex=\"0\"]').length") == 1


def test_the_wheel_zooms_around_the_cursor_and_dragging_pans(shown: Page) -> None:
    x, y = shown.value(f"doctorPage.place(0, {MAIN}, 9000)")
    shown.mouse("mouseWheel", x, y, deltaX=0, deltaY=-400)
    shown.value(STILL)
    start_us, end_us = state(shown, "visible")
    assert end_us - start_us < 15_000
    assert shown.value(f"doctorPage.place(0, {MAIN}, 9000)")[0] == pytest.approx(x, abs=1)
    shown.mouse("mousePressed", x, y, button="left", clickCount=1)
    shown.mouse("mouseMoved", x - 100, y, button="left", buttons=1)
    shown.mouse("mouseReleased", x - 100, y, button="left", clickCount=1)
    shown.value(STILL)
    assert shown.value(f"doctorPage.place(0, {MAIN}, 9000)")[0] == pytest.approx(x - 100, abs=1)


def test_a_tooltip_says_what_is_under_the_cursor(shown: Page) -> None:
    lane, start_us, length_us, name, _ = max(
        (span for span in REPORT["now"]["spans"] if span[0] == HOST), key=lambda span: span[2]
    )
    x, y = shown.value(f"doctorPage.place(0, {lane}, {start_us + length_us / 2})")
    shown.mouse("mouseMoved", x, y)
    tip = text_of(shown, "#tip")
    assert REPORT["names"][name] in tip
    assert f"{length_us / 1e3:.2f} ms" in tip
    shown.mouse("mouseMoved", 5, 5)
    assert shown.value("document.getElementById('tip').hidden") is True


def test_jumps_move_for_those_who_like_motion(tab: Page, tmp_path: Path) -> None:
    opened(tab, tmp_path, REPORT, motion="no-preference")
    before = len(state(tab, "frames"))
    press(tab, "2", "m")
    assert state(tab, "visible") == pytest.approx(state(tab, "goal"))
    assert len(state(tab, "frames")) > before + 2
    assert tab.complaints == []


def test_names_do_no_harm(tab: Page, tmp_path: Path) -> None:
    report = realistic() | {
        "title": EVIL,
        "summary": EVIL,
        "names": [EVIL] * 8,
        "notes": [EVIL],
        "metrics": [[EVIL, EVIL]],
    }
    report["diagnoses"][0] |= dict.fromkeys(("title", "gain", "confidence", "evidence", "where", "fix", "code"), EVIL)
    opened(tab, tmp_path, report)
    x, y = tab.value("doctorPage.place(0, 0, 2)")
    tab.mouse("mouseMoved", x, y)
    assert text_of(tab, "#tip").startswith(EVIL)
    assert text_of(tab, "#summary") == EVIL
    assert tab.value("window.harmed") is None
    assert tab.complaints == []


@pytest.mark.parametrize("lanes", [[], ["rank 0 · host"]])
def test_a_report_of_nothing(tab: Page, tmp_path: Path, lanes: list[str]) -> None:
    empty = {"end_us": 0.0, "spans": []}
    report = {"title": "t", "summary": "No diagnosis.", "notes": [], "metrics": [], "lanes": lanes, "names": []}
    opened(tab, tmp_path, report | {"now": empty, "diagnoses": []})
    tab.value("document.getElementById('timeline').focus()")
    press(tab, *"npm1f+-", "Home", "ArrowDown", "ArrowUp", "ArrowLeft", "Enter")
    press(tab, "ArrowRight", modifiers=SHIFT)
    assert text_of(tab, "#summary") == "No diagnosis."
    assert tab.complaints == []


def test_frames_with_very_many_spans(tab: Page, tmp_path: Path, record_property: Any) -> None:
    opened(tab, tmp_path, many(NUM_SPANS))
    assert state(tab, "numSpans") > 1.99 * NUM_SPANS, "now and after the fix"
    found = tab.value(SCRIPTED)
    assert tab.complaints == []
    for name, times_ms in found.items():
        assert len(times_ms) >= 250
        words = f"{name}: median {median(times_ms):.1f} ms, largest {max(times_ms):.1f} ms"
        record_property(name, words)
        print(f"{2 * NUM_SPANS:,} spans, {len(times_ms)} frames, {words}")
        assert median(times_ms) < MOST_MEDIAN_MS, words


@pytest.mark.parametrize(
    ("text", "shown_as"),
    [
        ("the host waits", "The host waits"),
        ("cudaFree waits for the GPU", "cudaFree waits for the GPU"),
        ("find_unused_parameters is on", "find_unused_parameters is on"),
    ],
)
def test_sentences_begin_large_and_names_as_they_are(tab: Page, tmp_path: Path, text: str, shown_as: str) -> None:
    report = realistic()
    report["diagnoses"][0] |= {"title": text, "evidence": text}
    opened(tab, tmp_path, report)
    assert text_of(tab, "#card h2") == shown_as
    assert text_of(tab, "dd.seen") == shown_as
