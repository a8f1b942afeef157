"""What `benchmarks.tile_ops` does with rows, files and figures, without measuring."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from benchmarks import tile_ops, tile_plot
from benchmarks.tile_figures import Measured, geometric_mean
from benchmarks.tile_ops import Book, merge, run
from benchmarks.tile_report import MACHINE, summary, text_of
from benchmarks.tile_rows import A2A, AG, AR, CROSSFADE, CUBLAS, FUSED, NCCL, RS, SERIAL, Row, counts_of, rows_of
from benchmarks.workers import WorkerFailed
from crossfade.ops.calls.job import Operator

ROW = Row(RS, 8192, 8192, 2048, 4)
Answer = dict[str, Any]


def side(*blocks: Sequence[float], **errors: str) -> Answer:
    return {"captured": [list(block) for block in blocks], "errors": errors, "worst": 0.002}


def answer(**more: Answer) -> Answer:
    """A rank's: 0.4 ms of cuBLAS and 0.4 of NCCL, 0.8 one after the other."""
    sides = {
        CUBLAS: side([400.0], [400.0]),
        NCCL: side([420.0], [380.0]),
        SERIAL: side([800.0], [840.0]),
        FUSED: side([700.0], [700.0], right="wrong, captured"),
        "chunked(chunks=2)": side([750.0], [790.0]),
        "rounds(rounds=1)": side([600.0], [600.0]),
        CROSSFADE: side([600.0], [600.0]),
        **more,
    }
    predicted = {"plain": {"captured": 810.0}, "rounds(rounds=1)": {"captured": 630.0, "eager": 700.0}}
    choice = {"predicted_us": predicted, "untuned": "rounds(rounds=1)", "chosen": "rounds(rounds=1)", "is_tuned": True}
    return {"sides": sides, "choice": choice, "num_sms": 132}


def line(row: Row = ROW, more: Mapping[str, Answer] | None = None) -> Answer:
    return {"key": row.key, "row": row.to_data(), **answer(**(more or {})), "taken_s": 1.0}


@dataclass
class Ranks:
    """Answers in order; a text is what hung."""

    answers: list[Answer | str]
    asked: list[Mapping[str, Any]] = field(default_factory=list)

    def ask(self, request: Mapping[str, Any], limit_s: float) -> list[Answer]:
        self.asked.append(request)
        self.last = self.answers.pop(0)
        if isinstance(self.last, str):
            raise WorkerFailed("no answer within 90 s")
        return [self.last, self.last]

    def doing(self) -> str:
        return str(self.last)

    def stacks(self) -> str:
        return ""

    def close(self) -> None: ...


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_the_matrix(num_ranks: int) -> None:
    for operator in Operator:
        rows = rows_of("core", [operator], num_ranks)
        assert len(rows) == 8
        assert len({row.key for row in rows}) == 8
        every = rows_of("full", [operator], num_ranks)
        assert every[:8] == rows
        for row in every:
            assert row.m % num_ranks == 0
            counts = counts_of(row)
            assert [sum(each) for each in counts] == [row.m] * num_ranks
            assert row.buffer_bytes >= num_ranks * max(map(max, counts)) * (row.k if operator == AG else row.n) * 2
            assert Row(**json.loads(json.dumps(row.to_data()))) == row
    assert any(row.is_uneven for row in rows_of("core", [A2A], num_ranks))


def test_rows_go_on_where_a_run_was_cut_off(tmp_path: Path) -> None:
    path, other = tmp_path / "out.jsonl", Row(AR, 512, 8192, 7168, 4)
    ranks = Ranks([answer(), answer()])
    assert run(Book(path), [ROW], ranks, {}) == 1
    with path.open("a") as file:
        file.write('{"key": "half a')
    book = Book(path)
    assert run(book, [ROW, other], ranks, {}) == 1
    assert [each["row"]["operator"] for each in ranks.asked] == [RS, AR]
    assert run(Book(path), [ROW, other], ranks, {}) == 0
    assert [each["key"] for each in Book(path).lines] == [ROW.key, other.key]
    assert not Book(path).is_done(f"{ROW.key}, baselines")


def test_no_row_is_begun_when_the_time_is_over(tmp_path: Path) -> None:
    assert run(Book(tmp_path / "out.jsonl"), [ROW], Ranks([]), {}, seconds=-1) == 0


def test_a_row_that_hangs_is_tried_without_what_hung(tmp_path: Path) -> None:
    path, ranks = tmp_path / "out.jsonl", Ranks(["operands", "fused|captured", answer()])
    assert run(Book(path), [ROW], ranks, {}) == 1
    assert [each["left_out"] for each in ranks.asked] == [[], [], ["fused|captured"]]
    assert [each.get("doing") for each in Book(path).lines] == ["operands", "fused|captured", None]


