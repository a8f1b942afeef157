"""What the benchmark of batches makes of what its ranks wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="batches are torch's")

from benchmarks.batches import num_right, read, table, text


def blocks(case: str, times: Mapping[str, Sequence[float]], ways: Sequence[str] = ()) -> list[dict[str, object]]:
    """What a benchmark's ranks write of them. ``ways``: what crossfade's took."""
    rows: list[dict[str, object]] = [
        {"case": case, "side": side, "round": number, "ms": each}
        for side, taken in times.items()
        for number, each in enumerate(taken)
    ]
    for row, way in zip((row for row in rows if row["side"] == "crossfade"), ways, strict=bool(ways)):
        row["way"] = way
    return rows


@pytest.mark.parametrize(("in_a_handle", "right"), [(10.2, 1), (9.7, 0)])
def test_the_benchmark_compares_captured_ways_as_the_handle_has_them(in_a_handle: float, right: int) -> None:
    case, chose = "0: a model, captured", "process groups, captured"
    times = {"one batch": [9.5], "crossfade": [10.0], "crossfade, one batch": [in_a_handle]}
    times |= {"crossfade, process groups": [10.0], "crossfade, copy engines": [11.0]}
    assert num_right(blocks(case, times, [chose])) == (
        f"the chosen way is within 2 % of the best one in {right} of 1 cases, crossfade's own time in 0"
    )


@pytest.mark.parametrize(
    ("ways", "ours", "right"),
    [
        (["one batch", "one batch", "process groups"], [6.7, 6.7, 5.6], 1),
        (["process groups", "one batch", "process groups"], [9.5, 6.7, 5.6], 1),
        (["one batch", "one batch", "one batch"], [6.7, 6.7, 6.7], 1),
        (["process groups", "process groups", "one batch"], [9.5, 9.4, 6.7], 0),
    ],
)
def test_the_benchmark_counts_each_round_for_what_was_chosen_in_it(
    ways: list[str], ours: list[float], right: int
) -> None:
    """A host that is slow for two rounds, and fast for one."""
    times = {"one batch": [6.6, 6.7, 6.6], "crossfade": ours, "crossfade, process groups": [9.6, 9.5, 5.5]}
    said = num_right(blocks("0: a model", times | {"crossfade, copy engines": [10.0] * 3}, ways))
    assert said.startswith(f"the chosen way is within 2 % of the best one in {right} of 1 cases")


def test_the_benchmark_tells_medians_and_what_went_wrong(tmp_path: Path) -> None:
    rows = blocks("a", {"one batch": (10.0, 12.0, 11.0), "halves, NCCL": (9.0,), "crossfade": (10.0, 10.0)})
    rows += [
        {"case": "a", "side": "crossfade", "is_right": True, "error": 0.0},
        {"case": "b", "failed": "rank 1: hung"},
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    lines = table(read(tmp_path)).markdown().splitlines()
    assert "11.00 (10.00 to 12.00)" in lines[3]
    assert "| 1.100 | 0.900 |" in lines[3]
    assert "rank 1: hung" in lines[4]
    assert "- c: there was no time left" in text(read(tmp_path), ["c: there was no time left"], "command")


def test_the_benchmark_counts_what_a_run_that_was_ended_has_written() -> None:
    times = {"one batch": [6.6, 6.7, 6.6], "crossfade": [5.5, 5.6, 5.6], "crossfade, process groups": [5.5, 5.5]}
    said = num_right(blocks("0: a model", times, ["process groups"] * 3))
    assert said == "the chosen way is within 2 % of the best one in 1 of 1 cases, crossfade's own time in 1"
