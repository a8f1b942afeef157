"""Timelines: exact overlap, Chrome's format, pictures, files."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossfade.plan.chrome import chrome_trace
from crossfade.plan.picture import draw_timelines
from crossfade.plan.spans import lanes_of
from crossfade.plan.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def span(
    kind: str, start_us: float, end_us: float, *, actor: str = "A", stream: str = "main", execution: int = 0
) -> Span:
    label = {"compute": "run n0", "communicate": "recv n1", "wait": "read n2"}.get(kind, kind)
    return Span(actor, stream, label, "what", kind, execution, start_us, end_us)


def timeline(*spans: Span, name: str = "measured") -> Timeline:
    return Timeline.of(name, spans)


EXAMPLE = timeline(
    span("wait", 0, 2),
    span("compute", 2, 10),
    span("communicate", 6, 14, stream="recv"),
    span("communicate", 7, 9, stream="recv"),
    span("compute", 12, 13, execution=1),
    span("compute", 0, 30, actor="B", execution=1),
    span("communicate", 30, 31, actor="driver", execution=1),
)


def test_a_worked_example() -> None:
    assert EXAMPLE.makespan_us == 31
    assert EXAMPLE.compute_us("A") == 8 + 1
    assert EXAMPLE.communicate_us("A") == 8
    assert EXAMPLE.hidden_us("A") == 4 + 1
    assert EXAMPLE.exposed_us("A") == 2 + 1
    assert EXAMPLE.busy_us("A") == 12
    assert EXAMPLE.wait_us("A") == 2
    assert (EXAMPLE.busy_us("B"), EXAMPLE.hidden_us("B"), EXAMPLE.exposed_us("B")) == (30, 0, 0)
    assert EXAMPLE.exposed_us("nobody") == 0


integer_spans = st.lists(
    st.builds(
        lambda kind, actor, start, length: span(kind, start, start + length, actor=actor),
        st.sampled_from(["compute", "communicate", "wait"]),
        st.sampled_from(["A", "B"]),
        st.integers(-20, 40),
        st.integers(0, 15),
    ),
    max_size=12,
)


@given(integer_spans)
def test_the_metrics_equal_a_count_of_the_cells_of_a_grid(spans: list[Span]) -> None:
    found = Timeline.of("measured", spans)
    for actor in ("A", "B"):
        cells: dict[str, set[int]] = {"compute": set(), "communicate": set(), "wait": set()}
        for each in spans:
            if each.actor == actor:
                cells[each.kind] |= set(range(int(each.start_us), int(each.end_us)))
        compute, communicate = cells["compute"], cells["communicate"]
        assert found.compute_us(actor) == len(compute)
        assert found.communicate_us(actor) == len(communicate)
        assert found.busy_us(actor) == len(compute | communicate)
        assert found.hidden_us(actor) == len(compute & communicate)
        assert found.exposed_us(actor) == len(communicate - compute)
        assert found.wait_us(actor) == len(cells["wait"])


@given(integer_spans, st.integers(-50, 50))
def test_shifting_moves_every_span_and_no_metric(spans: list[Span], by_us: int) -> None:
    before = Timeline.of("measured", spans)
    after = before.shifted(by_us)
    assert after.shifted(-by_us) == before
    assert after.makespan_us == before.makespan_us
    assert [after.exposed_us(actor) for actor in before.actors] == [before.exposed_us(actor) for actor in before.actors]
    assert all(new.start_us == old.start_us + by_us for new, old in zip(after.spans, before.spans, strict=True))


def test_spans_of_one_execution() -> None:
    one = EXAMPLE.of_execution(1)
    assert [each.actor for each in one.spans] == ["B", "A", "driver"]
    assert one.name == "measured"
    assert EXAMPLE.of_execution(2).spans == ()


def test_steady_is_the_median_between_ends_of_executions() -> None:
    ends = [10.0, 30.0, 35.0, 41.0, 46.0]
    spans = [span("compute", end - 4, end, execution=number) for number, end in enumerate(ends)]
    spans += [span("wait", end - 9, end - 5, execution=number) for number, end in enumerate(ends)]
    assert Timeline.of("measured", spans).steady_us() == 5.5
    assert Timeline.of("measured", spans[:1]).steady_us() == 4.0


def test_an_empty_timeline_has_zero_of_everything() -> None:
    empty = timeline()
    assert (empty.makespan_us, empty.steady_us(), empty.actors, empty.exposed_us("A")) == (0, 0, (), 0)
    ElementTree.fromstring(draw_timelines([empty]))
    assert empty.to_chrome()["traceEvents"] == []


def test_actors_come_in_natural_order_with_the_driver_first() -> None:
    names = ["S10", "S2", "driver", "R", "S1b", "S1", "1"]
    found = Timeline.of("measured", [span("compute", 0, 1, actor=name) for name in names])
    assert found.actors == ("driver", "1", "R", "S1", "S1b", "S2", "S10")


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 10)), max_size=20))
def test_lanes_hold_each_span_once_without_overlap_and_are_as_few_as_can_be(places: list[tuple[int, int]]) -> None:
    spans = [span("compute", start, start + length) for start, length in places]
    lanes = [lane for _, _, lane in lanes_of(spans)]
    assert sorted((each.start_us, each.end_us) for lane in lanes for each in lane) == sorted(
        (start, start + length) for start, length in places
    )
    for lane in lanes:
        assert all(later.start_us >= earlier.end_us for earlier, later in pairwise(lane))
    num_at_once = [sum(start <= cell < start + length for start, length in places) for cell in range(41)]
    lengths = [length for _, length in places]
    if all(lengths):
        assert len(lanes) == max(num_at_once)


def test_chrome_trace_has_a_process_per_actor_and_a_thread_per_lane() -> None:
    trace = json.loads(json.dumps(EXAMPLE.to_chrome()))
    events = trace["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    actors = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(actors.values()) == ["driver", "A", "B"]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == len(EXAMPLE.spans)
    for event in complete:
        assert (event["pid"], event["tid"]) in names
        assert event["dur"] >= 0
    recv = [e for e in complete if e["args"]["action"] == "recv n1" and actors[e["pid"]] == "A"]
    assert {names[e["pid"], e["tid"]] for e in recv} == {"recv", "recv 2"}
    assert {e["cat"] for e in complete} == {"compute", "communicate", "wait"}
    assert {e["name"] for e in complete if e["cat"] == "wait"} == {"wait: what"}


@given(st.lists(st.floats(0, 3), min_size=1, max_size=30))
def test_events_of_one_chrome_thread_do_not_overlap_after_rounding(lengths: list[float]) -> None:
    spans, now = [], 0.0
    for length in lengths:
        spans.append(span("compute", now, now + length))
        now += length
    events = [e for e in timeline(*spans).to_chrome()["traceEvents"] if e["ph"] == "X"]
    in_ns = sorted((round(e["ts"] * 1e3), round(e["dur"] * 1e3), e["tid"]) for e in events)
    assert {tid for _, _, tid in in_ns} == {1}
    ends = [start + length for start, length, _ in in_ns]
    assert all(start >= end for end, (start, _, _) in zip(ends, in_ns[1:], strict=False))


def test_two_timelines_in_one_trace_are_told_apart() -> None:
    events = chrome_trace([replace(EXAMPLE, name="predicted"), EXAMPLE])["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names[0] == "predicted: driver"
    assert names[3:] == ["measured: driver", "measured: A", "measured: B"]


def bars(svg: str, kind: str) -> list[ElementTree.Element]:
    """Rectangles of one kind that stand for spans; the legend's have no title."""
    root = ElementTree.fromstring(svg)
    of_kind = [each for each in root.iter(f"{SVG}rect") if each.get("class") == kind]
    return [each for each in of_kind if each.find(f"{SVG}title") is not None]