def test_a_row_that_always_hangs_costs_three_tries(tmp_path: Path) -> None:
    book, ranks = Book(tmp_path / "out.jsonl"), Ranks(["a|eager", "b|eager", "c|eager", answer()])
    assert run(book, [ROW, Row(AR, 512, 8192, 7168, 4)], ranks, {}) == 1
    assert [each["left_out"] for each in ranks.asked[:3]] == [[], ["a|eager"], ["a|eager", "b|eager"]]
    assert not book.is_done(ROW.key)
    assert "ended" in text_of(book.lines)


def test_ranks_that_cannot_start_end_the_run(tmp_path: Path) -> None:
    ranks = Ranks(["joining", "joining"])
    assert run(Book(tmp_path / "out.jsonl"), rows_of("core", [*Operator], 4), ranks, {}) == 0
    assert len(ranks.asked) == 2


def test_the_slowest_rank_of_each_batch_counts() -> None:
    slow = answer()
    slow["sides"][NCCL] = {"captured": [[410.0], [390.0]], "errors": {"eager": "no memory"}, "worst": 0.004}
    fast = answer()
    fast["sides"][NCCL]["errors"] = {"eager": "failed on another rank"}
    merged = merge([fast, slow])["sides"][NCCL]
    assert merged == {"captured": [[420.0], [390.0]], "errors": {"eager": "no memory"}, "worst": 0.004}


def test_figures_of_a_row() -> None:
    each = Measured.of(line())
    # A wave is 132 // 32 rows of tiles, of 128: a sixteenth of the rows.
    bound = each.bound
    assert bound is not None
    assert (bound.num_rows, bound.by) == (512, NCCL)
    assert bound.time_us == pytest.approx(400 + 400 / 16)
    assert each.fastest(each.baselines) == "chunked(chunks=2)"  # torch's fused one gave something wrong
    over = each.over(SERIAL)
    assert over is not None
    assert (over.low, over.median, over.high) == pytest.approx((800 / 600, 820 / 600, 840 / 600))
    assert each.share_of_bound() == pytest.approx(425 / 600)
    assert not each.fell_back
    assert each.model_error("rounds(rounds=1)", "captured") == pytest.approx(0.05)
    assert each.model_error("rounds(rounds=1)", "eager") is None
    assert each.untuned_speed("captured") == 1
    assert each.wrong == [f"{FUSED}: wrong, captured"]


def test_bounds_of_short_rows_and_of_gathers() -> None:
    short = Measured.of(line(Row(RS, 512, 8192, 7168, 4))).bound
    assert short is not None
    assert short.num_rows == 128
    assert short.time_us == pytest.approx(500)
    gathers = Measured.of(line(Row(AG, 8192, 8192, 2048, 4), {NCCL: side([500.0])})).bound
    assert gathers is not None
    assert gathers.time_us == pytest.approx(500 + 400 / 16)


def test_what_was_not_captured_is_eager() -> None:
    each = Measured.of(line(more={SERIAL: {"eager": [[900.0]], "errors": {"captured": "no"}, "worst": 0.0}}))
    assert each.mode_of(SERIAL) == "eager"
    assert each.us(SERIAL) == 900
    assert "900" in json.dumps(each.sides[SERIAL])
    assert "0.900 (0.900 to 0.900, eager)" in text_of([line(more={SERIAL: dict(each.sides[SERIAL])})])


def test_the_report_and_the_plot() -> None:
    lines = [
        line(),
        line(Row(AR, 512, 8192, 7168, 4)),
        line(Row(A2A, 8192, 7168, 2048, 4, is_uneven=True)),
        {"key": ROW.key, "row": ROW.to_data(), "failed": "no answer", "doing": "fused|captured"},
        {MACHINE: "4 x NVIDIA H200; torch", "command": "python -m benchmarks.tile_ops run /somewhere/out.jsonl"},
    ]
    text = text_of(lines, tile_ops.__doc__ or "", "A note.", "plot.svg")
    assert "4 x NVIDIA H200; torch" in text
    assert "/somewhere" not in text
    assert "![Times faster than cuBLAS + NCCL, by row](plot.svg)" in text
    assert "| matmul_reduce_scatter | 1 | 1.367 (wanted: 1.20)" in text
    assert "at fused|captured: no answer" in text
    assert f"- {ROW.key}: {FUSED}: wrong, captured" in text
    assert summary(lines[0]).startswith(f"{ROW.key} (1.0 s): {CUBLAS} 0.400; ")
    root = ElementTree.fromstring(tile_plot.svg([Measured.of(each) for each in lines[:3]]))
    assert len([each for each in root if each.tag.endswith("rect")]) == 1 + 3 + 6
    assert tile_plot.svg([]).endswith("</svg>\n")


def test_geometric_mean() -> None:
    assert geometric_mean([2.0, None, 0.5]) == pytest.approx(1.0)
    assert geometric_mean([None]) is None
