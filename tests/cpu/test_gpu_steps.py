"""Steps of the GPU benchmarks: what one gave is kept whatever becomes of the next, and nothing of a worker stays."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.gpu_steps import Book, Side, median_of, spread_of
from tests.helpers.ended import await_no_process

LIMIT_S = 30.0


@pytest.fixture
def book(tmp_path: Path) -> Book:
    return Book(tmp_path / "results" / "steps.jsonl")


@pytest.fixture
def side() -> Iterator[Side]:
    side = Side("slow", "tests.helpers.slow_worker")
    yield side
    side.close()


def test_a_step_that_hangs_is_ended_and_loses_no_other(book: Book, side: Side) -> None:
    side.ask(book, "first", {"measure": "echo", "samples": [1.0, 2.0]}, limit_s=LIMIT_S)
    assert side.ask(book, "second", {"measure": "hang"}, limit_s=0.3) is None
    side.ask(book, "first", {"measure": "echo", "samples": [4.0]}, limit_s=LIMIT_S)  # a new worker
    assert book.blocks("first", "slow") == [[1.0, 2.0], [4.0]]
    assert book.failures() == ["slow, second: no answer within 0.3 s; not an answer"]
    assert [json.loads(line) for line in book.path.read_text().splitlines()] == book.rows
    assert not book.has_wrong_value


def test_a_step_that_fails_leaves_its_worker_alive(book: Book, side: Side) -> None:
    assert side.ask(book, "wrong", {"measure": "fail"}, limit_s=LIMIT_S) is None
    assert side.ask(book, "right", {"measure": "echo", "samples": []}, limit_s=LIMIT_S) is not None
    assert book.failures() == ["slow, wrong: WrongValue: 2 is not 3"]
    assert book.has_wrong_value


@pytest.mark.parametrize("measure", ["hang", "echo"])
def test_what_a_worker_leaves_ends_with_it(book: Book, side: Side, measure: str) -> None:
    left = side.ask(book, "leave", {"measure": "leave"}, limit_s=LIMIT_S)
    assert left is not None
    side.ask(book, measure, {"measure": measure, "samples": []}, limit_s=0.3 if measure == "hang" else LIMIT_S)
    side.close()
    await_no_process(left["pid"], 5.0)


def test_medians_and_spreads_of_blocks() -> None:
    blocks = [[1.0, 2.0, 3.0], [10.0], [4.0, 6.0]]
    assert median_of(blocks) == 3.5
    assert spread_of(blocks, digits=1) == "3.5 (2.0 to 10.0)"
    assert median_of([]) is None
    assert spread_of([]) == "-"


def test_verdicts_of_the_overlap_program_and_the_hops(book: Book) -> None:
    pytest.importorskip("torch")
    from benchmarks import gpu_hops, gpu_overlap

    book.add("bare", "crossfade", {"made": [200.0], "moved": [550.0]})
    book.add(gpu_overlap.ALONE, "crossfade", {"samples": [6000.0]})
    book.add(gpu_overlap.IN_A_ROW, "crossfade", {"samples": [6200.0]})
    book.add(gpu_overlap.READ, "crossfade", {"samples": [6300.0]})
    book.add(gpu_overlap.BENEATH, "crossfade", {"samples": [6510.0], "host_us": [26.0]})
    book.add("with overlap", "crossfade", {"samples": [7020.0], "host_us": [20.0]})
    book.add("with overlap, 4 in flight", "crossfade", {"samples": [6820.0], "host_us": [27.0]})
    tables, ratios = gpu_overlap.tables_of(book)
    assert {name: round(over, 3) for name, over in ratios.items()} == {
        gpu_overlap.BENEATH: 1.05,
        "crossfade, with overlap": 1.04,
        "crossfade, with overlap, 4 in flight": 1.1,
    }
    assert "20 to 27 us" in tables[-1].title
    assert [list(row[1:]) for row in tables[-1].rows[:2]] == [
        ["1.050 (1.050 to 1.050)", "1", "-", "0"],
        ["1.040 (1.040 to 1.040)", "1", "-", "0"],
    ]
    assert list(tables[-1].rows[3][1:]) == ["-", "0", "1.100 (1.100 to 1.100)", "1"]
    assert not gpu_overlap.verdict(ratios)[1]
    assert gpu_overlap.verdict({**ratios, "crossfade, with overlap, 4 in flight": 1.05})[1]
    assert gpu_hops.limit_us("128 MB", "last", 340.0) == pytest.approx(449.0)
    assert (gpu_hops.limit_us("2 KB", "shape", 5.0), gpu_hops.limit_us("2 MB", "last", 9.0)) == (45.0, 75.0)


def test_what_a_transfer_costs_is_told_with_the_clock_of_that_time(book: Book) -> None:
    pytest.importorskip("torch")
    from benchmarks.gpu_transfer_cost import AGAIN, NONE, SIDE, WAYS, Clock, table_of

    clock = Clock()
    for line in (
        "2026/11/22 13:00:01.500, 1980, 650.5\n",
        "2026/11/22 13:00:02.000, 1900, 699.5\n",
        "[N/A], [N/A]",
        "2026",
    ):
        clock.add(line)
    (first, mhz, _), (second, *_) = clock.samples
    assert (mhz, second - first) == (1980.0, 0.5)
    moved = list(WAYS)[1]
    for kind in ("random", "zeros"):
        for name, taken_us in ((NONE, 3000.0), (AGAIN, 3000.0), (moved, 3060.0 if kind == "random" else 3000.0)):
            book.add(f"{kind}: {name}", SIDE, {"samples": [taken_us], "span": (first - 0.1, first + 0.1)})
    rows = {row[0]: list(row[1:]) for row in table_of(book, clock).rows}
    assert rows[moved][:4] == ["3060 (3060 to 3060)", "+2.0 %", "1980", "650"]
    assert rows[moved][5] == "+0.0 %"
    assert rows["by the receiver's engine"] == ["-"] * 8