def texts(svg: str) -> list[str]:
    return ["".join(each.itertext()) for each in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_picture_has_a_bar_per_span_at_its_place_on_one_axis() -> None:
    predicted = timeline(span("compute", 0, 50), name="predicted")
    measured = timeline(span("compute", 0, 100), span("communicate", 25, 75, stream="recv"), span("wait", 80, 90))
    svg = draw_timelines([predicted, measured], "two & two")
    (left, right), (half,) = bars(svg, "compute"), bars(svg, "communicate")
    assert left.get("x") == right.get("x")
    width = float(right.get("width", "0"))
    assert float(left.get("width", "0")) == pytest.approx(width / 2, abs=0.01)
    assert float(half.get("x", "0")) == pytest.approx(float(right.get("x", "0")) + width / 4, abs=0.01)
    assert float(left.get("y", "0")) < float(right.get("y", "0"))
    found = set(texts(svg))
    assert {"two & two", "predicted: 50 µs, 1 execution", "measured: 100 µs, 1 execution", "A", "A recv"} <= found
    assert {"hidden 100% of 50 µs", "no communication", "computes", "communicates", "µs", "0", "50", "100"} <= found


def test_labels_fit_into_their_bars_or_are_left_out() -> None:
    long, short = span("compute", 0, 1000, execution=7), span("compute", 1000, 1020, execution=8)
    svg = draw_timelines([timeline(long, short, span("compute", 1020, 1021))])
    labels = [text for text in texts(svg) if "#" in text]
    assert labels == ["run n0 what #7"]
    narrow = draw_timelines([timeline(span("compute", 0, 1000), span("compute", 1000, 1040, execution=12))])
    assert "#12" in texts(narrow)


def test_long_pictures_have_milliseconds_on_their_axis() -> None:
    assert {"ms", "10", "20"} <= set(texts(draw_timelines([timeline(span("compute", 0, 20_000))])))


@pytest.mark.parametrize("start_us", [0.0, -3.7, 1e9])
@pytest.mark.parametrize("length_us", [0.0, 0.01, 3.0, 999.0, 4e7])
def test_any_axis_has_a_few_round_ticks(start_us: float, length_us: float) -> None:
    svg = draw_timelines([timeline(span("compute", start_us, start_us + length_us))])
    ticks = re.findall(r'text-anchor="middle">(-?[0-9.e+-]+)</text>', svg)
    assert 4 <= len(ticks) <= 15
    assert len(set(ticks)) == len(ticks)


def test_kinds_that_take_turns_do_not_make_the_picture_large() -> None:
    kinds = ("wait", "communicate", "compute")
    spans = [span(kinds[index % 3], index, index + 0.9, execution=index // 3) for index in range(60_000)]
    spans.append(span("compute", 70_000, 75_000))
    picture = draw_timelines([Timeline.of("measured", spans)])
    bars = [each for each in ElementTree.fromstring(picture).iter(f"{SVG}rect") if each.get("class") in kinds]
    assert len(bars) <= 3 + 1 + 3  # and the legend's
    merged = [each for each in bars if "19999 more" in "".join(each.itertext())]
    assert [each.get("class") for each in merged] == ["wait", "communicate", "compute"], "what waits lies behind"


def test_invisibly_narrow_spans_are_merged_so_that_the_picture_stays_small() -> None:
    spans = [span("compute", n, n + 1) for n in range(1, 50_000, 2)]
    svg = draw_timelines(
        [timeline(*spans, *(span("communicate", n, n + 1, stream="recv") for n in range(0, 50_000, 2)))]
    )
    assert len(svg) < 1_500_000
    assert " and " in (bars(svg, "compute")[0].findtext(f"{SVG}title") or "")
    drawn = sum(float(bar.get("width", "0")) for bar in bars(svg, "compute"))
    assert drawn <= 1200


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=30))
def test_any_text_gives_well_formed_xml(actor: str, what: str, title: str) -> None:
    odd = Span(actor, what, title, actor, "compute", 0, 0.0, 1.0)
    root = ElementTree.fromstring(draw_timelines([Timeline.of(what, [odd, replace(odd, kind=title)])], title))
    assert root.tag == f"{SVG}svg"


@pytest.mark.parametrize("length_us", [1e-300, 5e-324])
def test_a_timeline_that_takes_next_to_no_time_is_drawn(length_us: float) -> None:
    span = Span("A", "cpu", "compute", "n1", "run n1", 0, 0.0, length_us)
    assert ElementTree.fromstring(draw_timelines([Timeline.of("x", [span])])).tag == f"{SVG}svg"


def test_saved_files_are_whole_and_replace_what_was_there(tmp_path: Path) -> None:
    for name in ("x.json", "x.svg", "y.JSON", ".svg"):
        (tmp_path / name).write_text("old")
        EXAMPLE.save(tmp_path / name)
    assert json.loads((tmp_path / "x.json").read_text()) == EXAMPLE.to_chrome()
    assert (tmp_path / "x.svg").read_text(encoding="utf-8") == draw_timelines([EXAMPLE])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".svg", "x.json", "x.svg", "y.JSON"]


@pytest.mark.parametrize("name", ["x.png", "x", "json"])
def test_other_suffixes_are_refused_with_a_hint(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"unknown suffix(.|\n)*\nhint: \.json is a trace"):
        EXAMPLE.save(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def refuse(path: Path, target: Path) -> Path:
    raise PermissionError(f"{path} to {target}")


def test_a_failed_save_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.svg").write_text("old")
    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(PermissionError):
        EXAMPLE.save(tmp_path / "x.svg")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.svg", "old")]


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        EXAMPLE.save(tmp_path / "none" / "x.json")
